//! The compiler process.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;

use rustix::process::{
    DumpableBehavior, Resource, Rlimit, Signal, set_dumpable_behavior,
    set_parent_process_death_signal, setrlimit,
};

use super::{CompileReply, Setup, receive, receive_bytes, send};
use crate::budget::MemoryBudget;
use crate::error::GrammarError;
use crate::grammar::Grammar;
use crate::model::Model;
use crate::vocabulary::Vocabulary;

/// Serves a [`Compiler`](crate::Compiler) that has started this process by its [`CompilerCommand`](crate::CompilerCommand), through the
/// socket that is the standard input. Returns when the compiler closes it. To be called from a process of its own: it limits the
/// memory of the whole process, and its death.
///
/// # Errors
/// An I/O error if the standard input is not such a socket.
pub fn compiler_process() -> io::Result<()> {
    // The socket tells of the parent's end, too, but not while a grammar is compiled.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // Its crashes are expected: they leave no dumps, and write nothing.
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    panic::set_hook(Box::new(|_| {}));
    let mut socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let setup: Setup = receive(&mut socket)?;
    let bytes = receive_bytes(&mut socket)?;
    let thread = thread::Builder::new().stack_size(setup.stack);
    let serve = thread.spawn(move || serve(&mut socket, setup, &bytes))?;
    serve
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the compiler panicked")))
}

fn serve(socket: &mut UnixStream, setup: Setup, bytes: &[u8]) -> io::Result<()> {
    let memory = setup.memory;
    let model = model(setup, bytes).map_err(io::Error::other)?;
    limit_memory(memory)?;
    send(socket, &CompileReply::Ready)?;
    loop {
        let grammar: Grammar = match receive(socket) {
            Ok(grammar) => grammar,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            Err(error) => return Err(error),
        };
        let compile = AssertUnwindSafe(|| model.compile(&grammar).map(drop));
        let verdict = match panic::catch_unwind(compile) {
            Ok(Ok(())) => CompileReply::Ready,
            Ok(Err(GrammarError::Wrong { reason, .. })) => CompileReply::Wrong(reason),
            Ok(Err(other)) => CompileReply::Wrong(other.to_string()),
            Err(_) => CompileReply::Panicked,
        };
        send(socket, &verdict)?;
    }
}

fn model(setup: Setup, bytes: &[u8]) -> Result<Model, String> {
    let mut rest = bytes;
    let mut words = Vec::with_capacity(setup.lengths.len());
    for length in setup.lengths {
        let (word, after) = rest
            .split_at_checked(length as usize)
            .ok_or("tokens are missing")?;
        words.push(word.into());
        rest = after;
    }
    let vocabulary = Vocabulary::shared(Arc::new(words), setup.special, &setup.ends)
        .map_err(|error| error.to_string())?;
    // The limit of the process is what counts.
    let json = (setup.space, setup.strict_schemas);
    Model::new(vocabulary, None, json, MemoryBudget::new(usize::MAX))
}

/// Lets the process have so many more bytes of address space than it has now.
fn limit_memory(more: u64) -> io::Result<()> {
    let status = fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let kilobytes = size.and_then(|size| size.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let kilobytes = kilobytes.ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))?;
    let limit = kilobytes.saturating_mul(1024).saturating_add(more);
    let limit = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    Ok(setrlimit(Resource::As, limit)?)
}
