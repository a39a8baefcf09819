//! The loop between a scheduler and a driver: one frame is computed while the next one is laid out.

use std::time::{Duration, Instant};

use pie_ring::{CallError, Client};
use pie_scheduler::{Copies, PageCopy, Row, Scheduler, SchedulerError, StepOutput};
use pie_wire::CopyDirection;

use crate::driver::Driver;
use crate::error::RuntimeError;
use crate::frame::{Extended, FrameBuilder, FrameRow};
use crate::link::{Flight, Link, Prepared};
use crate::replica::{Halt, Pause, Replica};
use crate::sampling::Draw;

/// How long before the answer that is expected the next step is laid out, at least and at most: time enough for that, and for an
/// answer that comes early.
const EARLY: [Duration; 2] = [Duration::from_micros(300), Duration::from_micros(800)];

/// The frames of one driver.
pub(crate) struct Relay<'c, 'a> {
    link: Link<'c>,
    /// What the driver computes now.
    flight: Option<Sent<'c>>,
    answered: &'a mut bool,
}

/// A step that the driver has.
struct Sent<'c> {
    frame: Flight<'c>,
    /// What the copies before it took.
    copies_us: u64,
    /// When the next one is to be laid out; what comes until then is in it.
    until: Instant,
}

/// A step that was laid out, and waits for the answer to the one before.
struct Laid<'c> {
    frame: Result<Prepared<'c>, RuntimeError>,
    /// To be made before it.
    copies: Option<Copies>,
    /// What those took that were made already.
    copies_us: u64,
    /// What it takes, as far as former steps tell.
    expected: Duration,
}

impl<'c, 'a> Relay<'c, 'a> {
    pub(crate) fn new(client: &'c Client, builder: FrameBuilder, answered: &'a mut bool) -> Self {
        Self {
            link: Link::new(client, builder),
            flight: None,
            answered,
        }
    }

    /// Serves until the replica has to stop, or the driver cannot go on.
    pub(crate) fn serve(mut self, replica: &mut Replica, driver: &Driver) -> Result<(), Halt> {
        loop {
            self.rest()?;
            replica.take_commands()?;
            if let Err(error) = self.turn(replica, driver) {
                self.recover(replica, error)?;
            }
            replica.publish();
        }
    }

    /// Sleeps until the answer is near.
    fn rest(&mut self) -> Result<(), RuntimeError> {
        let Some(sent) = &mut self.flight else {
            return Ok(());
        };
        let left = sent.until.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            sent.frame.sleep(left)?;
        }
        Ok(())
    }

    /// Lays the next step out, and takes the answer to the one before.
    fn turn(&mut self, replica: &mut Replica, driver: &Driver) -> Result<(), Failure> {
        let laid = match replica.pause {
            None => self.lay_out(replica)?,
            Some(_) => None,
        };
        let Some(Sent {
            frame, copies_us, ..
        }) = self.flight.take()
        else {
            let Some(laid) = laid else {
                // What comes next is another series.
                self.link.rest();
                if replica.pause == Some(Pause::Retract) {
                    scheduler(replica)?.driver_lost();
                    replica.pause = Some(Pause::InPlace);
                }
                return idle(replica, driver);
            };
            return self.send(laid);
        };
        let answered = self.link.receive(frame);
        let seen = replica.now();
        let exchange = answered?;
        // The device waits for nothing but this.
        let sent = laid.map_or(Ok(()), |laid| self.send(laid));
        *self.answered = true;
        replica.driver_ns += exchange.round_trip_ns;
        if exchange.client_ns > 0 {
            replica.gaps.add(exchange.client_ns);
        }
        let number = replica.number;
        if let Some(trace) = &mut replica.trace
            && !trace.step(number, &exchange)
        {
            replica.end_trace();
        }
        let answer = StepOutput {
            copies_us,
            ..self.link.answer().as_sched()
        };
        scheduler(replica)?.process_output(seen, &answer)?;
        sent
    }

    fn lay_out(&mut self, replica: &mut Replica) -> Result<Option<Laid<'c>>, Failure> {
        let now = replica.now();
        let Some(step) = scheduler(replica)?.schedule(now)? else {
            return Ok(None);
        };
        let mut copies = (!step.copies.is_empty()).then(|| step.copies.clone());
        let mut copies_us = 0;
        if self.flight.is_none()
            && let Some(copies) = copies.take()
        {
            // Nothing is computed that uses these pages; and the frame may need the only slot.
            copies_us = copy(&mut self.link, &copies)?;
        }
        let turns = step.rows().map(|row| turn(&row));
        let frame = self.link.prepare(turns);
        let expected = scheduler(replica)?.expected_us();
        Ok(Some(Laid {
            frame,
            copies,
            copies_us,
            expected: Duration::from_micros(expected.unwrap_or(0)),
        }))
    }

    fn send(&mut self, laid: Laid<'c>) -> Result<(), Failure> {
        // First: the scheduler counts them as made, even where the frame could not be laid out.
        let copies_us = match laid.copies {
            Some(copies) => copy(&mut self.link, &copies)?,
            None => laid.copies_us,
        };
        let frame = self.link.send(laid.frame?)?;
        let early = (laid.expected / 4).clamp(EARLY[0], EARLY[1]);
        self.flight = Some(Sent {
            frame,
            copies_us,
            until: Instant::now() + laid.expected.saturating_sub(early),
        });
        Ok(())
    }

    /// Goes on after a failure that the driver survives.
    fn recover(&mut self, replica: &mut Replica, failure: Failure) -> Result<(), Halt> {
        self.link.forget_params();
        match failure {
            Failure::Halt(halt) => Err(halt),
            Failure::Step(error) => {
                replica.note(&format!("pie-engine: a step failed: {error}"));
                scheduler(replica)?.step_failed(false);
                Ok(())
            }
            Failure::Kv(reason) => {
                replica.note(&format!(
                    "pie-engine: {reason}; all requests are computed again"
                ));
                // What is computed now writes to pages of before.
                if let Some(sent) = self.flight.take()
                    && let Err(Failure::Halt(halt)) =
                        self.link.receive(sent.frame).map_err(Failure::from)
                {
                    return Err(halt);
                }
                scheduler(replica)?.driver_lost();
                Ok(())
            }
        }
    }
}

