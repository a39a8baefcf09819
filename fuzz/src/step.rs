//! The graph path from a plan to tokens: whatever a graph follows is there, in every row that it has.

use bytemuck::Pod;
use pie_planner::{
    ComputedPlan, ForwardTimings, Layout, Limits, Plan, Planner, StepMemory, StepSize,
};
use pie_wire::ArchivedForwardRequest;

use crate::common::device::DRIVER;
use crate::common::engine::{Engine, memory};
use crate::common::generate::VOCAB;
use crate::wire::exact;

/// Most rows of one request that a graph takes.
const MAX_ROWS: usize = 12;

/// A planner whose batches run as graphs where they can.
pub(crate) struct Steps {
    limits: Limits,
    planner: Planner,
    number: u32,
}

impl Steps {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            planner: Planner::new(limits, 1),
            number: 0,
        }
    }

    /// Plans a frame, runs it on one path or the other, and answers.
    pub(crate) fn frame(&mut self, request: &ArchivedForwardRequest) {
        let Ok(plan) = self.planner.plan(DRIVER, request) else {
            return;
        };
        let mut computed = match plan.graph_size(MAX_ROWS) {
            Some(size) => self.step(plan, size),
            // What a general pass brings to the block table must be known to the next step.
            None => self.passes(plan),
        };
        let mut buffer = exact::<4>(&vec![0xEE; self.limits.reply_bytes as usize]);
        let _ = self
            .planner
            .reply(&mut computed, ForwardTimings::default(), &mut buffer);
        self.planner.recycle(computed);
    }

    fn passes(&mut self, plan: Plan) -> ComputedPlan {
        let mut block = memory(self.planner.layout());
        let block: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
        let computed = Engine::default().run(&mut self.planner, plan, block);
        // As after an error.
        self.planner.invalidate_block_table();
        computed
    }

    fn step(&mut self, mut plan: Plan, size: StepSize) -> ComputedPlan {
        self.number += 1;
        let rows = size.rows.next_power_of_two();
        // Every other graph gets the rows to sample.
        let told = self.number.is_multiple_of(2) && size.slots < rows;
        let graph = StepSize {
            rows,
            slots: if told { size.slots.max(1) } else { rows },
        };
        let layout = if graph.slots == rows && self.number % 4 < 2 {
            self.planner.find_prefix_groups(&mut plan, 0);
            Layout::grouped_graph(rows)
        } else {
            Layout::graph(graph)
        };
        // Neither may be written past its end, nor hold what a former step left there.
        let mut block = vec![u64::MAX; layout.bytes().div_ceil(8)];
        let words = graph.slots * self.limits.mask_words() + self.limits.extra_update_words();
        let mut mask_words = vec![-1; words];
        let memory = StepMemory {
            block: bytemuck::cast_slice_mut(&mut block),
            mask_words: &mut mask_words,
        };
        let staged = self.planner.stage_graph(plan, &layout, memory, self.number);
        let step = staged.expect("the memory fits");
        let results = step.results();
        assert!((1..=graph.slots).contains(&results));
        let staged = Step {
            limits: &self.limits,
            layout: &layout,
            block: &block,
            words: &mask_words,
        };
        staged.check(size, step.mask_words(), self.number);
        // One of them is no token.
        let token = |slot: usize| {
            assert!(slot < results);
            (slot as u32 * 7 + self.number) % (VOCAB + 1)
        };
        step.put_tokens(token, |_| 0)
    }
}

struct Step<'a> {
    limits: &'a Limits,
    layout: &'a Layout,
    block: &'a [u64],
    /// Next to it.
    words: &'a [i32],
}

