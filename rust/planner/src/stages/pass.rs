//! Writes what a pass computes into its staging block.

use crate::block::PassBlock;
use crate::frame::request::{Request, Segment, pass_rows};
use crate::frame::rows::Rows;
use crate::limits::Limits;
use crate::table::BlockTable;
use crate::table::changes::TableChanges;

/// One forward pass over the staged arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Rows.
    pub tokens: usize,
    /// Requests.
    pub requests: usize,
    /// Whether every request has exactly one row, of text, which sees all KV up to itself.
    pub decode: bool,
    /// Whether rows see what [`StagedPass::attention_mask`](crate::StagedPass::attention_mask) says, and not all KV up to
    /// themselves.
    pub masked: bool,
    /// Sum of the KV lengths after the pass.
    pub seq_lens_sum: u64,
    /// Changed block-table entries.
    pub updates: usize,
    /// Sampling slots, in groups of at most [`Limits::max_slots`].
    pub slots: usize,
}

/// Writes the block-table changes of the requests that begin in these segments; returns their number.
pub(crate) fn write_changes(
    changes: &TableChanges,
    table: &mut BlockTable,
    limits: &Limits,
    (segments, requests): (&[Segment], &[Request]),
    out: &mut [[i64; 2]],
) -> usize {
    let begins = |segment: &Segment| {
        let request = &requests[segment.request()];
        segment.start() == request.rows().start()
    };
    // Only the first one can be the rest of a request.
    let begun = &segments[usize::from(!begins(&segments[0]))..];
    let place = |segment: &Segment| requests[segment.request()].place();
    if !changes.spills() {
        // Those of neighbours are neighbours.
        let ends = begun.first().zip(begun.last());
        let updates = ends.map_or(0..0, |(a, b)| {
            place(a).updates().start()..place(b).updates().end()
        });
        let updates = &changes.updates()[updates];
        out[..updates.len()].copy_from_slice(updates);
        return updates.len();
    }
    let mut count = 0;
    for segment in begun {
        changes.each(place(segment), table, limits, |update| {
            out[count] = update;
            count += 1;
        });
    }
    count
}

/// Writes what a pass says of its requests; returns the sum of their KV lengths after it.
pub(crate) fn write_requests(
    block: &mut PassBlock<'_>,
    segments: &[Segment],
    requests: &[Request],
) -> u64 {
    let block = block.requests(segments.len());
    let mut start = 0;
    for (entry, segment) in segments.iter().enumerate() {
        let request = &requests[segment.request()];
        let prefix = segment.kv_start(request);
        // Row 0 of the engine's table belongs to padding.
        block.req_pool_indices[entry] = request.place().row() as i64 + 1;
        block.seq_lens[entry] = (prefix + segment.len()) as i64;
        block.extend_prefix_lens[entry] = prefix as i32;
        block.extend_seq_lens[entry] = segment.len() as i32;
        block.extend_start_loc[entry] = start as i32;
        start += segment.len();
    }
    block.seq_lens.iter().sum::<i64>() as u64
}

/// Writes the tokens and positions of a pass.
pub(crate) fn write_rows(block: &mut PassBlock<'_>, segments: &[Segment], rows: &Rows) {
    let range = pass_rows(segments);
    let widen = |target: &mut [i64], source: &[u32]| {
        for (target, &value) in target.iter_mut().zip(source) {
            *target = i64::from(value);
        }
    };
    widen(block.input_ids, &rows.token_ids()[range.clone()]);
    widen(block.positions, &rows.positions()[range]);
}
