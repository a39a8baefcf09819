//! The kernel's part: comparing and falling asleep is one step, and a wake ends the sleep of those
//! that sleep on that very word.

use std::time::Duration;

use loom::sync::{Condvar, Mutex};

use crate::error::SystemError;
use crate::sync::atomic::{AtomicU32, Ordering};

loom::lazy_static! {
    static ref KERNEL: Kernel = Kernel {
        sleepers: Mutex::new(Vec::new()),
        changed: Condvar::new(),
    };
}

struct Kernel {
    sleepers: Mutex<Vec<Sleeper>>,
    changed: Condvar,
}

struct Sleeper {
    word: usize,
    has_limit: bool,
    awake: bool,
}

impl Kernel {
    fn wake(&self, which: impl Fn(&Sleeper) -> bool) -> usize {
        let mut sleepers = self.sleepers.lock().unwrap();
        let mut woken = 0;
        for sleeper in sleepers
            .iter_mut()
            .filter(|sleeper| !sleeper.awake && which(sleeper))
        {
            sleeper.awake = true;
            woken += 1;
        }
        self.changed.notify_all();
        woken
    }
}

fn address(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

pub(crate) fn wake_all(word: &AtomicU32) -> usize {
    let word = address(word);
    KERNEL.wake(|sleeper| sleeper.word == word)
}

/// Wakes all that do not sleep without end.
pub(crate) fn time_out() {
    KERNEL.wake(|sleeper| sleeper.has_limit);
}

pub(crate) fn wait(
    word: &AtomicU32,
    expected: u32,
    timeout: Option<Duration>,
) -> Result<(), SystemError> {
    let mut sleepers = KERNEL.sleepers.lock().unwrap();
    if word.load(Ordering::Relaxed) != expected {
        return Ok(());
    }
    // Entries stay, so that an index is an identity.
    let index = sleepers.len();
    sleepers.push(Sleeper {
        word: address(word),
        has_limit: timeout.is_some(),
        awake: false,
    });
    while !sleepers[index].awake {
        sleepers = KERNEL.changed.wait(sleepers).unwrap();
    }
    Ok(())
}