impl Step<'_> {
    fn check(&self, size: StepSize, used: usize, number: u32) {
        let limits = self.limits;
        let rows = size.rows;
        let table_rows = limits.max_requests as usize + 1;
        self.below("input_ids", limits.vocab_size as usize);
        self.below("positions", limits.max_positions as usize);
        self.below("out_cache_loc", limits.storage_slots());
        self.below("req_pool_indices", table_rows);
        self.below("seq_lens", limits.max_kv_len() as usize + 1);
        assert!(self.all::<i64>("seq_lens").iter().all(|&length| length > 0));
        let header = self.all::<i32>("header");
        assert_eq!(
            [header[0], header[2], header[3]],
            [number as i32, rows as i32, used as i32]
        );
        let pages = limits.row_pages as usize;
        let mut updates = self.all::<i64>("table_updates").to_vec();
        let further = (2 * header[1] as usize).saturating_sub(updates.len());
        updates.extend(self.words[..further].iter().map(|&word| i64::from(word)));
        for &[entry, slot] in updates[..2 * header[1] as usize].as_chunks().0 {
            assert!((pages..pages * table_rows).contains(&(entry as usize)));
            assert!((slot as usize) < limits.storage_slots());
        }
        for &[first, edges] in self.all::<i32>("slot_masks").as_chunks().0 {
            let width = usize::try_from(edges).unwrap_or(limits.mask_words());
            assert!(first as usize + width <= used.max(first as usize));
            assert!(edges == 0 || first as usize >= further);
        }
        // Rows that are not in use are padding: they store into the padding page, and are not sampled.
        let page = limits.page_size as usize;
        let slots = &self.all::<i64>("out_cache_loc")[rows..];
        assert!(slots.iter().all(|&slot| (slot as usize) < page));
        let table = &self.all::<i64>("req_pool_indices")[rows..];
        assert!(table.iter().all(|&row| row == 0));
        if !self.all::<i32>("prefix_lens").is_empty() {
            self.check_prefixes(rows);
        }
        let told = self.all::<i64>("slot_rows");
        self.below("slot_rows", rows);
        let sampled = if told.is_empty() { rows } else { size.slots };
        let temperatures = &self.all::<f32>("temperatures")[sampled..];
        assert!(temperatures.iter().all(|&temperature| temperature < 0.0));
    }

    /// Groups of rows lie one after the other, and each row that shares something is in one.
    fn check_prefixes(&self, rows: usize) {
        let lens = self.all::<i32>("prefix_lens");
        let seen = self.all::<i64>("seq_lens");
        let shares = |(&len, &seen): (&i32, &i64)| len % 128 == 0 && i64::from(len) < seen;
        assert!(lens.iter().zip(seen).all(shares));
        let used = self.all::<i32>("header")[4] as usize;
        let mut members: Vec<i32> = self.all::<i32>("prefix_order")[..used].to_vec();
        let starts = &self.all::<i32>("prefix_starts")[..used];
        for (entry, &start) in starts.iter().enumerate() {
            let group = starts[start as usize];
            assert!(start == group && start as usize <= entry);
        }
        let indices = self.all::<i32>("prefix_indices");
        let found = |(entry, &row): (usize, &i32)| indices[row as usize] as usize == entry;
        assert!(members.iter().enumerate().all(found));
        members.sort_unstable();
        let grouped = (0..rows as i32).filter(|&row| lens[row as usize] > 0);
        assert!(grouped.eq(members));
        assert!(lens[rows..].iter().all(|&len| len == 0));
    }

    /// All elements of an array lie in `0..end`.
    fn below(&self, name: &str, end: usize) {
        let values = self.all::<i64>(name);
        let fits = |&value: &i64| usize::try_from(value).is_ok_and(|value| value < end);
        assert!(
            values.iter().all(fits),
            "{name} {values:?}, must be below {end}"
        );
    }

    fn all<T: Pod>(&self, name: &str) -> &[T] {
        let field = self.layout.fields().iter().find(|field| field.name == name);
        let field = field.expect("a name of the layout");
        let bytes: &[u8] = bytemuck::cast_slice(self.block);
        bytemuck::cast_slice(&bytes[field.offset..][..field.capacity * size_of::<T>()])
    }
}
