//! The plan of one frame: an owned description of what the model computes, cut into passes, and of what the requests are
//! answered.

pub(crate) mod bindings;
pub(crate) mod contents;
pub(crate) mod passes;

use std::mem;

use pie_speculation::StepKind;
use rustc_hash::FxHashSet;

use crate::block::PassBlock;
use crate::drafting::{Drafted, FrameDrafts};
use crate::fault::RequestFault;
use crate::frame::Frame;
use crate::frame::check::FrameFacts;
use crate::frame::request::{Request, Segment, pass_rows};
use crate::frame::rows::Rows;
use crate::image::{Images, PassImages};
use crate::limits::Limits;
use crate::mask::{MaskRows, Visibility};
use crate::plan::contents::{Contents, Lasting};
use crate::plan::passes::Passes;
use crate::prefix::{PrefixGroups, ROW_COST, Sequence};
use crate::reply::fit::oversize_requests;
use crate::slot::group::{PassSlots, SlotGroup};
use crate::slot::outputs::Outputs;
use crate::slot::{Slot, Slots};
use crate::stages::error::StageError;
use crate::stages::pass::{Pass, write_changes, write_requests, write_rows};
use crate::state::State;
use crate::table::BlockTable;
use crate::table::changes::TableChanges;
use crate::table::storage::Storage;

/// One frame as [`Planner::plan`](crate::Planner::plan) makes it. Its passes are still to be staged, in order, by
/// [`Planner::stage`](crate::Planner::stage), or its only one by [`Planner::stage_graph`](crate::Planner::stage_graph).
///
/// The order of the calls is one of types: each consumes the state that the one before returned, and only a
/// [`Computed`](crate::Computed) frame can be answered.
///
/// ```compile_fail,E0308
/// # use pie_planner::{Plan, Planner, Probes};
/// fn too_early(planner: &mut Planner, mut plan: Plan, buffer: &mut [u8]) {
///     planner.reply(&mut plan, Probes::default(), buffer);
/// }
/// ```
///
/// ```compile_fail,E0382
/// # use pie_planner::{PassBlock, Plan, Planner};
/// fn twice(planner: &mut Planner, plan: Plan, block: &mut PassBlock<'_>) {
///     planner.stage(plan, block);
///     planner.stage(plan, block);
/// }
/// ```
#[derive(Debug)]
pub struct Plan(Box<Parts>);

/// The memory of a plan, which is used again for others.
#[derive(Debug)]
struct Parts {
    limits: Limits,
    driver_id: u32,
    /// Number of the frame, from 1 on.
    number: u64,
    has_states: bool,
    requests: Vec<Request>,
    contents: Contents,
    /// State slots that requests keep, while they are looked through.
    kept_states: FxHashSet<u32>,
    passes: Passes,
    next_pass: usize,
    /// Those of the staged pass.
    pass_slots: PassSlots,
    prefixes: PrefixGroups,
    faults: Vec<(usize, RequestFault)>,
}

impl Plan {
    /// Room for plans within certain limits.
    pub(crate) fn new(limits: Limits) -> Self {
        Self(Box::new(Parts {
            limits,
            driver_id: 0,
            number: 0,
            has_states: false,
            requests: Vec::new(),
            contents: Contents::default(),
            kept_states: FxHashSet::default(),
            passes: Passes::default(),
            next_pass: 0,
            pass_slots: PassSlots::default(),
            prefixes: PrefixGroups::default(),
            faults: Vec::new(),
        }))
    }

    /// Plans a frame in the place of the last one. The block table expects its pages.
    pub(crate) fn make(
        &mut self,
        driver_id: u32,
        (frame, facts): (&Frame<'_>, &FrameFacts<'_>),
        mut lasting: Lasting<'_>,
    ) {
        let parts = &mut *self.0;
        parts.clear();
        parts.driver_id = driver_id;
        parts.number = lasting.table.frame();
        parts.has_states = lasting.states > 0;
        parts.contents.start(&parts.limits, &lasting);
        // Taken out, so that each is made where it stays.
        let mut requests = mem::take(&mut parts.requests);
        requests.resize_with(frame.requests, Request::default);
        for (index, request) in requests.iter_mut().enumerate() {
            let own = (index, request);
            let added = (parts.contents).add((frame, facts), &parts.limits, &mut lasting, own);
            if let Err(fault) = added {
                parts.faults.push((index, fault));
            }
        }
        parts.requests = requests;
        if lasting.drafting.is_some() {
            let kind = parts.kind();
            parts.contents.drafts_mut().set_kind(kind);
        }
        parts.mute_oversize_requests();
        parts.keep_last_states();
        let slots = lasting.adapters.slots();
        parts.passes.cut(&parts.requests, &parts.limits, slots);
    }

