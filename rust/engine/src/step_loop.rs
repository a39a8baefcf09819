//! Step loop between scheduler and driver: the next step is scheduled and its frame built while the driver computes the current one
//! (overlap scheduling).

use std::time::{Duration, Instant};

use pie_ring::{CallError, Client};
use pie_scheduler::{Copies, PageCopy, Row, Scheduler, SchedulerError, StepOutput};
use pie_wire::CopyDirection;

use crate::driver::Driver;
use crate::error::EngineError;
use crate::frame::{FrameBuilder, FrameRow, RowExtension};
use crate::link::{InFlightFrame, Link, PreparedFrame};
use crate::replica::{Halt, Pause, Replica};
use crate::sampling::RowParams;

/// How long before the expected reply the next step is scheduled, at least and at most: time to build its frame, with a margin for an
/// early reply.
const LEAD_TIME: [Duration; 2] = [Duration::from_micros(300), Duration::from_micros(800)];

/// The steps of one driver.
pub(crate) struct StepLoop<'c, 'a> {
    link: Link<'c>,
    in_flight: Option<InFlightStep<'c>>,
    answered: &'a mut bool,
}

/// The step that the driver computes.
struct InFlightStep<'c> {
    frame: InFlightFrame<'c>,
    /// Time of the page copies before it.
    copies_us: u64,
    /// When the next step is to be scheduled, with all requests that arrive until then.
    schedule_at: Instant,
}

/// A scheduled step that waits for the reply to the one before.
struct PreparedStep<'c> {
    frame: Result<PreparedFrame<'c>, EngineError>,
    /// Page copies to make before it.
    copies: Option<Copies>,
    /// Time of the copies that were made already.
    copies_us: u64,
    /// Predicted duration.
    expected: Duration,
}

impl<'c, 'a> StepLoop<'c, 'a> {
    /// `answered` is set once the driver has replied to a frame.
    pub(crate) fn new(client: &'c Client, builder: FrameBuilder, answered: &'a mut bool) -> Self {
        Self {
            link: Link::new(client, builder),
            in_flight: None,
            answered,
        }
    }

    /// Runs steps until the replica has to stop, or the driver fails.
    pub(crate) fn run(mut self, replica: &mut Replica, driver: &Driver) -> Result<(), Halt> {
        loop {
            self.sleep()?;
            replica.handle_commands()?;
            if let Err(error) = self.step(replica, driver) {
                self.recover(replica, error)?;
            }
            replica.publish();
        }
    }

    /// Sleeps until the next step is to be scheduled.
    fn sleep(&mut self) -> Result<(), EngineError> {
        let Some(step) = &mut self.in_flight else {
            return Ok(());
        };
        let left = step.schedule_at.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            step.frame.sleep(left)?;
        }
        Ok(())
    }

    /// Schedules the next step, receives the reply to the current one, and sends the next one.
    fn step(&mut self, replica: &mut Replica, driver: &Driver) -> Result<(), StepFailure> {
        let next = match replica.pause {
            None => self.prepare(replica)?,
            Some(_) => None,
        };
        let Some(current) = self.in_flight.take() else {
            return match next {
                Some(next) => self.send(next),
                None => self.idle(replica, driver),
            };
        };
        let received = self.link.receive(current.frame);
        let now = replica.now();
        let timing = received?;
        // First, because the device waits for it.
        let sent = next.map_or(Ok(()), |next| self.send(next));
        *self.answered = true;
        replica.record_step(&timing);
        let answer = StepOutput {
            copies_us: current.copies_us,
            ..self.link.reply().to_scheduler()
        };
        scheduler(replica)?.process_output(now, &answer)?;
        sent
    }

    fn prepare(&mut self, replica: &mut Replica) -> Result<Option<PreparedStep<'c>>, StepFailure> {
        let now = replica.now();
        let Some(step) = scheduler(replica)?.schedule(now)? else {
            return Ok(None);
        };
        let mut copies = (!step.copies.is_empty()).then(|| step.copies.clone());
        let mut copies_us = 0;
        if self.in_flight.is_none()
            && let Some(copies) = copies.take()
        {
            // No step in flight uses these pages, and the frame may need the only slot.
            copies_us = copy_pages(&mut self.link, &copies)?;
        }
        let frame = self.link.prepare(step.rows().map(|row| frame_row(&row)));
        let expected = scheduler(replica)?.expected_us();
        Ok(Some(PreparedStep {
            frame,
            copies,
            copies_us,
            expected: Duration::from_micros(expected.unwrap_or(0)),
        }))
    }

    fn send(&mut self, step: PreparedStep<'c>) -> Result<(), StepFailure> {
        // First: the scheduler counts copies as made, even where the frame could not be built.
        let copies_us = match step.copies {
            Some(copies) => copy_pages(&mut self.link, &copies)?,
            None => step.copies_us,
        };
        let frame = self.link.send(step.frame?)?;
        let lead = (step.expected / 4).clamp(LEAD_TIME[0], LEAD_TIME[1]);
        self.in_flight = Some(InFlightStep {
            frame,
            copies_us,
            schedule_at: Instant::now() + step.expected.saturating_sub(lead),
        });
        Ok(())
    }

    /// Waits for a command while there is nothing to compute.
    fn idle(&mut self, replica: &mut Replica, driver: &Driver) -> Result<(), StepFailure> {
        self.link.end_series();
        if replica.pause == Some(Pause::Retract) {
            scheduler(replica)?.driver_lost();
            replica.pause = Some(Pause::InPlace);
        }
        replica.answer_pauses();
        if !driver.is_running() {
            return Err(EngineError::from(CallError::Aborted).into());
        }
        replica.update_stats();
        // No step does it while the service is paused, and `wait_command` returns at once after a deadline.
        replica.expire();
        replica.publish();
        Ok(replica.wait_command()?)
    }

    /// Continues after a failure that the driver survives.
    fn recover(&mut self, replica: &mut Replica, failure: StepFailure) -> Result<(), Halt> {
        self.link.resend_params();
        match failure {
            StepFailure::Halt(halt) => Err(halt),
            StepFailure::Step(error) => {
                replica.log(&format!("pie-engine: a step failed: {error}"));
                scheduler(replica)?.step_failed(false);
                Ok(())
            }
            StepFailure::Kv(reason) => {
                replica.log(&format!(
                    "pie-engine: {reason}; all requests are computed again"
                ));
                // The step in flight still writes to the pages.
                if let Some(step) = self.in_flight.take()
                    && let Err(StepFailure::Halt(halt)) =
                        self.link.receive(step.frame).map_err(StepFailure::from)
                {
                    return Err(halt);
                }
                scheduler(replica)?.driver_lost();
                Ok(())
            }
        }
    }
}

