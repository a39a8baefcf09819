//! Requests that are rejected after planning.

use crate::error::RequestError;
use crate::plan::PlanInner;
use crate::reply::capacity::oversize_requests;
use crate::slot::SamplingSlot;

impl PlanInner {
    /// Adds errors that are found after planning, in the order of their requests.
    pub(super) fn add_request_errors(
        &mut self,
        request_errors: impl IntoIterator<Item = (usize, RequestError)>,
    ) {
        self.request_errors.extend(request_errors);
        self.request_errors
            .sort_unstable_by_key(|&(index, _)| index);
    }

    /// Rejects the requests whose outputs do not fit the response.
    pub(super) fn reject_oversize_requests(&mut self) {
        let largest = oversize_requests(&self.requests, self.arrays.slots(), &self.limits);
        if largest.is_empty() {
            return;
        }
        for &(_, index) in &largest {
            self.requests[index].drop_outputs();
        }
        let limit = self.limits.reply_bytes as usize;
        let error = |(bytes, index)| (index, RequestError::Oversize { bytes, limit });
        self.add_request_errors(largest.into_iter().map(error));
    }

    /// Rejects requests with NaN logits, then others if the archive that replaces a fast reply does not fit.
    pub(super) fn reject_nan_requests(&mut self) {
        let mut invalid = Vec::new();
        for (index, request) in self.requests.iter_mut().enumerate() {
            let slots = self.arrays.slots().of(request.slots());
            if slots.iter().any(SamplingSlot::is_invalid) {
                let mut own = request.slots().range();
                let failure = own.find_map(|slot| self.pass_slots.failure(slot));
                let error =
                    failure.map_or(RequestError::Logits, |reason| RequestError::Processor {
                        reason: reason.into(),
                    });
                request.drop_outputs();
                invalid.push((index, error));
            }
        }
        self.add_request_errors(invalid);
        self.reject_oversize_requests();
    }
}