    /// The bounds that the plan keeps to.
    pub(crate) const fn limits(&self) -> &Limits {
        &self.0.limits
    }

    pub(crate) const fn driver_id(&self) -> u32 {
        self.0.driver_id
    }

    /// Number of the frame, from 1 on.
    pub(crate) const fn number(&self) -> u64 {
        self.0.number
    }

    /// Whether the engine has recurrent state.
    pub(crate) const fn has_states(&self) -> bool {
        self.0.has_states
    }

    pub(crate) const fn rows(&self) -> &Rows {
        self.0.contents.rows()
    }

    pub(crate) const fn changes(&self) -> &TableChanges {
        self.0.contents.changes()
    }

    pub(crate) fn requests(&self) -> &[Request] {
        &self.0.requests
    }

    pub(crate) const fn slots(&self) -> &Slots {
        self.0.contents.slots()
    }

    pub(crate) const fn mask_rows(&self) -> &MaskRows {
        self.0.contents.mask_rows()
    }

    pub(crate) const fn images(&self) -> &Images {
        self.0.contents.images()
    }

    pub(crate) const fn passes(&self) -> &Passes {
        &self.0.passes
    }

    /// Number of the pass to stage next.
    pub(crate) const fn next_pass(&self) -> usize {
        self.0.next_pass
    }

    /// The segments of the staged pass; none before the first.
    pub(crate) fn staged_segments(&self) -> &[Segment] {
        let pass = self.0.next_pass.checked_sub(1);
        pass.and_then(|pass| self.0.passes.get(pass)).unwrap_or(&[])
    }

    pub(crate) const fn pass_slots(&self) -> &PassSlots {
        &self.0.pass_slots
    }

    pub(crate) const fn prefixes(&self) -> &PrefixGroups {
        &self.0.prefixes
    }

    pub(crate) const fn drafts(&self) -> &FrameDrafts {
        self.0.contents.drafts()
    }

    /// What the drafter changes of the plan, and what it reads.
    pub(crate) fn drafting(&mut self) -> (&mut FrameDrafts, Drafted<'_>) {
        let parts = &mut *self.0;
        let (drafts, rows, slots) = parts.contents.drafting();
        let drafted = Drafted {
            limits: &parts.limits,
            number: parts.number,
            requests: &parts.requests,
            rows,
            slots,
        };
        (drafts, drafted)
    }

    /// Writes the next pass into `block`; `None` when all are done.
    pub(crate) fn stage(
        &mut self,
        table: &mut BlockTable,
        storage: &mut Storage,
        block: &mut PassBlock<'_>,
    ) -> Option<Pass> {
        let parts = &mut *self.0;
        let (limits, requests, slots) =
            (&parts.limits, &parts.requests[..], parts.contents.slots());
        let segments = parts.passes.get(parts.next_pass)?;
        let updates = write_changes(
            parts.contents.changes(),
            table,
            limits,
            (segments, requests),
            block.table_updates,
        );
        let seq_lens_sum = write_requests(block, segments, requests);
        write_rows(block, segments, parts.contents.rows());
        storage.write(limits, table, segments, requests, block.out_cache_loc);
        // Requests that were emptied have faults.
        if parts.passes.len() == 1 && parts.faults.is_empty() {
            parts.pass_slots.take_all(slots, limits);
        } else {
            parts.pass_slots.take(segments, requests, slots, limits);
        }
        parts.next_pass += 1;
        let rows = pass_rows(segments);
        let masked = requests[segments[0].request()].visibility() != Visibility::Causal;
        Some(Pass {
            tokens: rows.len(),
            requests: segments.len(),
            decode: !masked
                && segments.iter().all(|segment| segment.len() == 1)
                && !parts.contents.images().touch(&rows),
            masked,
            seq_lens_sum,
            updates,
            slots: parts.pass_slots.len(),
        })
    }

    /// Notes that a graph computes all passes.
    pub(crate) const fn skip_passes(&mut self) {
        self.0.next_pass = self.0.passes.len();
    }

