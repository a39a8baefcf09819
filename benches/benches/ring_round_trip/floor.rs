//! What no transport over shared memory can beat on this machine: a number there and a number back,
//! each in a cache line of its own; without the payload, and with it.

#![expect(unsafe_code, reason = "shared memory is raw memory")]

use std::fs::OpenOptions;
use std::slice;
use std::sync::atomic::{AtomicU32, Ordering};

use memmap2::{MmapOptions, MmapRaw};
use pie_ring::Wait;
use rustix::io::Errno;
use rustix::thread::futex::{self, Flags};

use crate::echo;
use crate::transport::{Client, Result, Server, Setup};

/// Two lines apart: processors fetch lines in pairs.
const RESPONSE_WORD: usize = 128;
const PAYLOAD: usize = 4096;

/// Two words and two payloads that both processes map.
struct Shared {
    memory: MmapRaw,
    size: usize,
    wait: Wait,
    /// Number of the latest request.
    number: u32,
}

impl Shared {
    fn create(setup: &Setup, name: &str) -> Result<Self> {
        let path = format!("/dev/shm/{}_{name}", setup.prefix);
        let bytes = PAYLOAD + 2 * setup.size;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).open(path)?;
        file.set_len(bytes as u64)?;
        Self::map(&file, setup)
    }

    /// Maps the server's file, which then needs its name no longer.
    fn open(setup: &Setup, name: &str) -> Result<Self> {
        let path = format!("/dev/shm/{}_{name}", setup.prefix);
        let file = OpenOptions::new().read(true).write(true).open(&path)?;
        std::fs::remove_file(path)?;
        Self::map(&file, setup)
    }

    fn map(file: &std::fs::File, setup: &Setup) -> Result<Self> {
        let memory = MmapOptions::new().populate().map_raw(file)?;
        let (size, wait) = (setup.size, setup.wait);
        Ok(Self {
            memory,
            size,
            wait,
            number: 0,
        })
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the first page of the mapping and aligned; only accessed atomically.
        unsafe { AtomicU32::from_ptr(self.memory.as_mut_ptr().add(offset).cast()) }
    }

    fn request_word(&self) -> &AtomicU32 {
        self.word(0)
    }

    fn response_word(&self) -> &AtomicU32 {
        self.word(RESPONSE_WORD)
    }

    fn request(&mut self) -> &mut [u8] {
        // SAFETY: inside the mapping; the words give the payload to one process at a time.
        unsafe { slice::from_raw_parts_mut(self.memory.as_mut_ptr().add(PAYLOAD), self.size) }
    }

    fn payloads(&mut self) -> (&[u8], &mut [u8]) {
        let start = self.memory.as_mut_ptr().wrapping_add(PAYLOAD);
        // SAFETY: two ranges inside the mapping that do not overlap; the words give both to one
        // process at a time.
        unsafe {
            (
                slice::from_raw_parts(start, self.size),
                slice::from_raw_parts_mut(start.add(self.size), self.size),
            )
        }
    }

    fn set(&self, word: &AtomicU32) {
        // SYNC: pairs with the acquire loads in `until_set`.
        word.store(self.number, Ordering::Release);
        if self.wait == Wait::Park {
            let _ = futex::wake(word, Flags::empty(), 1);
        }
    }

    fn until_set(&self, word: &AtomicU32) -> Result<()> {
        loop {
            // SYNC: pairs with the release store in `set`.
            let seen = word.load(Ordering::Acquire);
            if seen == self.number {
                return Ok(());
            }
            if self.wait == Wait::Park {
                match futex::wait(word, Flags::empty(), seen, None) {
                    Ok(()) | Err(Errno::AGAIN | Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    fn ask(&mut self) -> Result<()> {
        self.number = self.number.wrapping_add(1);
        self.set(self.request_word());
        self.until_set(self.response_word())
    }

    fn await_request(&mut self) -> Result<()> {
        self.number = self.number.wrapping_add(1);
        self.until_set(self.request_word())
    }
}

/// One line there, one line back.
pub(crate) struct PingPong(Shared);

impl PingPong {
    const NAME: &str = "ping_pong";

    pub(crate) fn create(setup: &Setup) -> Result<Self> {
        Ok(Self(Shared::create(setup, Self::NAME)?))
    }

    pub(crate) fn open(setup: &Setup) -> Result<Self> {
        Ok(Self(Shared::open(setup, Self::NAME)?))
    }
}

impl Server for PingPong {
    fn answer(&mut self) -> Result<()> {
        self.0.await_request()?;
        self.0.set(self.0.response_word());
        Ok(())
    }
}

impl Client for PingPong {
    /// There is no response to read.
    fn call(&mut self, _request: &[u8], _read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.0.ask()
    }
}

/// The same with the request copied in and the response made in place.
pub(crate) struct Memcpy(Shared);

impl Memcpy {
    const NAME: &str = "memcpy";

    pub(crate) fn create(setup: &Setup) -> Result<Self> {
        Ok(Self(Shared::create(setup, Self::NAME)?))
    }

    pub(crate) fn open(setup: &Setup) -> Result<Self> {
        Ok(Self(Shared::open(setup, Self::NAME)?))
    }
}

impl Server for Memcpy {
    fn answer(&mut self) -> Result<()> {
        self.0.await_request()?;
        let (request, response) = self.0.payloads();
        echo::answer(request, response);
        self.0.set(self.0.response_word());
        Ok(())
    }
}

impl Client for Memcpy {
    fn call(&mut self, request: &[u8], read: &mut dyn FnMut(&[u8])) -> Result<()> {
        self.0.request().copy_from_slice(request);
        self.0.ask()?;
        read(self.0.payloads().1);
        Ok(())
    }
}
