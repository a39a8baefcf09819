//! The graph path: runs a planned batch as one launch of a captured CUDA graph, and polls the sampled tokens in pinned memory,
//! without Python.

mod kind;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::launch::{Launch, LaunchError};
use pie_planner::{
    ComputedPlan, Layout, Plan, Planner, StageError, StagedStep, StepMemory, StepSize,
};
use pie_ring::{Message, Wait};
use thiserror::Error;

use crate::graph_path::kind::GraphKind;
use crate::leader::{Leader, StepHeader};
use crate::timing::{DeviceTimes, micros};

/// Memory that host and graphs share.
pub trait Memory: Send {
    /// Inputs of the graphs.
    fn step(&mut self) -> StepMemory<'_>;

    /// Outputs, one word per sampling slot: step number in the upper half, token in the lower one. Words are written atomically, so
    /// the step number marks a token as ready.
    fn results(&self) -> &[AtomicU64];

    /// Log-probabilities of an extended graph, written before the results.
    fn logprobs(&self) -> &[AtomicU32];

    /// Drafts of a draft model, `[slots, num_drafts]`, which graphs with one write before the results, and `num_drafts`; 0 without.
    fn drafts(&self) -> (&[AtomicU32], usize) {
        (&[], 0)
    }
}

/// Why a step failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GraphPathError {
    /// The memory does not fit the graphs.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The other ranks cannot be reached.
    #[error("a step cannot be sent to the other ranks: {0}")]
    Leader(String),
    /// The device failed.
    #[error("a graph of {graph_rows} rows failed with {rows} in use: {source}")]
    Launch {
        /// Rows of the graph.
        graph_rows: usize,
        /// Rows in use.
        rows: usize,
        /// What the device said.
        source: LaunchError,
    },
}

impl GraphPathError {
    /// Whether the device is unusable.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Launch { source, .. } if source.is_fatal())
    }
}

/// Interval of device error checks while results are polled.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Polls between two reads of the clock.
const POLLS: u32 = 256;
/// Sleep between polls once the spin budget is used up.
const POLL_SLEEP: Duration = Duration::from_micros(20);

/// The captured graphs, by batch size, with their memory.
pub struct GraphPath {
    device: Box<dyn Launch>,
    memory: Box<dyn Memory>,
    /// Size and block layout of each graph, in the order of [`GraphKind`] and ascending.
    graphs: Vec<(StepSize, Layout)>,
    /// The graphs of each kind.
    kinds: [Range<usize>; GraphKind::COUNT],
    /// Maximum query tokens of one request.
    max_rows: usize,
    step: u32,
    /// Spin budget before polls sleep; `None` = unlimited.
    spin: Option<Duration>,
    /// Broadcast to the other ranks.
    leader: Option<Leader>,
}

impl GraphPath {
    /// Graph `i` of `device` runs steps up to `sizes[i]`, ascending. Batches with more than `max_rows` tokens of one request are not
    /// run. `wait` is the strategy of the ring.
    #[must_use]
    pub fn new(
        device: Box<dyn Launch>,
        memory: Box<dyn Memory>,
        sizes: &[StepSize],
        max_rows: usize,
        wait: Wait,
    ) -> Self {
        Self {
            device,
            memory,
            max_rows,
            graphs: sizes
                .iter()
                .map(|&size| (size, Layout::graph(size)))
                .collect(),
            kinds: [0; GraphKind::COUNT].map(|start| start..sizes.len()),
            step: 0,
            spin: match wait {
                Wait::Spin => None,
                Wait::SpinThenPark(spin) => Some(spin),
                Wait::Park => Some(Duration::ZERO),
            },
            leader: None,
        }
    }

    /// Adds graphs with shared-prefix groups, of these sizes, ascending. Steps in which [groups](Planner::find_prefix_groups) pay off
    /// run as one of these.
    #[must_use]
    pub fn grouped(self, rows: &[usize]) -> Self {
        let graphs = rows
            .iter()
            .map(|&rows| (rows.into(), Layout::grouped_graph(rows)));
        self.with(GraphKind::Grouped, graphs)
    }