    /// Writes the next slot group of the staged pass into `block`; `None` when all are done.
    pub(crate) fn stage_slots(&mut self, block: &mut PassBlock<'_>) -> Option<SlotGroup> {
        let base = self.staged_segments().first()?.start();
        let parts = &mut *self.0;
        parts
            .pass_slots
            .stage(parts.contents.slots(), &parts.limits, base, block)
    }

    /// Takes what the engine computed for the staged slot group.
    pub(crate) fn put_outputs(&mut self, outputs: &Outputs<'_>) -> Result<(), StageError> {
        let parts = &mut *self.0;
        let vocab_size = parts.limits.vocab_size;
        let valid =
            parts
                .pass_slots
                .put_outputs(parts.contents.slots_mut(), outputs, vocab_size)?;
        if !valid {
            parts.mute_invalid_requests();
        }
        Ok(())
    }

    /// Takes the token of each slot of a graph, by its number if slots are `numbered`, else by its row, and the words of
    /// places, which are in the order of their slots.
    pub(crate) fn put_tokens(
        &mut self,
        numbered: bool,
        token: impl Fn(usize) -> u32,
        place_word: impl Fn(usize) -> u32,
    ) {
        let parts = &mut *self.0;
        let vocab_size = parts.limits.vocab_size;
        let slots = parts.contents.slots_mut();
        let mut valid = true;
        let (mut number, mut word) = (0, 0);
        for request in &parts.requests {
            for slot in request.slots().range() {
                let place = if numbered {
                    number
                } else {
                    slots.all()[slot].row()
                };
                number += 1;
                valid &= slots.put_token(slot, token(place), vocab_size);
                let words = slots.place_words(&slots.all()[slot]);
                if words > 0 {
                    let own = (word..word + words).map(&place_word);
                    slots.put_place(slot, own);
                    word += words;
                }
            }
        }
        if !valid {
            parts.mute_invalid_requests();
        }
    }

    /// Finds groups of rows that read the same KV first; see [`Planner::find_groups`](crate::Planner::find_groups).
    pub(crate) fn find_groups(&mut self, table: &mut BlockTable, more_rows: usize) -> bool {
        let parts = &mut *self.0;
        let (segments, page_size) = (parts.passes.segments(), parts.limits.page_size as usize);
        let requests = &parts.requests[..];
        let sequence = |index: usize| {
            let request = &requests[segments[index].request()];
            Sequence {
                first_page: request.place().first_page(),
                table_row: request.place().row(),
                kv_start: segments[index].kv_start(request),
                rows: segments[index].len(),
            }
        };
        let common = |[earlier, later]: [usize; 2], most| table.common(earlier, later, most);
        parts
            .prefixes
            .find(segments.len(), page_size, sequence, common);
        parts.prefixes.saved() > more_rows as i64 * ROW_COST
    }

    /// Empties requests whose adapter is lost.
    pub(crate) fn unbind(&mut self, requests: &[usize], fault: impl Fn() -> RequestFault) {
        let parts = &mut *self.0;
        for &index in requests {
            parts.requests[index].unbind();
        }
        // One whose outputs are refused already has its reason. Both lists rise.
        let mut faulty = parts.faults.iter().map(|&(index, _)| index).peekable();
        let fresh = requests.iter().copied().filter(|index| {
            while faulty.next_if(|other| other < index).is_some() {}
            faulty.peek() != Some(index)
        });
        let fresh: Vec<_> = fresh.map(|index| (index, fault())).collect();
        parts.add_faults(fresh);
    }

    /// Requests of the frame.
    #[must_use]
    pub fn request_count(&self) -> usize {
        self.0.requests.len()
    }

    /// Rows that the frame computes, drafts included.
    #[must_use]
    pub fn token_count(&self) -> usize {
        self.rows().len()
    }

    /// Input tokens that the frame computes for requests which bring more than one: of prompts, not of decodes.
    #[must_use]
    pub fn prompt_token_count(&self) -> usize {
        self.0.contents.prompt_tokens()
    }

    /// The id of the context of request `index`; `None` where the runtime names none.
    #[must_use]
    pub fn context_id(&self, index: usize) -> Option<u64> {
        let request = self.0.requests.get(index)?;
        Some(request.context()).filter(|&context| context != 0)
    }

