//! Which core each side runs on.

use std::error::Error;
use std::fs;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// The cores of the client and of the server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cores {
    pub(crate) client: usize,
    pub(crate) server: usize,
    allowed: CpuSet,
}

impl Cores {
    /// The last two that this thread may use and that are not two threads of one core: interrupts
    /// prefer the first.
    pub(crate) fn pick() -> Result<Self> {
        let allowed = sched_getaffinity(None)?;
        let mut usable = (0..CpuSet::MAX_CPU)
            .filter(|&cpu| allowed.is_set(cpu))
            .rev();
        let server = usable.next().ok_or("no core may be used")?;
        let siblings = siblings(server);
        let client = usable.find(|&cpu| siblings != self::siblings(cpu));
        let client = client.ok_or("the round trips need two cores")?;
        Ok(Self {
            client,
            server,
            allowed,
        })
    }

    /// Keeps the calling thread on one core.
    pub(crate) fn pin(cpu: usize) -> Result<()> {
        let mut set = CpuSet::new();
        set.set(cpu);
        Ok(sched_setaffinity(None, &set)?)
    }

    /// Gives the calling thread all cores back.
    pub(crate) fn unpin(&self) -> Result<()> {
        Ok(sched_setaffinity(None, &self.allowed)?)
    }
}

/// The hardware threads of a core, as the kernel lists them.
fn siblings(cpu: usize) -> String {
    let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    fs::read_to_string(path).unwrap_or_else(|_| cpu.to_string())
}
