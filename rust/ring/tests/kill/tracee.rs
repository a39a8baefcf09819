//! A forked child under ptrace: step it, watch its system calls, kill it wherever it stands.

#![expect(unsafe_code, reason = "fork and ptrace have no safe interface")]

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, c_long, pid_t};

/// A child that runs for more seconds than this hangs.
const LIMIT: u32 = 600;
/// What a tracer learns of a system call, and of nothing else.
const AT_CALL: c_int = libc::SIGTRAP | 0x80;

/// A forked child inherits every open file, and with it the locks of other tests: one test at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a child does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// An instruction that is none of the others.
    Other,
    /// A turn of a spin loop.
    Pause,
    /// A locked read-modify-write.
    Atomic,
    /// The system call of this number with this second argument.
    Call(c_long, u64),
}

impl Next {
    fn decode(registers: &libc::user_regs_struct, code: [u8; 2]) -> Self {
        match code {
            [0xf3, 0x90] => Self::Pause,
            [0x0f, 0x05] => Self::Call(registers.rax as c_long, registers.rsi),
            // The lock prefix, and exchanges, with or without another prefix.
            [0xf0 | 0x86 | 0x87, _] | [0x40..=0x4f | 0x66, 0xf0 | 0x86 | 0x87] => Self::Atomic,
            _ => Self::Other,
        }
    }

    /// The child is about to wait for its peer, or to end.
    pub(crate) fn waits_or_exits(self) -> bool {
        const WAIT: u64 = libc::FUTEX_WAIT as u64;
        self.exits() || matches!(self, Self::Pause | Self::Call(libc::SYS_futex, WAIT))
    }

    /// The child is about to end.
    pub(crate) fn exits(self) -> bool {
        matches!(self, Self::Call(libc::SYS_exit_group, _))
    }

    /// The child is about to rest.
    pub(crate) fn rests(self) -> bool {
        matches!(self, Self::Call(libc::SYS_pause, _))
    }

    pub(crate) fn is_call(self) -> bool {
        matches!(self, Self::Call(..))
    }
}

/// A stopped child of the calling thread; killed when dropped.
pub(crate) struct Tracee {
    pid: pid_t,
    ended: Option<ExitStatus>,
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
                libc::alarm(LIMIT);
                libc::ptrace(libc::PTRACE_TRACEME);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
                libc::_exit(c_int::from(result.is_err()));
            }
        }
        let mut tracee = Self { pid, ended: None };
        assert_eq!(tracee.await_stop(), Some(libc::SIGSTOP), "no stop() came");
        let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
        tracee.request(libc::PTRACE_SETOPTIONS, c_long::from(options));
        tracee
    }

    /// Executes instructions up to the `count`-th that others can see, unless `is_end` comes first.
    /// Whether it has come. `is_seen` is asked after each instruction.
    pub(crate) fn step(
        &mut self,
        count: usize,
        mut is_seen: impl FnMut(Next) -> bool,
        is_end: fn(Next) -> bool,
    ) -> bool {
        let mut seen = 0;
        while seen < count {
            let next = self.next();
            if is_end(next) {
                return true;
            }
            let stop = self.run(libc::PTRACE_SINGLESTEP);
            assert_eq!(stop, Some(libc::SIGTRAP), "{:?}", self.ended);
            seen += usize::from(is_seen(next));
        }
        false
    }

    /// Runs to the next entry to or return from a system call. False if the child has ended.
    pub(crate) fn run_to_call(&mut self) -> bool {
        let stop = self.run(libc::PTRACE_SYSCALL);
        assert!(stop.is_none_or(|stop| stop == AT_CALL), "{stop:?}");
        stop.is_some()
    }

    /// Lets the child run. That a child of its own has ended is nothing to it.
    fn run(&mut self, request: libc::c_uint) -> Option<c_int> {
        loop {
            self.request(request, 0);
            let stop = self.await_stop();
            if stop != Some(libc::SIGCHLD) {
                return stop;
            }
        }
    }

    /// Sends SIGTERM to the child and lets it run to its end.
    pub(crate) fn terminate(mut self) -> ExitStatus {
        self.signal(libc::SIGTERM);
        let mut signal = 0;
        loop {
            self.request(libc::PTRACE_CONT, c_long::from(signal));
            match self.await_stop() {
                None => return self.ended.unwrap(),
                Some(stop) => signal = stop,
            }
        }
    }

    /// Kills the child and waits until it is gone.
    pub(crate) fn kill(mut self) {
        self.end();
    }

    /// The system call that the child has entered.
    pub(crate) fn entered(&self) -> Next {
        let registers = self.registers();
        Next::Call(registers.orig_rax as c_long, registers.rsi)
    }

    /// The instruction where the child stands. Its code is where ours is.
    pub(crate) fn next(&self) -> Next {
        let registers = self.registers();
        // SAFETY: the child executes what is there, and its code is a copy of ours.
        let code = unsafe { ptr::read_unaligned(registers.rip as *const [u8; 2]) };
        Next::decode(&registers, code)
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

/// Where a child ends that is to be ended by a signal.
pub(crate) fn rest() {
    loop {
        // SAFETY: no preconditions.
        unsafe { libc::pause() };
    }
}
