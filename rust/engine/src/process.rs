//! The driver's process: one group of processes, of which the driver is the leader.

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, PipeReader, Write};
use std::iter;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use command_fds::{CommandFdExt, FdMapping};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, test_kill_process_group,
    waitid,
};

use crate::settings::DriverSettings;

const HANDSHAKE_FD: i32 = 3;
/// The configuration: a file without a name, which nobody has to remove.
const CONFIG_FD: i32 = 4;
/// How often an end is looked for.
const POLL: Duration = Duration::from_millis(10);
/// How long the other processes of a group may take to be gone, once they are killed.
const GROUP: Duration = Duration::from_secs(2);

/// A process that was started and may have ended.
#[derive(Debug)]
pub(crate) struct Process {
    child: Mutex<Child>,
    pid: Pid,
}

/// The read ends of a driver's pipes.
pub(crate) struct Pipes {
    pub(crate) handshake: PipeReader,
    pub(crate) log: PipeReader,
}

impl Process {
    /// Starts a driver as the Pie runtime does, with a pipe as descriptor 3, and another as its standard output and error. Its
    /// configuration file is `config`, as descriptor 4.
    /// The driver watches its parent by itself, so that nothing must tie the two lives together here. It leads a group of
    /// its own: Ctrl-C in a terminal is only for the caller.
    pub(crate) fn spawn(settings: &DriverSettings, config: &str) -> io::Result<(Self, Pipes)> {
        let (handshake, announced) = io::pipe()?;
        let (log, logged) = io::pipe()?;
        let python = &settings.python;
        let mut command = Command::new(python);
        if let Some(folder) = &settings.library_path {
            command.env("PYTHONPATH", in_front(folder, "PYTHONPATH")?);
        }
        let tools = python.parent().map(|folder| in_front(folder, "PATH"));
        // Without the interpreter's folder where it cannot be among others.
        if let Some(Ok(path)) = tools {
            command.env("PATH", path);
        }
        command
            .args(["-m", &settings.package, "--config"])
            .arg(format!("/proc/self/fd/{CONFIG_FD}"))
            .args(["--handshake-fd", &HANDSHAKE_FD.to_string()])
            .stdin(Stdio::null())
            .stdout(logged.try_clone()?)
            .stderr(logged)
            .process_group(0);
        let mappings = [
            (announced.into(), HANDSHAKE_FD),
            (unnamed_file(config)?, CONFIG_FD),
        ];
        let mappings = mappings.map(|(parent_fd, child_fd)| FdMapping {
            parent_fd,
            child_fd,
        });
        command
            .fd_mappings(mappings.into())
            .map_err(io::Error::other)?;
        let child = command.spawn()?;
        let process = Self {
            pid: Pid::from_child(&child),
            child: Mutex::new(child),
        };
        Ok((process, Pipes { handshake, log }))
    }

    pub(crate) const fn id(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    /// How it ended, in words; `None` while it runs. What is left of its group is killed.
    pub(crate) fn end(&self) -> Option<String> {
        let mut child = self.lock();
        // It stays a zombie until the group is killed, so that no other process can have its number.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        match waitid(WaitId::Pid(self.pid), options) {
            Ok(None) => return None,
            Ok(Some(_)) => self.kill_group(),
            // It was waited for before.
            Err(_) => {}
        }
        Some(child.wait().map_or_else(
            |error| format!("its status is not known: {error}"),
            |status| status.to_string(),
        ))
    }

    /// As [`end`](Self::end), after as long as that may take.
    pub(crate) fn wait(&self, limit: Duration) -> Option<String> {
        let started = Instant::now();
        loop {
            let end = self.end();
            if end.is_some() || started.elapsed() >= limit {
                return end;
            }
            thread::sleep(POLL);
        }
    }

    /// Asks it to end.
    pub(crate) fn terminate(&self) {
        // The lock keeps it from being waited for in between. A failure means that it is gone.
        let _child = self.lock();
        let _ = kill_process(self.pid, Signal::TERM);
    }

    /// Kills the whole group and waits for its end.
    pub(crate) fn kill(&self) {
        {
            let mut child = self.lock();
            let _ = child.kill();
            self.kill_group();
            let _ = child.wait();
        }
        self.wait_group();
    }

    /// Waits until no process of the group is left: only then is the device's memory free.
    pub(crate) fn wait_group(&self) {
        let started = Instant::now();
        while test_kill_process_group(self.pid).is_ok() && started.elapsed() < GROUP {
            thread::sleep(POLL);
        }
    }

    fn kill_group(&self) {
        let _ = kill_process_group(self.pid, Signal::KILL);
    }

    fn lock(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file in memory with this content, which is gone with its last descriptor.
fn unnamed_file(content: &str) -> io::Result<OwnedFd> {
    let file = memfd_create("driver.toml", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(file);
    file.write_all(content.as_bytes())?;
    Ok(file.into())
}

/// The folders of an environment variable with one more in front.
///
/// # Errors
/// The folder's path has a colon, which separates folders.
fn in_front(folder: &Path, variable: &str) -> io::Result<OsString> {
    let rest = env::var_os(variable).unwrap_or_default();
    let folders = iter::once(folder.to_owned()).chain(env::split_paths(&rest));
    let folders = folders.filter(|folder| !folder.as_os_str().is_empty());
    env::join_paths(folders)
        .map_err(|error| io::Error::other(format!("{}: {error}", folder.display())))
}