/// What went wrong in one turn.
enum Failure {
    /// The service stops, or the driver cannot go on.
    Halt(Halt),
    /// The driver refused the step, or it could not be sent.
    Step(RuntimeError),
    /// KV is not, or may not be, what the scheduler takes it for.
    Kv(String),
}

impl From<RuntimeError> for Failure {
    fn from(error: RuntimeError) -> Self {
        match error {
            RuntimeError::Answer(_) | RuntimeError::Wire(_) => Self::Step(error),
            other => Self::Halt(Halt::Lost(other)),
        }
    }
}

impl From<Halt> for Failure {
    fn from(halt: Halt) -> Self {
        Self::Halt(halt)
    }
}

impl From<SchedulerError> for Failure {
    fn from(error: SchedulerError) -> Self {
        Self::Kv(error.to_string())
    }
}

/// Makes copies and returns what they took, in µs.
fn copy(link: &mut Link<'_>, copies: &Copies) -> Result<u64, Failure> {
    let started = Instant::now();
    for (direction, moves) in [
        (CopyDirection::D2H, &copies.to_host),
        (CopyDirection::H2D, &copies.to_device),
    ] {
        let pairs = moves.iter().map(|&PageCopy { from, to }| (from, to));
        match link.copy(direction, pairs).map_err(Failure::from) {
            Ok(()) => {}
            Err(Failure::Step(error)) => {
                return Err(Failure::Kv(format!("a copy of pages failed: {error}")));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(started.elapsed().as_micros() as u64)
}

/// Waits for something to do.
fn idle(replica: &mut Replica, driver: &Driver) -> Result<(), Failure> {
    if !driver.is_running() {
        return Err(RuntimeError::from(CallError::Aborted).into());
    }
    replica.count();
    // While the service is paused no step does so, and a deadline that has passed would end the wait at once, for ever.
    replica.expire();
    replica.publish();
    Ok(replica.wait_command()?)
}

/// The replica's scheduler, which it has from the first start of its driver on.
fn scheduler(replica: &mut Replica) -> Result<&mut Scheduler<Draw>, Halt> {
    replica.scheduler.as_mut().ok_or(Halt::Stop)
}

pub(crate) fn turn<'a>(row: &Row<'a, Draw>) -> FrameRow<'a> {
    let extension = row.params.extension.as_ref().map(|asked| Extended {
        asked,
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
        sampler: row.sampling.map(|draw| &draw.sampler),
        adapter: row.adapter,
        forbidden: row.forbidden,
        mask: row.mask,
        extension,
        pictures: row.params.pictures.as_deref(),
    }
}
