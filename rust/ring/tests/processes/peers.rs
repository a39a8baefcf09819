//! Calls between processes, and clients that die.

use std::time::Duration;

use pie_ring::{Publish, Wait};

use crate::common::{Name, Running, STRATEGIES, create, eventually, request, requests_sent};
use crate::roles::{Process, echo};

#[test]
fn every_pair_of_strategies_echoes() {
    for server in STRATEGIES {
        let name = Name::new();
        let mut process = Process::ready("serve", &name, server);
        for client in STRATEGIES {
            echo(&name, client);
        }
        process.signal(rustix::process::Signal::TERM);
        process.ended(Duration::from_secs(5));
    }
}

#[test]
fn a_client_that_dies_while_waiting_does_no_harm() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let mut doomed = Process::start("call", &name, Wait::Park);
    let lease = server.wait(Wait::Park).unwrap().unwrap();
    doomed.kill();
    assert_eq!(request(&lease), b"from a doomed client");
    assert_eq!(lease.reply(b"to nobody").unwrap(), Publish::Delivered);
    let running = Running::start(server, Wait::Park);
    echo(&name, Wait::Park);
    drop(running);
}

#[test]
fn a_client_that_dies_before_delivery_does_no_harm() {
    let name = Name::new();
    let mut server = create(&name).unwrap();
    let mut doomed = Process::start("call", &name, Wait::Park);
    let sent = || requests_sent(&name) == 1;
    eventually(Duration::from_secs(5), "the request is sent", sent);
    doomed.kill();
    drop(server.poll().unwrap());
    let running = Running::start(server, Wait::Park);
    echo(&name, Wait::Park);
    drop(running);
}