    /// Passes of the frame; 0 when nothing needs the model.
    #[must_use]
    pub fn pass_count(&self) -> usize {
        self.0.passes.len()
    }

    /// Requests of the frame that are answered with empty ranges, and why.
    #[must_use]
    pub fn faults(&self) -> &[(usize, RequestFault)] {
        &self.0.faults
    }

    /// Whether some request asks for other logits than the model's, by penalties, biases or suppressed tokens, or for
    /// log-probabilities.
    #[must_use]
    pub const fn is_extended(&self) -> bool {
        let slots = self.slots();
        slots.extras().adjusts() || slots.extras().counts() || slots.place_bytes() > 0
    }

    /// What the next pass is to note for requests whose tokens count: first, before the frame's first pass, storage slots
    /// and the tokens that they have KV of. `None` when nothing counts.
    #[must_use]
    pub(crate) fn noted(&self) -> Option<&[[i64; 2]]> {
        let extras = self.slots().extras();
        let first = self.0.next_pass <= 1;
        extras
            .counts()
            .then(|| if first { extras.history() } else { &[] })
    }

    /// Whether requests that are served bring images.
    #[must_use]
    pub fn has_images(&self) -> bool {
        !self.images().is_empty()
    }

    /// The images of the staged pass.
    pub(crate) fn pass_images(&self) -> Option<PassImages> {
        let (segments, requests) = (self.staged_segments(), self.requests());
        if segments.is_empty() {
            return None;
        }
        // The first segment that reaches into rows of an image is its request's: images do not leave their requests.
        let locate = |rows: &std::ops::Range<usize>| {
            let entry = segments.partition_point(|segment| segment.rows().end <= rows.start);
            let request = &requests[segments[entry].request()];
            let kv = |row: usize| request.prefix() + (row - request.rows().start());
            (entry, kv(rows.start)..kv(rows.end))
        };
        let positions = self.rows().positions();
        self.images()
            .of_pass(&pass_rows(segments), positions, locate)
    }
}

impl Parts {
    fn clear(&mut self) {
        self.requests.clear();
        self.contents.clear();
        self.next_pass = 0;
        self.prefixes.clear();
        self.faults.clear();
    }

    /// What makes a step of the frame cost something else than others.
    fn kind(&self) -> StepKind {
        let bound = (self.requests.iter()).any(|request| request.adapter().is_some());
        match (bound, self.contents.slots().has_probes()) {
            (true, _) => StepKind::Adapters,
            (false, true) => StepKind::Probed,
            (false, false) => StepKind::Plain,
        }
    }

    /// Notes faults that show only after their requests were planned.
    fn add_faults(&mut self, faults: impl IntoIterator<Item = (usize, RequestFault)>) {
        self.faults.extend(faults);
        self.faults.sort_unstable_by_key(|&(index, _)| index);
    }

    /// Empties requests whose outputs the response has no room for.
    fn mute_oversize_requests(&mut self) {
        let largest = oversize_requests(&self.requests, self.contents.slots(), &self.limits);
        if largest.is_empty() {
            return;
        }
        for &(_, index) in &largest {
            self.requests[index].mute();
        }
        let limit = self.limits.reply_bytes as usize;
        let fault = |(bytes, index)| (index, RequestFault::Oversize { bytes, limit });
        self.add_faults(largest.into_iter().map(fault));
    }

    /// Empties the requests with a slot whose logits were no numbers, and others where the archive that replaces a fast
    /// reply does not fit.
    fn mute_invalid_requests(&mut self) {
        let mut invalid = Vec::new();
        for (index, request) in self.requests.iter_mut().enumerate() {
            let slots = self.contents.slots().of(request.slots());
            if slots.iter().any(Slot::is_invalid) {
                request.mute();
                invalid.push((index, RequestFault::Logits));
            }
        }
        self.add_faults(invalid);
        self.mute_oversize_requests();
    }

    /// When several requests name one slot of recurrent state, the last one keeps it. An earlier one is what the runtime
    /// sent before it knew better, and advances the padding slot.
    fn keep_last_states(&mut self) {
        if !self.has_states {
            return;
        }
        self.kept_states.clear();
        let computed = (self.requests.iter_mut()).filter(|request| !request.rows().is_empty());
        for request in computed.rev() {
            if !self.kept_states.insert(request.state().slot()) {
                request.set_state(State::default());
            }
        }
    }
}
