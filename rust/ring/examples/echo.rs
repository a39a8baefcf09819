//! A server process and a client process: round trips of a kilobyte, with both sides spinning and both asleep.

use std::error::Error;
use std::io::{Write, stdout};
use std::process::Command;
use std::time::{Duration, Instant};
use std::{env, thread};

use pie_ring::{
    Client, ClientConfig, ExitGuard, RegionLayout, RingError, Server, ServerConfig, Wait,
};

const SCHEMA: [u8; 8] = *b"echo-1.0";
const ROUNDS: u32 = 2000;

/// Answers every request with its own bytes, until the client process has ended.
fn serve(name: &str, wait: Wait) -> Result<(), Box<dyn Error>> {
    let mut config = ServerConfig::new(name, SCHEMA, b"aborted".to_vec());
    config.layout = RegionLayout::new(2, 4096, 4096)?;
    let mut server = Server::create(&config, &ExitGuard::inert())?;
    let stop = server.stop_handle();
    let mut client = Command::new(env::current_exe()?)
        .args([name, if wait == Wait::Spin { "spin" } else { "park" }])
        .spawn()?;
    let ended = thread::spawn(move || {
        let status = client.wait();
        stop.stop();
        status
    });
    let mut words = Vec::new();
    while let Some(lease) = server.wait(wait)? {
        let request = lease.copy_request(&mut words)?.to_vec();
        let _ = lease.reply(&request)?;
    }
    let status = ended.join().map_err(|_| "the waiting thread panicked")??;
    if !status.success() {
        return Err("the client failed".into());
    }
    Ok(())
}

/// Calls the server of region `name`, and returns the median round trip.
fn call(name: &str, wait: Wait) -> Result<Duration, RingError> {
    let config = ClientConfig {
        wait,
        ..ClientConfig::default()
    };
    let client = Client::open(name, SCHEMA, config)?;
    let request = [7; 1024];
    let mut times = Vec::new();
    for _ in 0..ROUNDS {
        let start = Instant::now();
        client.call(&request, <[u8]>::len)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = env::args().skip(1).collect();
    if let [name, wait] = &arguments[..] {
        let spins = wait == "spin";
        let median = call(name, if spins { Wait::Spin } else { Wait::Park })?;
        let mut out = stdout().lock();
        writeln!(out, "{wait}: {median:?} a round trip, median of {ROUNDS}")?;
        return Ok(());
    }
    for wait in [Wait::Spin, Wait::Park] {
        serve(&format!("/pie_ring_echo_{}", std::process::id()), wait)?;
    }
    Ok(())
}
