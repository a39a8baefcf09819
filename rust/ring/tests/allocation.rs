//! A reaper allocates nothing: in a process that was forked off, the allocator's locks may be taken for good. Here they are.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{env, thread};

use common::{Name, config, eventually};
use pie_ring::{ExitGuard, Server};

const NAME: &str = "PIE_RING_TEST_NAME";
/// Less than the guard gives the process that it forks off.
const LIMIT: Duration = Duration::from_secs(20);

/// The only process that may allocate; 0: all may.
static OWNER: AtomicU32 = AtomicU32::new(0);

struct Locked;

#[global_allocator]
static ALLOCATOR: Locked = Locked;

fn lock() {
    let owner = OWNER.load(Ordering::Relaxed);
    while owner != 0 && owner != std::process::id() {
        thread::park();
    }
}

#[expect(unsafe_code, reason = "an allocator")]
// SAFETY: the system's allocator, or none at all.
unsafe impl GlobalAlloc for Locked {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        lock();
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        lock();
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Entry of the started process; does nothing in the test run itself.
#[test]
fn role() {
    let Ok(name) = env::var(NAME) else { return };
    OWNER.store(std::process::id(), Ordering::Relaxed);
    let guard = ExitGuard::install().unwrap();
    let _server = Server::create(&config(&name), &guard).unwrap();
    thread::sleep(Duration::from_secs(20));
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_reaper_needs_no_allocator() {
    let name = Name::new();
    let child = Command::new(env::current_exe().unwrap())
        .args(["role", "--exact", "--nocapture"])
        .env(NAME, &*name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let child = Killed(child);
    eventually(LIMIT, "the region is made", || name.exists());
    drop(child);
    eventually(LIMIT, "the region is removed", || !name.exists());
}
