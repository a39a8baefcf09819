//! The rules of responses that the runtime relies on without checking them (§8.1).

use thiserror::Error;

use crate::schema::ForwardResponse;

/// A rule of §8.1 that a response breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum ResponseRule {
    /// Offsets of another length than the entries that they partition.
    #[error("{array} has {found} entries, expected {expected}")]
    Length {
        /// Name of the array.
        array: &'static str,
        /// Its entries.
        found: usize,
        /// Entries that the rule asks for.
        expected: usize,
    },
    /// Offsets that do not rise from 0 to the end of what they partition.
    #[error("{array} must rise from 0 to {end}")]
    Order {
        /// Name of the array.
        array: &'static str,
        /// Length of what it partitions.
        end: usize,
    },
}

impl ForwardResponse {
    /// Checks that every offset leads to an entry that exists, in every array that the runtime indexes.
    ///
    /// # Errors
    ///
    /// [`ResponseRule`] names the first array that breaks its rule.
    pub fn check(&self) -> Result<(), ResponseRule> {
        let requests = self.num_requests as usize;
        // A response to no requests may leave their offsets out.
        if requests > 0 || !self.tokens_indptr.is_empty() || !self.tokens.is_empty() {
            partition(
                "tokens_indptr",
                &self.tokens_indptr,
                requests,
                self.tokens.len(),
            )?;
        }
        let two_levels = [
            (
                ("dists_req_indptr", &self.dists_req_indptr),
                ("dists_kv_indptr", &self.dists_kv_indptr),
                self.dists_ids.len(),
            ),
            (
                ("logits_req_indptr", &self.logits_req_indptr),
                ("logits_byte_indptr", &self.logits_byte_indptr),
                self.logits_bytes.len(),
            ),
            (
                ("logprobs_req_indptr", &self.logprobs_req_indptr),
                ("logprobs_val_indptr", &self.logprobs_val_indptr),
                self.logprobs_values.len(),
            ),
        ];
        for ((outer_name, outer), (inner_name, inner), values) in two_levels {
            if outer.is_empty() && inner.is_empty() && values == 0 {
                continue;
            }
            let entries = inner.len().saturating_sub(1);
            partition(outer_name, outer, requests, entries)?;
            partition(inner_name, inner, entries, values)?;
        }
        for (name, offsets, values) in [
            (
                "entropies_indptr",
                &self.entropies_indptr,
                self.entropies.len(),
            ),
            ("spec_indptr", &self.spec_indptr, self.spec_tokens.len()),
        ] {
            if !(offsets.is_empty() && values == 0) {
                partition(name, offsets, requests, values)?;
            }
        }
        parallel("dists_probs", self.dists_probs.len(), self.dists_ids.len())?;
        parallel(
            "spec_positions",
            self.spec_positions.len(),
            self.spec_tokens.len(),
        )
    }
}

fn parallel(array: &'static str, found: usize, expected: usize) -> Result<(), ResponseRule> {
    if found == expected {
        Ok(())
    } else {
        Err(ResponseRule::Length {
            array,
            found,
            expected,
        })
    }
}

/// Checks that `offsets` cuts `end` values into `parts`.
fn partition(
    array: &'static str,
    offsets: &[u32],
    parts: usize,
    end: usize,
) -> Result<(), ResponseRule> {
    parallel(array, offsets.len(), parts + 1)?;
    let starts =
        offsets.first() == Some(&0) && offsets.last().map(|&last| last as usize) == Some(end);
    if starts && offsets.is_sorted() {
        Ok(())
    } else {
        Err(ResponseRule::Order { array, end })
    }
}
