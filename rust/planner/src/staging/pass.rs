//! Writes the arrays of a pass into its staging block.

use crate::block::PassBlock;
use crate::frame::query_tokens::QueryTokens;
use crate::frame::request::{PlannedRequest, Segment, pass_tokens};
use crate::limits::Limits;
use crate::table::BlockTable;
use crate::table::updates::TableUpdates;

/// One forward pass over the staged arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Query tokens.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Whether every request has exactly one text token with causal attention.
    pub decode: bool,
    /// Whether attention uses [`StagedPass::attention_mask`](crate::StagedPass::attention_mask) instead of the causal mask.
    pub masked: bool,
    /// Sum of the KV lengths after the pass.
    pub seq_lens_sum: u64,
    /// Changed block-table entries.
    pub updates: usize,
    /// Sampling slots, in groups of at most [`Limits::max_slots`].
    pub slots: usize,
}

/// Writes the block-table updates of the requests that begin in these segments; returns their number.
pub(crate) fn write_changes(
    table_updates: &TableUpdates,
    table: &mut BlockTable,
    limits: &Limits,
    (segments, requests): (&[Segment], &[PlannedRequest]),
    out: &mut [[i64; 2]],
) -> usize {
    let begins = |segment: &Segment| {
        let request = &requests[segment.request()];
        segment.start() == request.tokens().start()
    };
    // Only the first segment can continue a request.
    let begun = &segments[usize::from(!begins(&segments[0]))..];
    let table_row = |segment: &Segment| requests[segment.request()].table_row();
    if !table_updates.spills() {
        // Updates of neighbouring requests are adjacent.
        let ends = begun.first().zip(begun.last());
        let updates = ends.map_or(0..0, |(a, b)| {
            table_row(a).updates().start()..table_row(b).updates().end()
        });
        let updates = &table_updates.updates()[updates];
        out[..updates.len()].copy_from_slice(updates);
        return updates.len();
    }
    let mut count = 0;
    for segment in begun {
        table_updates.each(table_row(segment), table, limits, |update| {
            out[count] = update;
            count += 1;
        });
    }
    count
}

/// Writes the per-request arrays; returns the sum of the KV lengths after the pass.
pub(crate) fn write_requests(
    block: &mut PassBlock<'_>,
    segments: &[Segment],
    requests: &[PlannedRequest],
) -> u64 {
    let block = block.requests(segments.len());
    let mut start = 0;
    for (entry, segment) in segments.iter().enumerate() {
        let request = &requests[segment.request()];
        let prefix = segment.kv_start(request);
        // Row 0 of the engine's table is for padding.
        block.req_pool_indices[entry] = request.table_row().index() as i64 + 1;
        block.seq_lens[entry] = (prefix + segment.len()) as i64;
        block.extend_prefix_lens[entry] = prefix as i32;
        block.extend_seq_lens[entry] = segment.len() as i32;
        block.extend_start_loc[entry] = start as i32;
        start += segment.len();
    }
    block.seq_lens.iter().sum::<i64>() as u64
}

/// Writes the tokens and positions of a pass.
pub(crate) fn write_rows(block: &mut PassBlock<'_>, segments: &[Segment], rows: &QueryTokens) {
    let range = pass_tokens(segments);
    let widen = |target: &mut [i64], source: &[u32]| {
        for (target, &value) in target.iter_mut().zip(source) {
            *target = i64::from(value);
        }
    };
    widen(block.input_ids, &rows.token_ids()[range.clone()]);
    widen(block.positions, &rows.positions()[range]);
}
