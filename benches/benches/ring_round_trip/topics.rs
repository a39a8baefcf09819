//! `iceoryx2` again, with publish-subscribe: one topic there and one back. It does less than
//! request-response, for nothing ties a response to its request.

#![expect(unsafe_code, reason = "a payload that was filled must be declared so")]

use std::mem::MaybeUninit;

use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::{Alignment, Node, ServiceName, ipc};
use iceoryx2::sample::Sample;
use iceoryx2::sample_mut_uninit::SampleMutUninit;

use crate::echo;
use crate::iceoryx::{ALIGNMENT, Events, node};
use crate::transport::{Client, Result, Server, Setup};

type Loan = SampleMutUninit<ipc::Service, [MaybeUninit<u8>], ()>;

/// One side: a topic to write and a topic to read.
pub(crate) struct Topics {
    publisher: Publisher<ipc::Service, [u8], ()>,
    subscriber: Subscriber<ipc::Service, [u8], ()>,
    /// Memory for the next message.
    next: Option<Loan>,
    events: Option<Events>,
    size: usize,
    _node: Node<ipc::Service>,
}

impl Topics {
    pub(crate) fn server(setup: &Setup) -> Result<Self> {
        Self::new(setup, ["topic of requests", "topic of responses"])
    }

    pub(crate) fn client(setup: &Setup) -> Result<Self> {
        Self::new(setup, ["topic of responses", "topic of requests"])
    }

    fn new(setup: &Setup, [read, written]: [&str; 2]) -> Result<Self> {
        let node = node(setup)?;
        let alignment = Alignment::new(ALIGNMENT).ok_or("an alignment is a power of two")?;
        let topic = |name: &str| -> Result<_> {
            let builder = node.service_builder(&ServiceName::new(name)?);
            let builder = builder
                .publish_subscribe::<[u8]>()
                .payload_alignment(alignment);
            let builder = builder.max_publishers(1).max_subscribers(1);
            Ok(builder
                .history_size(0)
                .subscriber_max_buffer_size(1)
                .open_or_create()?)
        };
        let builder = topic(written)?;
        let builder = builder.publisher_builder();
        let publisher = builder
            .initial_max_slice_len(setup.size)
            .max_loaned_samples(2)
            .create()?;
        Ok(Self {
            next: Some(publisher.loan_slice_uninit(setup.size)?),
            publisher,
            subscriber: topic(read)?.subscriber_builder().create()?,
            events: Events::new(&node, setup, [read, written])?,
            size: setup.size,
            _node: node,
        })
    }

    /// Sends what `fill` writes, and loans the memory for the next message.
    fn send(&mut self, fill: impl FnOnce(&mut [MaybeUninit<u8>])) -> Result<()> {
        let mut message = self.next.take().ok_or("loaned by the call before")?;
        fill(message.payload_mut());
        // SAFETY: `fill` wrote every byte: what it is filled from has the same length.
        unsafe { message.assume_init() }.send()?;
        Events::wake(self.events.as_ref())?;
        self.next = Some(self.publisher.loan_slice_uninit(self.size)?);
        Ok(())
    }

    fn receive(&self) -> Result<Sample<ipc::Service, [u8], ()>> {
        loop {
            if let Some(message) = self.subscriber.receive()? {
                return Ok(message);
            }
            Events::wait(self.events.as_ref())?;
        }
    }
}

impl Server for Topics {
    fn answer(&mut self) -> Result<()> {
        let request = self.receive()?;
        self.send(|response| echo::answer_uninit(request.payload(), response))
    }
}

impl Client for Topics {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.send(|message| {
            message.write_copy_of_slice(request);
        })?;
        read(self.receive()?.payload());
        Ok(())
    }
}
