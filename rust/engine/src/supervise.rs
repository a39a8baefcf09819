//! A replica's life: a driver is started, served with, and started again when it ends.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pie_ring::Client;

use crate::driver::Driver;
use crate::error::RuntimeError;
use crate::frame::FrameBuilder;
use crate::link;
use crate::relay::Relay;
use crate::replica::{Halt, Replica, WATCH};
use crate::shared::ClientHandle;

/// How often a replica whose driver reads adapters looks for something else to do.
const LOOK: Duration = Duration::from_millis(2);

impl Replica {
    /// Serves until it has to stop. Should that fail by a bug, every request is answered all the same.
    pub(crate) fn run(mut self) {
        if panic::catch_unwind(AssertUnwindSafe(|| self.run_drivers())).is_err() {
            // What it knows may be wrong.
            self.scheduler = None;
            self.give_up(RuntimeError::Panicked);
            self.leave();
        }
    }

    /// A driver that ends is started again, as long as that makes sense.
    fn run_drivers(&mut self) {
        let mut failures = 0;
        loop {
            let mut answered = false;
            let error = match self.serve(&mut answered) {
                Ok(()) | Err(Halt::Stop) => break,
                Err(Halt::Lost(error)) => error,
            };
            failures = if answered { 1 } else { failures + 1 };
            let started_before = self.scheduler.is_some();
            if !started_before || failures > self.max_restarts {
                self.give_up(error);
                break;
            }
            self.note(&format!(
                "{error}\npie-engine: starting the driver again, {failures} of {} times in a row; its requests go on",
                self.max_restarts
            ));
            if let Some(scheduler) = &mut self.scheduler {
                scheduler.driver_died();
            }
            self.shared
                .update(self.number, |state| state.stats.restarts += 1);
        }
        self.leave();
    }

    /// Starts a driver and serves with it. `answered` is set once it has answered a frame.
    fn serve(&mut self, answered: &mut bool) -> Result<(), Halt> {
        let mut settings = self.driver.clone();
        // Other processes may have taken memory since, and the pages of the requests that go on must be there.
        settings.kept_pages = self.shared.update(self.number, |state| {
            state.caps.as_ref().map_or(0, |caps| caps.total_pages)
        });
        let mut driver = Driver::spawn(settings, self.sink())?;
        self.shared
            .update(self.number, |state| state.stats.driver_pid = driver.pid());
        let served = self.serve_with(&mut driver, answered);
        let stopping = self.shared.update(self.number, |state| {
            state.stats.driver_pid = 0;
            state.client = None;
            state.stopping
        });
        match served {
            // A shutdown ends the wait for an answer, as the end of the driver does.
            Err(Halt::Lost(_)) if stopping => {
                driver.stop();
                Err(Halt::Stop)
            }
            Err(Halt::Lost(error)) => {
                let error = driver.explain(error);
                // Its memory must be free before the next one starts.
                driver.kill();
                Err(Halt::Lost(error))
            }
            other => {
                driver.stop();
                other
            }
        }
    }

    fn serve_with(&mut self, driver: &mut Driver, answered: &mut bool) -> Result<(), Halt> {
        let caps = loop {
            if let Some(caps) = driver.poll_ready(WATCH)? {
                break caps;
            }
            self.take_commands()?;
            self.expire();
            self.publish();
        };
        let client = driver.connect()?;
        self.prepare(&caps, client.layout())?;
        self.load_adapters(&client)?;
        self.shared.update(self.number, |state| {
            state.client = Some(ClientHandle(Arc::clone(&client)));
            state.caps.get_or_insert_with(|| caps.clone());
        });
        let builder = FrameBuilder::new(caps.kv_page_size).with_bit_masks(caps.vocab_size);
        Relay::new(&client, builder, answered).serve(self, driver)
    }

    /// Has a driver that was started again read what the one before had. Requests whose adapter it does not take fail one by
    /// one.
    fn load_adapters(&mut self, client: &Client) -> Result<(), Halt> {
        let adapters = self
            .shared
            .update(self.number, |state| state.adapters.clone());
        let load = || {
            let loads = adapters
                .iter()
                .map(|(&id, path)| link::load_adapter(client, id, path));
            loads.filter_map(Result::err).collect::<Vec<_>>()
        };
        thread::scope(|scope| {
            let loading = scope.spawn(load);
            // Deadlines and aborts do not wait for a disk.
            while !loading.is_finished() {
                if let Err(halt) = self.take_commands() {
                    client.abort();
                    return Err(halt);
                }
                self.expire();
                self.publish();
                thread::sleep(LOOK);
            }
            for error in loading.join().unwrap_or_default() {
                self.note(&format!("pie-engine: {error}"));
            }
            Ok(())
        })
    }
}