    /// Adds extended graphs, with penalties, biases and log-probabilities, of these sizes, ascending. Only steps of frames with an
    /// extension run as one of these.
    #[must_use]
    pub fn extended(self, rows: &[usize]) -> Self {
        let graphs = rows
            .iter()
            .map(|&rows| (rows.into(), Layout::extended_graph(rows)));
        self.with(GraphKind::Extended, graphs)
    }

    /// Adds graphs that apply `LoRA` adapters, of these sizes, ascending; and extended ones that do. Only steps that
    /// [bind adapters](Plan::binds_adapters) run as one of these.
    #[must_use]
    pub fn adapters(self, sizes: &[StepSize], extended: &[usize]) -> Self {
        let graphs = sizes
            .iter()
            .map(|&size| (size, Layout::adapter_graph(size)));
        let others = extended
            .iter()
            .map(|&rows| (rows.into(), Layout::extended_adapter_graph(rows)));
        self.with(GraphKind::Adapters, graphs)
            .with(GraphKind::ExtendedAdapters, others)
    }

    /// Adds graphs that run a draft model, of these sizes, ascending; and extended ones that do. Steps run as one of these when
    /// [the planner](Planner::runs_draft_model) wants their drafts.
    #[must_use]
    pub fn drafting(self, sizes: &[StepSize], extended: &[usize]) -> Self {
        let graphs = sizes.iter().map(|&size| (size, Layout::graph(size)));
        let others = extended
            .iter()
            .map(|&rows| (rows.into(), Layout::extended_graph(rows)));
        self.with(GraphKind::Drafting, graphs)
            .with(GraphKind::ExtendedDrafting, others)
    }

    /// Adds the graphs of a kind, after those of the kinds before it.
    fn with(mut self, kind: GraphKind, graphs: impl Iterator<Item = (StepSize, Layout)>) -> Self {
        let start = self.graphs.len();
        self.graphs.extend(graphs);
        let end = self.graphs.len();
        self.kinds[kind as usize] = start..end;
        self.kinds[kind as usize + 1..].fill(end..end);
        self
    }

    /// Broadcasts every step to the [workers](crate::Worker) before it is launched.
    #[must_use]
    pub fn with_leader(mut self, leader: Leader) -> Self {
        self.leader = Some(leader);
        self
    }

    /// Whether steps are broadcast to other ranks.
    pub(crate) const fn is_leader(&self) -> bool {
        self.leader.is_some()
    }

    /// The smallest graph that can run the plan, if any.
    pub(crate) fn choose(&self, planner: &mut Planner, plan: &mut Plan) -> Option<usize> {
        let needed = plan.graph_size(self.max_rows)?;
        let smallest = |kind: GraphKind| {
            let range = self.kinds[kind as usize].clone();
            let graphs = &self.graphs[range.clone()];
            let fewest = graphs.partition_point(|(size, _)| size.rows < needed.rows);
            let runs = |(size, _): &(StepSize, Layout)| size.runs(needed);
            Some(range.start + fewest + graphs[fewest..].iter().position(runs)?)
        };
        if plan.binds_adapters() {
            let kind = if plan.is_extended() {
                GraphKind::ExtendedAdapters
            } else {
                GraphKind::Adapters
            };
            return smallest(kind).filter(|_| planner.graphs_apply_adapters(plan));
        }
        let (kind, drafting) = if plan.is_extended() {
            (GraphKind::Extended, GraphKind::ExtendedDrafting)
        } else {
            (GraphKind::Plain, GraphKind::Drafting)
        };
        if let Some(graph) = smallest(drafting)
            && planner.runs_draft_model(plan)
        {
            return Some(graph);
        }
        if plan.is_extended() {
            return smallest(kind);
        }
        let own = smallest(kind)?;
        let other = smallest(GraphKind::Grouped).filter(|&graph| {
            // Fewer sizes are captured, so it may have more padding.
            let rows = |graph: usize| self.graphs[graph].0.rows;
            planner.find_prefix_groups(plan, rows(graph).saturating_sub(rows(own)))
        });
        Some(other.unwrap_or(own))
    }

