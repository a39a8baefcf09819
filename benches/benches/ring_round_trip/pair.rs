//! The two processes: start, turns, end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{env, io, process};

use pie_benches::conditions::involuntary_switches;
use pie_benches::timing::Samples;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, getppid, pidfd_open};

use crate::cores::Cores;
use crate::echo::{self, Request};
use crate::transport::{Client, Kind, Result, Server, Setup};
use crate::{iceoryx, leftovers};

/// Calls before each turn: the server has just been woken, and the side before used the caches.
const WARM_UP: u64 = 8;
/// Calls with every byte checked, before anything is timed: each slot of a region twice.
const CHECKED: u64 = 8;
/// The last order.
const END: &str = "end";
/// A pair that takes longer is stuck.
const LIFETIME: Duration = Duration::from_mins(5);

/// The server process, seen from the client.
pub(crate) struct Pair {
    /// Dropped first, while the server still lives.
    clients: Vec<Box<dyn Client>>,
    orders: Option<ChildStdin>,
    watch: Option<JoinHandle<()>>,
    closing: Arc<AtomicBool>,
    server_pid: String,
    request: Request,
    setup: Setup,
    cores: Cores,
}

impl Pair {
    pub(crate) fn start(setup: Setup) -> Self {
        Self::try_start(setup).expect("the two processes can be started")
    }

    fn try_start(setup: Setup) -> Result<Self> {
        let cores = Cores::pick()?;
        let (name, value) = setup.variable();
        let mut server = Command::new(env::current_exe()?)
            .env(name, value)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A signal to the client's group, such as Ctrl-C, must leave the server to clean up.
            .process_group(0)
            .spawn()?;
        let server_pid = server.id().to_string();
        let orders = server.stdin.take();
        let mut told = BufReader::new(server.stdout.take().ok_or("no output")?);
        let closing = Arc::new(AtomicBool::new(false));
        let watch = Some(watch_server(server, &setup, &closing));
        if told.read_line(&mut String::new())? == 0 {
            return Err("the server did not start".into());
        }
        let clients = Kind::ALL.map(|kind| kind.client(&setup));
        let mut pair = Self {
            clients: clients.into_iter().collect::<Result<_>>()?,
            orders,
            watch,
            closing,
            server_pid,
            request: Request::new(setup.size),
            setup,
            cores,
        };
        // Only now: threads that a library starts for itself may run anywhere.
        Cores::pin(cores.client)?;
        pair.check();
        Ok(pair)
    }

    /// Every transport must bring the right bytes.
    fn check(&mut self) {
        for kind in Kind::ALL {
            self.order(kind, CHECKED);
            for _ in 0..CHECKED {
                let seen = self.call(kind, echo::check_all);
                assert_eq!(seen, kind != Kind::PingPong, "{}", kind.name());
            }
        }
    }

    /// One side's turn: so many calls, timed one by one.
    pub(crate) fn turn(&mut self, kind: Kind, operations: u64, samples: &mut Samples) -> Duration {
        let before = involuntary_switches(&self.server_pid);
        self.order(kind, WARM_UP + operations);
        for _ in 0..WARM_UP {
            self.call(kind, echo::check_ends);
        }
        let elapsed = samples.time(operations, || self.call(kind, echo::check_ends));
        let switches = involuntary_switches(&self.server_pid).saturating_sub(before);
        samples.add_involuntary_switches(switches);
        elapsed
    }

    /// Tells the server what to wait for.
    fn order(&mut self, kind: Kind, calls: u64) {
        let orders = self.orders.as_mut().expect("open until dropped");
        writeln!(orders, "{} {calls}", kind as usize).expect("the server lives");
    }

    /// Calls once; true if there was a response to look at.
    fn call(&mut self, kind: Kind, check: fn(&[u8], &[u8])) -> bool {
        let (request, mut seen) = (self.request.next(), false);
        let result = self.clients[kind as usize].call(request, &mut |response| {
            check(request, response);
            seen = true;
        });
        result.expect("the call is answered");
        seen
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if thread::panicking() {
            // The server may wait for a call that never comes. It leaves, and cleans up, when this
            // process has ended.
            process::exit(1);
        }
        self.clients.clear();
        self.closing.store(true, Ordering::Relaxed);
        let told = self
            .orders
            .take()
            .map(|mut orders| writeln!(orders, "{END}"));
        let _ = (told, self.watch.take().map(JoinHandle::join));
        let _ = self.cores.unpin();
        // iceoryx2 keeps files for nodes to come; the others must have cleaned up.
        let prefix = &self.setup.prefix;
        let left = leftovers::find(prefix).len() - leftovers::find(&iceoryx::prefix(prefix)).len();
        leftovers::remove(prefix);
        assert_eq!(
            (left, leftovers::find(prefix).len()),
            (0, 0),
            "files were left over"
        );
    }
}

/// Ends this process if the server ends too early or too late: the client would spin forever.
fn watch_server(mut server: Child, setup: &Setup, closing: &Arc<AtomicBool>) -> JoinHandle<()> {
    let (closing, prefix) = (Arc::clone(closing), setup.prefix.clone());
    thread::spawn(move || {
        let ended = wait_for_end(Pid::from_child(&server), Some(LIFETIME));
        if !matches!(ended, Ok(true)) {
            let _ = server.kill();
        }
        let status = server.wait();
        let good = closing.load(Ordering::Relaxed) && status.is_ok_and(|status| status.success());
        if !good {
            leftovers::remove(&prefix);
            eprintln!("the server process ended badly");
            process::exit(1);
        }
    })
}

/// Whether the process has ended within the limit.
fn wait_for_end(pid: Pid, limit: Option<Duration>) -> io::Result<bool> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    let mut events = [PollFd::new(&process, PollFlags::IN)];
    Ok(poll(&mut events, limit.as_ref())? > 0)
}

/// The server process: obeys orders until their end.
pub(crate) fn serve(setup: &Setup) {
    watch_client(setup.prefix.clone());
    if let Err(error) = obey(setup) {
        eprintln!("server: {error}");
        leftovers::remove(&setup.prefix);
        process::exit(1);
    }
}

/// An order is `kind calls`, or [`END`]. Without that the client has died.
fn obey(setup: &Setup) -> Result<()> {
    let servers = Kind::ALL.map(|kind| kind.server(setup));
    let mut servers: Vec<Box<dyn Server>> = servers.into_iter().collect::<Result<_>>()?;
    Cores::pin(Cores::pick()?.server)?;
    println!("ready");
    for order in io::stdin().lines() {
        let order = order?;
        if order == END {
            return Ok(());
        }
        let (kind, calls) = order.split_once(' ').ok_or("an order has two parts")?;
        let server = &mut servers[kind.parse::<usize>()?];
        for _ in 0..calls.parse::<u64>()? {
            server.answer()?;
        }
    }
    Err("the client is gone".into())
}

/// Cleans up and ends this process when the client's is gone, whatever this one waits for.
fn watch_client(prefix: String) {
    let Some(client) = getppid() else { return };
    thread::spawn(move || {
        let _ = wait_for_end(client, None);
        leftovers::remove(&prefix);
        process::exit(1);
    });
}
