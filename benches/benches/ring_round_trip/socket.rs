//! A Unix socket with an abstract name: blocking to park, non-blocking to spin.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, connect, listen, socket};

use crate::echo;
use crate::transport::{Client, Result, Server, Setup};

fn address(setup: &Setup) -> Result<SocketAddrUnix> {
    let name = format!("{}_socket", setup.prefix);
    Ok(SocketAddrUnix::new_abstract_name(name.as_bytes())?)
}

/// A socket of the faster type: a stream costs less per message, packets less per byte. The largest
/// size does not fit into a packet.
fn new_socket(setup: &Setup) -> Result<OwnedFd> {
    let kind = match setup.size {
        1024..=65536 => SocketType::SEQPACKET,
        _ => SocketType::STREAM,
    };
    Ok(socket(AddressFamily::UNIX, kind, None)?)
}

/// Messages of one size. A non-blocking socket is asked again at once.
struct Stream(UnixStream);

impl Stream {
    fn new(stream: UnixStream, setup: &Setup) -> Result<Self> {
        stream.set_nonblocking(setup.is_spinning())?;
        Ok(Self(stream))
    }

    fn send(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            match self.0.write(bytes) {
                Ok(sent) => bytes = &bytes[sent..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive(&mut self, bytes: &mut [u8]) -> Result<()> {
        let mut filled = 0;
        while filled < bytes.len() {
            match self.0.read(&mut bytes[filled..]) {
                Ok(0) => return Err("the other side has closed the socket".into()),
                Ok(read) => filled += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

pub(crate) struct SocketServer {
    listener: UnixListener,
    stream: Option<Stream>,
    request: Vec<u8>,
    response: Vec<u8>,
    setup: Setup,
}

impl SocketServer {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let socket = new_socket(setup)?;
        bind(&socket, &address(setup)?)?;
        listen(&socket, 1)?;
        Ok(Self {
            listener: UnixListener::from(socket),
            stream: None,
            request: vec![0; setup.size],
            response: vec![0; setup.size],
            setup: setup.clone(),
        })
    }
}

impl Server for SocketServer {
    fn answer(&mut self) -> Result<()> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            // The client connects once, before its first call.
            none => none.insert(Stream::new(self.listener.accept()?.0, &self.setup)?),
        };
        stream.receive(&mut self.request)?;
        echo::answer(&self.request, &mut self.response);
        stream.send(&self.response)
    }
}

pub(crate) struct SocketClient {
    stream: Stream,
    response: Vec<u8>,
}

impl SocketClient {
    pub(crate) fn new(setup: &Setup) -> Result<Self> {
        let socket = new_socket(setup)?;
        connect(&socket, &address(setup)?)?;
        Ok(Self {
            stream: Stream::new(UnixStream::from(socket), setup)?,
            response: vec![0; setup.size],
        })
    }
}

impl Client for SocketClient {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.stream.send(request)?;
        self.stream.receive(&mut self.response)?;
        read(&self.response);
        Ok(())
    }
}
