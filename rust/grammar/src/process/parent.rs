//! The parent of a compiler process.

use std::env;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{CompileReply, Setup, receive, send, send_bytes};
use crate::error::GrammarError;
use crate::grammar::Grammar;
use crate::limits::{CompilerCommand, Limits, Settings};
use crate::vocabulary::Vocabulary;

/// How long a process may take until it is ready for grammars: it loads a module and builds a token trie, on a busy machine.
const START: Duration = Duration::from_mins(1);
/// How often a process at work is looked after.
const POLL: Duration = Duration::from_millis(50);
/// The error of a read or write for which nobody waits any more: one that neither is repeated after.
const ABANDONED: io::ErrorKind = io::ErrorKind::ConnectionAborted;
/// Most that is read of what a process said before its end.
const LAST_WORDS: u64 = 4096;

/// A compiler process. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    socket: UnixStream,
    limits: Limits,
    /// Whether it has compiled nothing yet.
    pub(crate) is_fresh: bool,
}

/// Why a grammar did not pass.
#[derive(Debug)]
pub(crate) enum Failure {
    /// It is wrong. The process serves on.
    Grammar(GrammarError),
    /// The process has ended over it.
    Ended(GrammarError),
    /// It took too long, and the process was killed.
    TooSlow,
    /// Nobody waits for it any more, and the process was killed.
    Abandoned,
}

impl Process {
    /// Starts a process, and waits until it is ready.
    pub(crate) fn start(
        command: &CompilerCommand,
        vocabulary: &Vocabulary,
        settings: &Settings,
    ) -> io::Result<Self> {
        let (socket, other) = UnixStream::pair()?;
        // It needs no secrets of this one's environment.
        let kept = env::vars_os().filter(|(name, _)| name == "PATH" || name == "LD_LIBRARY_PATH");
        let child = Command::new(&command.program)
            .args(&command.arguments)
            .env_clear()
            .envs(kept)
            // Further heaps of the allocator would be room that its limit does not count.
            .env("MALLOC_ARENA_MAX", "1")
            .current_dir("/")
            .stdin(OwnedFd::from(other))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut process = Self {
            child,
            socket,
            limits: settings.limits,
            is_fresh: true,
        };
        process.set_up(vocabulary, settings).map_err(|error| {
            let (_, said) = process.end();
            let last = said.lines().last().unwrap_or_default().trim();
            match last {
                "" => error,
                last => io::Error::other(last.to_owned()),
            }
        })?;
        Ok(process)
    }

    fn set_up(&mut self, vocabulary: &Vocabulary, settings: &Settings) -> io::Result<()> {
        self.socket.set_write_timeout(Some(START))?;
        self.socket.set_read_timeout(Some(START))?;
        let words = vocabulary.words();
        let setup = Setup {
            lengths: words.iter().map(|word| word.len() as u32).collect(),
            special: vocabulary.special().to_vec(),
            ends: vocabulary.ends().to_vec(),
            space: settings.space.clone(),
            strict_schemas: settings.strict_schemas,
            stack: self.limits.stack,
            memory: self.limits.memory,
        };
        send(&mut self.socket, &setup)?;
        send_bytes(&mut self.socket, &words.concat())?;
        match receive(&mut self.socket)? {
            CompileReply::Ready => Ok(()),
            other => Err(io::Error::other(format!("it answered {other:?}"))),
        }
    }

    /// Has a grammar compiled, until `until` or until `is_abandoned`. After a failure other than [`Failure::Grammar`] the process is
    /// gone.
    pub(crate) fn compile(
        &mut self,
        grammar: &Grammar,
        until: Instant,
        is_abandoned: &dyn Fn() -> bool,
    ) -> Result<(), Failure> {
        let kind = grammar.kind();
        self.is_fresh = false;
        let mut socket = DeadlineSocket {
            socket: &self.socket,
            until,
            is_abandoned,
        };
        let answer = send(&mut socket, grammar).and_then(|()| receive(&mut socket));
        match answer {
            Ok(CompileReply::Ready) => Ok(()),
            Ok(CompileReply::Wrong(reason)) => {
                Err(Failure::Grammar(GrammarError::Wrong { kind, reason }))
            }
            Ok(CompileReply::Panicked) => Err(Failure::Grammar(GrammarError::Panicked { kind })),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(Failure::TooSlow),
            Err(error) if error.kind() == ABANDONED => Err(Failure::Abandoned),
            Err(_) => Err(Failure::Ended(self.reason(kind))),
        }
    }

    /// Why it ended over a grammar.
    fn reason(&mut self, kind: &'static str) -> GrammarError {
        let limits = self.limits;
        let (status, said) = self.end();
        let signal = status.and_then(|status| status.signal());
        let is = |number: Signal| signal == Some(number.as_raw());
        if is(Signal::SEGV) || is(Signal::BUS) || said.contains("overflowed its stack") {
            let limit = limits.stack;
            return GrammarError::TooDeep { kind, limit };
        }
        if said.contains("memory allocation of") {
            let limit = limits.memory;
            return GrammarError::TooLarge { kind, limit };
        }
        let status =
            status.map_or_else(|| "its status is not known".to_owned(), |it| it.to_string());
        GrammarError::Crashed { kind, status }
    }

    /// Ends it: how it ended, and what it said last.
    fn end(&mut self) -> (Option<ExitStatus>, String) {
        // A process that is gone cannot be killed.
        let _ = self.child.kill();
        let status = self.child.wait().ok();
        let mut said = Vec::new();
        if let Some(errors) = self.child.stderr.take() {
            // Best effort.
            let _ = errors.take(LAST_WORDS).read_to_end(&mut said);
        }
        (status, String::from_utf8_lossy(&said).into_owned())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// A socket that is read and written until a time, while somebody waits for it.
struct DeadlineSocket<'a> {
    socket: &'a UnixStream,
    until: Instant,
    is_abandoned: &'a dyn Fn() -> bool,
}

impl DeadlineSocket<'_> {
    /// One attempt after the other, each for a short time.
    fn wait(&self, mut attempt: impl FnMut(&UnixStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let slice = Some(left.min(POLL));
            self.socket.set_read_timeout(slice)?;
            self.socket.set_write_timeout(slice)?;
            match attempt(self.socket) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
            if (self.is_abandoned)() {
                return Err(ABANDONED.into());
            }
        }
    }
}

impl Read for DeadlineSocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.wait(|mut socket| socket.read(buffer))
    }
}

impl Write for DeadlineSocket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|mut socket| socket.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
