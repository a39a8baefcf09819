//! The scheduler.

use std::sync::Arc;

use crate::answer::Answer;
use crate::arrival::Arrival;
use crate::config::{Config, Limits};
use crate::error::{Refusal, SchedError};
use crate::output::Outputs;
use crate::stats::Stats;
use crate::step::{Row, Step};
use crate::text::TokenBytes;

/// Decides what each forward step of a driver computes. See the [crate](crate).
#[derive(Debug)]
pub struct Scheduler<S> {
    rows: Vec<S>,
}

impl<S> Scheduler<S> {
    /// A scheduler without requests. Without `text`, requests with stop strings are refused.
    ///
    /// # Errors
    ///
    /// [`SchedError::Setting`].
    pub fn new(
        _config: Config,
        _limits: Limits,
        _text: Option<Arc<dyn TokenBytes>>,
    ) -> Result<Self, SchedError> {
        Ok(Self { rows: Vec::new() })
    }

    /// Takes a request into the queue.
    ///
    /// # Errors
    ///
    /// A [`Refusal`]. One that is given for a full queue by way of priorities goes to the request that gives way, as
    /// [`Finish::Displaced`](crate::Finish::Displaced).
    pub fn submit(&mut self, _now: u64, _arrival: Arrival<S>) -> Result<(), Refusal> {
        Ok(())
    }

    /// Ends all sequences of a request, wherever they are. Whether there was one.
    pub fn abort(&mut self, _id: u64) -> bool {
        false
    }

    /// Ends every request.
    pub fn abort_all(&mut self) {}

    /// The next step, or `None` when there is nothing to compute, or nothing before an answer.
    pub fn step(&mut self, _now: u64) -> Option<Step<'_, S>> {
        None
    }

    /// Takes the answer to the older of the steps that are out, which has just come.
    ///
    /// # Errors
    ///
    /// [`SchedError::NoStep`] and [`SchedError::Rows`]; the step is still out then.
    pub fn answer(&mut self, _now: u64, _answer: &Answer<'_>) -> Result<(), SchedError> {
        Err(SchedError::NoStep)
    }

    /// The driver answered the older step with an error, and its KV is what it was before. A step that was laid out after it is void, too: do not
    /// send it. Copies of void steps that were not made come again. A request whose steps fail three times in a row ends as
    /// [`Finish::Failed`](crate::Finish::Failed).
    pub fn step_failed(&mut self, _now: u64) {}

    /// The driver is gone, and all KV with it, the host's too. Steps that are out are void. Every request is computed again
    /// from its tokens by the next driver, in the order of arrival; no token is given out twice.
    pub fn driver_lost(&mut self, _now: u64) {}

    /// Moves what is new into `outputs`, whose content is dropped.
    pub fn outputs(&mut self, _outputs: &mut Outputs) {}

    /// The earliest deadline. [`step`](Self::step) ends requests whose deadline has passed, even if it gives nothing.
    pub fn next_deadline(&self) -> Option<u64> {
        None
    }

    /// Whether no request is there.
    pub fn is_idle(&self) -> bool {
        self.rows.is_empty()
    }

    /// Lets the pages of a session go. Whether there was one.
    pub fn end_session(&mut self, _session: u64) -> bool {
        false
    }

    /// Forgets every prefix that no request uses, and all sessions; `SGLang`'s `flush_cache`. Returns how many device pages that freed.
    pub fn flush(&mut self) -> usize {
        0
    }

    /// Counts.
    pub fn stats(&self) -> Stats {
        Stats::default()
    }

    pub(crate) fn rows(&self) -> impl ExactSizeIterator<Item = Row<'_, S>> + Clone {
        std::iter::empty()
    }
}
