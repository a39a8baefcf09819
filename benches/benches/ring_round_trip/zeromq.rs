//! `ZeroMQ`, REQ and REP over `ipc://` with an abstract name.

use std::thread;

use zmq::{Context, DONTWAIT, Error, Message, Socket, SocketType};

use crate::echo;
use crate::transport::{Client, Result, Server, Setup};

fn endpoint(setup: &Setup) -> String {
    format!("ipc://@{}_zeromq", setup.prefix)
}

/// Receives into `message`. A spinning side asks again and again, and lets the threads that move the
/// bytes have the core in between: on a machine with two, there is no other for them.
fn receive(socket: &Socket, message: &mut Message, spinning: bool) -> Result<()> {
    let flags = if spinning { DONTWAIT } else { 0 };
    loop {
        match socket.recv(message, flags) {
            Err(Error::EAGAIN) => thread::yield_now(),
            result => return Ok(result?),
        }
    }
}

pub(crate) struct ZeroMqServer {
    socket: Socket,
    request: Message,
    spinning: bool,
}

impl ZeroMqServer {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let socket = Context::new().socket(SocketType::REP)?;
        socket.bind(&endpoint(setup))?;
        Ok(Self {
            socket,
            request: Message::new(),
            spinning: setup.is_spinning(),
        })
    }
}

impl Server for ZeroMqServer {
    fn answer(&mut self) -> Result<()> {
        receive(&self.socket, &mut self.request, self.spinning)?;
        let mut response = Message::with_size(self.request.len());
        echo::answer(&self.request, &mut response);
        Ok(self.socket.send(response, 0)?)
    }
}

pub(crate) struct ZeroMqClient {
    socket: Socket,
    response: Message,
    spinning: bool,
}

impl ZeroMqClient {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let socket = Context::new().socket(SocketType::REQ)?;
        socket.connect(&endpoint(setup))?;
        Ok(Self {
            socket,
            response: Message::new(),
            spinning: setup.is_spinning(),
        })
    }
}

impl Client for ZeroMqClient {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.socket.send(request, 0)?;
        receive(&self.socket, &mut self.response, self.spinning)?;
        read(&self.response);
        Ok(())
    }
}
