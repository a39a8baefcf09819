//! Threads that outlive every panic of their work.

use std::io;
use std::num::NonZeroUsize;
use std::panic::{self, AssertUnwindSafe};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Work for a thread.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Starts threads that do what is sent until the sender is dropped. A panic ends the task, not the thread.
pub(crate) fn start(
    name: &str,
    threads: NonZeroUsize,
    stack: usize,
    tasks: Receiver<Task>,
) -> io::Result<()> {
    let tasks = Arc::new(Mutex::new(tasks));
    for _ in 0..threads.get() {
        let tasks = Arc::clone(&tasks);
        let work = move || {
            while let Some(task) = next(&tasks) {
                // The hook has reported the panic; whoever waits for the task has a guard of its own.
                let _ = panic::catch_unwind(AssertUnwindSafe(task));
            }
        };
        spawn(name, stack, work)?;
    }
    Ok(())
}

/// Starts a thread with a stack of this size, of which the system provides what is touched.
pub(crate) fn spawn(
    name: &str,
    stack: usize,
    work: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.stack_size(stack).spawn(work).map(drop)
}

/// Waits for the next one; `None` when the sender is gone.
pub(crate) fn next<T>(tasks: &Mutex<Receiver<T>>) -> Option<T> {
    lock(tasks).recv().ok()
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