    /// Runs the plan as the [chosen](Self::choose) graph.
    pub(crate) fn run(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        graph: usize,
    ) -> Result<GraphPathRun, GraphPathError> {
        let started = Instant::now();
        let step = self.stage(planner, plan, graph)?;
        let staged = Instant::now();
        let mut step = step.launch()?;
        let launched = Instant::now();
        step.prepare_drafts(planner);
        let computed = loop {
            match step.poll()? {
                Polled::Computed(computed) => break computed,
                Polled::Running(running) => step = running,
            }
        };
        Ok(GraphPathRun {
            computed,
            staging: staged - started,
            device: DeviceTimes {
                h2d_us: 0,
                launch_us: micros(launched - staged),
                sync_us: micros(launched.elapsed()),
            },
        })
    }

    /// Stages the plan as a step, and broadcasts it.
    pub(crate) fn stage(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        graph: usize,
    ) -> Result<ReadyStep<'_>, GraphPathError> {
        // 0 is the initial value of results.
        self.begin_step(self.step.checked_add(1).unwrap_or(1));
        let rows = plan.token_count();
        let layout = &self.graphs[graph].1;
        let staged = planner.stage_graph(plan, layout, self.memory.step(), self.step)?;
        if let Some(leader) = &self.leader {
            let head = StepHeader {
                graph: graph as u32,
                rows: rows as u32,
                results: staged.results() as u32,
                step: self.step,
                mask_words: staged.mask_words() as u32,
            };
            let memory = self.memory.step();
            let (block, masks) = (
                &memory.block[..layout.bytes()],
                &memory.mask_words[..staged.mask_words()],
            );
            leader
                .step(head, block, masks)
                .map_err(|error| GraphPathError::Leader(error.to_string()))?;
        }
        Ok(ReadyStep {
            graph_path: self,
            staged,
            graph,
            rows,
        })
    }

    /// Sets the step number. On wrap-around old results are cleared, since an equal number would mark them as ready.
    fn begin_step(&mut self, step: u32) {
        if step < self.step {
            // Every earlier step has written its results, and the next one is not launched yet.
            for word in self.memory.results() {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.step = step;
    }

    /// Launches a graph with a staged block.
    fn launch(
        &mut self,
        graph: usize,
        rows: usize,
        results: usize,
    ) -> Result<PendingResults, GraphPathError> {
        let graph_rows = self.graphs[graph].0.rows;
        self.device
            .launch(graph)
            .map_err(|source| GraphPathError::Launch {
                graph_rows,
                rows,
                source,
            })?;
        Ok(PendingResults {
            graph_rows,
            rows,
            results,
            seen: 0,
            launched: Instant::now(),
            next_check: CHECK_INTERVAL,
            ended: false,
        })
    }

    /// Runs a step of the leader to its end: `data` has its block, then its mask words. Returns false if no graph here matches it.
    pub(crate) fn run_received_step(
        &mut self,
        head: StepHeader,
        data: &Message<'_>,
        block: Range<usize>,
    ) -> Result<bool, GraphPathError> {
        let (graph, rows, results) = (
            head.graph as usize,
            head.rows as usize,
            head.results as usize,
        );
        let fits = |(size, layout): &(StepSize, Layout)| {
            (1..=size.rows).contains(&rows)
                && (1..=size.slots).contains(&results)
                && layout.bytes() == block.len()
        };
        let memory = self.memory.step();
        let masks: &mut [u8] = bytemuck::cast_slice_mut(memory.mask_words);
        let mask_bytes = data.len() - block.end;
        if !self.graphs.get(graph).is_some_and(fits) || masks.len() < mask_bytes {
            return Ok(false);
        }
        data.copy(block.start, &mut memory.block[..block.len()]);
        data.copy(block.end, &mut masks[..mask_bytes]);
        self.begin_step(head.step);
        let mut pending = self.launch(graph, rows, results)?;
        // The graph must have read its inputs before the next step is staged.
        while !self.poll(&mut pending)? {}
        Ok(true)
    }

    /// Polls the results for a short time; returns whether all are ready.
    fn poll(&mut self, pending: &mut PendingResults) -> Result<bool, GraphPathError> {
        for _ in 0..POLLS {
            let results = &self.memory.results()[pending.seen..pending.results];
            pending.seen += results
                .iter()
                // SYNC: pairs with the device's write of the whole word.
                .take_while(|word| (word.load(Ordering::Acquire) >> 32) as u32 == self.step)
                .count();
            if pending.seen == pending.results {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        self.check(pending)
            .map_err(|source| GraphPathError::Launch {
                graph_rows: pending.graph_rows,
                rows: pending.rows,
                source,
            })?;
        Ok(false)
    }

    /// Checks the device for errors, and sleeps beyond the spin budget.
    fn check(&mut self, pending: &mut PendingResults) -> Result<(), LaunchError> {
        if pending.ended {
            let text = format!("it ended without a result in slot {}", pending.seen);
            return Err(LaunchError::Failed(text));
        }
        let waited = pending.launched.elapsed();
        if waited >= pending.next_check {
            pending.next_check = waited + CHECK_INTERVAL;
            pending.ended = self.device.ended()?;
        }
        if self.spin.is_some_and(|spin| waited >= spin) {
            std::thread::sleep(POLL_SLEEP);
        }
        Ok(())
    }
}

/// The results of a running step.
struct PendingResults {
    graph_rows: usize,
    rows: usize,
    results: usize,
    /// Results that are ready.
    seen: usize,
    launched: Instant,
    next_check: Duration,
    /// The device is idle.
    ended: bool,
}

/// A staged step, which owns the memory of the graph path.
pub(crate) struct ReadyStep<'l> {
    graph_path: &'l mut GraphPath,
    staged: StagedStep,
    graph: usize,
    rows: usize,
}

impl<'l> ReadyStep<'l> {
    /// Launches it.
    pub(crate) fn launch(self) -> Result<RunningStep<'l>, GraphPathError> {
        let Self {
            graph_path,
            staged,
            graph,
            rows,
        } = self;
        let pending = graph_path.launch(graph, rows, staged.results())?;
        let drafts = graph_path.kinds[GraphKind::Drafting as usize].start <= graph;
        Ok(RunningStep {
            graph_path,
            staged,
            pending,
            drafts,
        })
    }
}

/// A running step. Meanwhile the planner may prepare drafts.
pub(crate) struct RunningStep<'l> {
    graph_path: &'l mut GraphPath,
    staged: StagedStep,
    pending: PendingResults,
    /// Its graph runs a draft model.
    drafts: bool,
}

