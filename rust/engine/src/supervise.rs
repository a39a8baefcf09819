//! Supervision of a replica's driver: start, step loop, restart.

use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pie_ring::Client;

use crate::driver::Driver;
use crate::error::EngineError;
use crate::frame::FrameBuilder;
use crate::link;
use crate::replica::{Halt, POLL, Replica};
use crate::shared::ClientHandle;
use crate::step_loop::StepLoop;

/// How often commands are handled while a restarted driver loads adapters.
const LOADING_POLL: Duration = Duration::from_millis(2);

impl Replica {
    /// Runs until the service shuts down. After a panic all requests fail.
    pub(crate) fn run(mut self) {
        if panic::catch_unwind(AssertUnwindSafe(|| self.run_drivers())).is_err() {
            // Its state may be inconsistent.
            self.scheduler = None;
            self.fail_all(EngineError::Panicked);
            self.close();
        }
    }

    /// Restarts a driver that ends, up to the limit.
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
                self.fail_all(error);
                break;
            }
            self.log(&format!(
                "{error}\npie-engine: starting the driver again, {failures} of {} times in a row; its requests go on",
                self.max_restarts
            ));
            if let Some(scheduler) = &mut self.scheduler {
                scheduler.driver_died();
            }
            self.shared
                .update(self.number, |state| state.stats.restarts += 1);
        }
        self.close();
    }

    /// Runs one driver. `answered` is set once it has replied to a frame.
    fn serve(&mut self, answered: &mut bool) -> Result<(), Halt> {
        let mut settings = self.driver.clone();
        // Running requests need as many pages, though other processes may have taken memory since.
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
            // A shutdown aborts the wait for a reply, like the death of the driver.
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
            if let Some(caps) = driver.poll_ready(POLL)? {
                break caps;
            }
            self.handle_commands()?;
            // Nothing is computed, and no KV is left.
            self.answer_pauses();
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
        StepLoop::new(&client, builder, answered).run(self, driver)
    }

    /// Loads in a restarted driver the adapters of the one before. Requests whose adapter it refuses fail one by one.
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
            // Deadlines and aborts do not wait for the disk.
            while !loading.is_finished() {
                if let Err(halt) = self.handle_commands() {
                    client.abort();
                    return Err(halt);
                }
                self.answer_pauses();
                self.expire();
                self.publish();
                thread::sleep(LOADING_POLL);
            }
            for error in loading.join().unwrap_or_default() {
                self.log(&format!("pie-engine: {error}"));
            }
            Ok(())
        })
    }
}
