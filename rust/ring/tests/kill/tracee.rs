//! A forked child under ptrace.

#![expect(unsafe_code, reason = "fork and ptrace have no safe interface")]

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use libc::{c_int, c_long, pid_t};

/// A child that lives longer than this hangs.
const LIMIT: Duration = Duration::from_mins(1);

/// A forked child inherits every open file, and with it the locks of other tests: one test at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A stopped child of the calling thread; killed when dropped.
pub(crate) struct Tracee {
    pid: pid_t,
    ended: Option<ExitStatus>,
    _watchdog: Sender<()>,
}

impl Tracee {
    /// Forks. The child runs up to the first [`stop`] of `body`, then in steps.
    pub(crate) fn fork(body: impl FnOnce()) -> Self {
        // SAFETY: the child uses nothing that another thread of the test could hold locked: the
        // tests of this program run one at a time, and glibc repairs malloc in the child.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "{}", std::io::Error::last_os_error());
        if pid == 0 {
            // SAFETY: no preconditions. A panic must not unwind into the harness's copy.
            unsafe {
                libc::ptrace(libc::PTRACE_TRACEME);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
                libc::_exit(c_int::from(result.is_err()));
            }
        }
        let (watchdog, end) = mpsc::channel::<()>();
        thread::spawn(move || {
            if end.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
                // SAFETY: no preconditions; the child is not reaped while the sender lives.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        });
        let mut tracee = Self {
            pid,
            ended: None,
            _watchdog: watchdog,
        };
        assert_eq!(tracee.await_stop(), Some(libc::SIGSTOP), "no stop() came");
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        tracee.request(libc::PTRACE_SETOPTIONS, c_long::from(options));
        tracee
    }

    /// Runs to the next entry to or return from a system call. False if the child has ended.
    pub(crate) fn run_to_call(&mut self) -> bool {
        self.request(libc::PTRACE_SYSCALL, 0);
        self.await_stop().is_some()
    }

    /// Number and first two arguments of the system call that the child has entered.
    pub(crate) fn entered(&self) -> (c_long, u64, u64) {
        let registers = self.registers();
        (registers.orig_rax as c_long, registers.rdi, registers.rsi)
    }

    fn registers(&self) -> libc::user_regs_struct {
        // SAFETY: zero is a valid value; the kernel overwrites it.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        self.request(libc::PTRACE_GETREGS, (&raw mut registers) as c_long);
        registers
    }

    fn request(&self, request: libc::c_uint, data: c_long) {
        // SAFETY: `data` is what the request asks for (the callers above). The child may have been
        // killed from outside, which the next wait reports.
        unsafe { libc::ptrace(request, self.pid, 0, data) };
    }

    fn signal(&self, signal: c_int) {
        // SAFETY: the child is not reaped, so the pid is its own.
        unsafe { libc::kill(self.pid, signal) };
    }

    /// The signal that the child has stopped for; `None` if it has ended.
    fn await_stop(&mut self) -> Option<c_int> {
        let mut status = 0;
        // SAFETY: `status` is a valid place for the result.
        let pid = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
        assert_eq!(pid, self.pid);
        let status = ExitStatus::from_raw(status);
        if status.stopped_signal().is_none() {
            self.ended = Some(status);
        }
        status.stopped_signal()
    }

    fn end(&mut self) {
        self.signal(libc::SIGKILL);
        while self.ended.is_none() {
            self.await_stop();
        }
    }
}

impl Drop for Tracee {
    fn drop(&mut self) {
        if self.ended.is_none() {
            self.end();
        }
    }
}

/// Where a child begins to be stepped.
pub(crate) fn stop() {
    // SAFETY: no preconditions.
    unsafe { libc::raise(libc::SIGSTOP) };
}