/// Why a step failed.
enum StepFailure {
    /// The replica stops, or the driver cannot continue.
    Halt(Halt),
    /// The driver rejected the step, or it could not be sent.
    Step(EngineError),
    /// KV pages do not, or may not, hold what the scheduler expects.
    Kv(String),
}

impl From<EngineError> for StepFailure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Reply(_) | EngineError::Wire(_) => Self::Step(error),
            other => Self::Halt(Halt::Lost(other)),
        }
    }
}

impl From<Halt> for StepFailure {
    fn from(halt: Halt) -> Self {
        Self::Halt(halt)
    }
}

impl From<SchedulerError> for StepFailure {
    fn from(error: SchedulerError) -> Self {
        Self::Kv(error.to_string())
    }
}

/// Copies pages between device and host; returns the time in µs.
fn copy_pages(link: &mut Link<'_>, copies: &Copies) -> Result<u64, StepFailure> {
    let started = Instant::now();
    for (direction, moves) in [
        (CopyDirection::D2H, &copies.to_host),
        (CopyDirection::H2D, &copies.to_device),
    ] {
        let pairs = moves.iter().map(|&PageCopy { from, to }| (from, to));
        match link.copy(direction, pairs).map_err(StepFailure::from) {
            Ok(()) => {}
            Err(StepFailure::Step(error)) => {
                return Err(StepFailure::Kv(format!("a copy of pages failed: {error}")));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(started.elapsed().as_micros() as u64)
}

/// The replica's scheduler, which it has from the first start of its driver on.
fn scheduler(replica: &mut Replica) -> Result<&mut Scheduler<RowParams>, Halt> {
    replica.scheduler.as_mut().ok_or(Halt::Stop)
}

/// A row of a scheduled step, for the frame.
pub(crate) fn frame_row<'a>(row: &Row<'a, RowParams>) -> FrameRow<'a> {
    let extension = row.params.extension.as_ref().map(|params| RowExtension {
        params,
        history: row.history,
        prompt_logprobs: row.prompt_logprobs,
        next: row.next,
    });
    FrameRow {
        context_id: row.context,
        tokens: row.tokens,
        awaits: row.awaits.map(|row| row as usize),
        start: row.start,
        drafts: row.drafts,
        wants_drafts: row.wants_drafts,
        pages: row.pages,
        sampler: row.sampling.map(|params| &params.sampler),
        adapter: row.adapter,
        forbidden: row.forbidden,
        mask: row.mask,
        extension,
        images: row.params.images.as_deref(),
    }
}