/// Result of [`RunningStep::poll`].
pub(crate) enum Polled<'l> {
    /// All tokens.
    Computed(ComputedPlan),
    /// Not all of them, yet.
    Running(RunningStep<'l>),
}

impl<'l> RunningStep<'l> {
    /// See [`Planner::prepare_drafts`].
    pub(crate) fn prepare_drafts(&mut self, planner: &mut Planner) {
        planner.prepare_drafts(&mut self.staged);
    }

    /// Polls the step's tokens for a short time.
    pub(crate) fn poll(mut self) -> Result<Polled<'l>, GraphPathError> {
        if !self.graph_path.poll(&mut self.pending)? {
            return Ok(Polled::Running(self));
        }
        let memory = &self.graph_path.memory;
        let (results, logprobs) = (memory.results(), memory.logprobs());
        let token = |slot: usize| results[slot].load(Ordering::Relaxed) as u32;
        // Written before the results, which are all ready.
        let logprob_word = |word: usize| logprobs[word].load(Ordering::Relaxed);
        if self.drafts {
            let (drafts, num_drafts) = memory.drafts();
            let word = |word: usize| drafts[word].load(Ordering::Relaxed);
            self.staged.put_drafts(num_drafts, word);
        }
        Ok(Polled::Computed(
            self.staged.put_tokens(token, logprob_word),
        ))
    }
}

/// A plan that a graph has computed.
pub(crate) struct GraphPathRun {
    pub(crate) computed: ComputedPlan,
    /// Staging time.
    pub(crate) staging: Duration,
    pub(crate) device: DeviceTimes,
}
