//! The graph path: a planned batch becomes one launch of a captured graph, and its tokens are read where the device writes
//! them. No Python runs in between.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::launch::{Launch, LaunchError};
use pie_planner::{Computed, Layout, Plan, Planner, StageError, StagedStep, StepMemory, StepSize};
use pie_ring::{Message, Wait};
use thiserror::Error;

use crate::lead::{Lead, StepHead};
use crate::timing::{DeviceTimes, micros};

/// Memory that the host shares with the graphs.
pub trait Memory: Send {
    /// What the graphs read.
    fn step(&mut self) -> StepMemory<'_>;

    /// What they write, one word for each slot: the step's number in the upper half, the token in the lower one. Each word
    /// is written at once, so the number says that the token is there.
    fn results(&self) -> &[AtomicU64];

    /// Log-probabilities that the step's extended graph writes, before the results: the words of all places, as the step says.
    fn places(&self) -> &[AtomicU32];
}

/// Why the graph path did not answer a batch that it accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum GraphPathError {
    /// The memory does not fit the graphs.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The other ranks cannot be reached.
    #[error("a step cannot be sent to the other ranks: {0}")]
    Lead(String),
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
    /// Whether the device can run nothing any more.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Launch { source, .. } if source.is_fatal())
    }
}

/// How often the device is asked whether it still works, while its results are awaited.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Polls between two looks at the clock.
const POLLS: u32 = 256;
/// Sleep between two polls of a driver that must not spin.
const NAP: Duration = Duration::from_micros(20);

/// Graphs by their number of rows, and what they need.
pub struct GraphPath {
    device: Box<dyn Launch>,
    memory: Box<dyn Memory>,
    /// Room and block layout of each graph, fewest rows first; then those of graphs that know groups, then those that change
    /// logits.
    graphs: Vec<(StepSize, Layout)>,
    /// Graphs that know no groups.
    plain: usize,
    /// Graphs that know groups.
    grouped: usize,
    /// Most rows of one request.
    max_rows: usize,
    step: u32,
    /// How long results are awaited without sleeping; `None` = without limit.
    spin: Option<Duration>,
    /// Reaches the other ranks of a model on several devices.
    lead: Option<Lead>,
}

impl GraphPath {
    /// Graph `i` of `device` runs steps that fit `sizes[i]`, whose rows rise. Batches with more than `max_rows` rows of one
    /// request are not taken. Results are awaited as requests are.
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
            plain: sizes.len(),
            grouped: 0,
            step: 0,
            spin: match wait {
                Wait::Spin => None,
                Wait::SpinThenPark(spin) => Some(spin),
                Wait::Park => Some(Duration::ZERO),
            },
            lead: None,
        }
    }

    /// The device's further graphs have room for so many rows and slots, which rise, and know groups of rows that read the
    /// same KV first. Steps in which [such groups](Planner::find_groups) pay run as one of these, if they fit.
    #[must_use]
    pub fn grouped(mut self, rows: &[usize]) -> Self {
        let graphs = rows
            .iter()
            .map(|&rows| (rows.into(), Layout::grouped_graph(rows)));
        self.graphs.extend(graphs);
        self.grouped += rows.len();
        self
    }

    /// The device's last graphs have room for so many rows and slots, which rise, and change logits before they are sampled, as
    /// a frame's extension asks. Steps of such frames run as one of these, if they fit; other steps never do.
    #[must_use]
    pub fn extended(mut self, rows: &[usize]) -> Self {
        let graphs = rows
            .iter()
            .map(|&rows| (rows.into(), Layout::extended_graph(rows)));
        self.graphs.extend(graphs);
        self
    }

    /// Sends every step to other ranks before it is launched here, so that they [follow](crate::Follow).
    #[must_use]
    pub fn leading(mut self, lead: Lead) -> Self {
        self.lead = Some(lead);
        self
    }

    /// Whether other ranks do what this graph path does.
    pub(crate) const fn leads(&self) -> bool {
        self.lead.is_some()
    }

    /// The graph that can run the plan, the smallest; `None` if it must go another way.
    pub(crate) fn choose(&self, planner: &mut Planner, plan: &mut Plan) -> Option<usize> {
        let needed = plan.graph_size(self.max_rows)?;
        let smallest = |graphs: &[(StepSize, Layout)]| {
            let fewest = graphs.partition_point(|(room, _)| room.rows < needed.rows);
            let runs = |(room, _): &(StepSize, Layout)| room.runs(needed);
            Some(fewest + graphs[fewest..].iter().position(runs)?)
        };
        let (plain, others) = self.graphs.split_at(self.plain);
        let (grouped, extended) = others.split_at(self.grouped);
        if plan.is_extended() {
            return Some(self.plain + self.grouped + smallest(extended)?);
        }
        let own = smallest(plain)?;
        let other = smallest(grouped).filter(|&graph| {
            // There are few of them, so they may have more rows.
            let more = grouped[graph].0.rows.saturating_sub(plain[own].0.rows);
            planner.find_groups(plan, more)
        });
        Some(other.map_or(own, |graph| self.plain + graph))
    }

    /// Runs the plan by a graph that was [chosen](Self::choose) for it, to its tokens.
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

    /// Writes the plan as a step for a graph, and sends it to the other ranks.
    pub(crate) fn stage(
        &mut self,
        planner: &mut Planner,
        plan: Plan,
        graph: usize,
    ) -> Result<ReadyStep<'_>, GraphPathError> {
        // 0 is what the results hold at first.
        self.begin_step(self.step.checked_add(1).unwrap_or(1));
        let rows = plan.token_count();
        let layout = &self.graphs[graph].1;
        let staged = planner.stage_graph(plan, layout, self.memory.step(), self.step)?;
        if let Some(lead) = &self.lead {
            let head = StepHead {
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
            lead.step(head, block, masks)
                .map_err(|error| GraphPathError::Lead(error.to_string()))?;
        }
        Ok(ReadyStep {
            graph_path: self,
            staged,
            graph,
            rows,
        })
    }

    /// Sets the number of the next step. When numbers start again, words of earlier steps are cleared: one with an equal number
    /// would be taken for a result.
    fn begin_step(&mut self, step: u32) {
        if step < self.step {
            // Every earlier step has written its results, and the next one is not launched yet.
            for word in self.memory.results() {
                word.store(0, Ordering::Relaxed);
            }
        }
        self.step = step;
    }

    /// Launches a graph whose block is there.
    fn launch(
        &mut self,
        graph: usize,
        rows: usize,
        results: usize,
    ) -> Result<Watch, GraphPathError> {
        let graph_rows = self.graphs[graph].0.rows;
        self.device
            .launch(graph)
            .map_err(|source| GraphPathError::Launch {
                graph_rows,
                rows,
                source,
            })?;
        Ok(Watch {
            graph_rows,
            rows,
            results,
            seen: 0,
            launched: Instant::now(),
            next_check: CHECK_INTERVAL,
            ended: false,
        })
    }

    /// Runs a step that another rank has staged, to its end: `data` has its block, then its mask words. Returns false, and
    /// does nothing, if it is not one of this graph path's graphs.
    pub(crate) fn follow(
        &mut self,
        head: StepHead,
        data: &Message<'_>,
        block: Range<usize>,
    ) -> Result<bool, GraphPathError> {
        let (graph, rows, results) = (
            head.graph as usize,
            head.rows as usize,
            head.results as usize,
        );
        let fits = |(room, layout): &(StepSize, Layout)| {
            (1..=room.rows).contains(&rows)
                && (1..=room.slots).contains(&results)
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
        let mut watch = self.launch(graph, rows, results)?;
        // The next step must not be staged before this one has read its own.
        while !self.poll(&mut watch)? {}
        Ok(true)
    }

    /// Looks for results for a short while; returns whether all have come.
    fn poll(&mut self, watch: &mut Watch) -> Result<bool, GraphPathError> {
        for _ in 0..POLLS {
            let results = &self.memory.results()[watch.seen..watch.results];
            watch.seen += results
                .iter()
                // SYNC: pairs with the device's write of the whole word.
                .take_while(|word| (word.load(Ordering::Acquire) >> 32) as u32 == self.step)
                .count();
            if watch.seen == watch.results {
                return Ok(true);
            }
            std::hint::spin_loop();
        }
        self.check(watch).map_err(|source| GraphPathError::Launch {
            graph_rows: watch.graph_rows,
            rows: watch.rows,
            source,
        })?;
        Ok(false)
    }

    /// Asks the device now and then whether it still works, and sleeps where the driver must not spin.
    fn check(&mut self, watch: &mut Watch) -> Result<(), LaunchError> {
        if watch.ended {
            let text = format!("it ended without a result in slot {}", watch.seen);
            return Err(LaunchError::Failed(text));
        }
        let waited = watch.launched.elapsed();
        if waited >= watch.next_check {
            watch.next_check = waited + CHECK_INTERVAL;
            watch.ended = self.device.ended()?;
        }
        if self.spin.is_some_and(|spin| waited >= spin) {
            std::thread::sleep(NAP);
        }
        Ok(())
    }
}

/// Waits for the results of a step.
struct Watch {
    graph_rows: usize,
    rows: usize,
    results: usize,
    /// Results that have come.
    seen: usize,
    launched: Instant,
    next_check: Duration,
    /// The device has nothing to do any more.
    ended: bool,
}

/// A step in the memory of the graph path, which no other step can have meanwhile.
pub(crate) struct ReadyStep<'l> {
    graph_path: &'l mut GraphPath,
    staged: StagedStep,
    graph: usize,
    rows: usize,
}

impl<'l> ReadyStep<'l> {
    /// Has the device run it.
    pub(crate) fn launch(self) -> Result<RunningStep<'l>, GraphPathError> {
        let Self {
            graph_path,
            staged,
            graph,
            rows,
        } = self;
        let watch = graph_path.launch(graph, rows, staged.results())?;
        Ok(RunningStep {
            graph_path,
            staged,
            watch,
        })
    }
}

/// A step that the device runs. The planner is free: it may prepare drafts, and plan the next frame.
pub(crate) struct RunningStep<'l> {
    graph_path: &'l mut GraphPath,
    staged: StagedStep,
    watch: Watch,
}

/// What [`RunningStep::poll`] found.
pub(crate) enum Polled<'l> {
    /// All tokens.
    Computed(Computed),
    /// Not all of them, yet.
    Running(RunningStep<'l>),
}

impl<'l> RunningStep<'l> {
    /// See [`Planner::prepare_drafts`].
    pub(crate) fn prepare_drafts(&mut self, planner: &mut Planner) {
        planner.prepare_drafts(&mut self.staged);
    }

    /// Looks for the step's tokens for a short while.
    pub(crate) fn poll(mut self) -> Result<Polled<'l>, GraphPathError> {
        if !self.graph_path.poll(&mut self.watch)? {
            return Ok(Polled::Running(self));
        }
        let memory = &self.graph_path.memory;
        let (results, places) = (memory.results(), memory.places());
        let token = |slot: usize| results[slot].load(Ordering::Relaxed) as u32;
        // They were written before the results, which have all been seen.
        let place_word = |word: usize| places[word].load(Ordering::Relaxed);
        Ok(Polled::Computed(self.staged.put_tokens(token, place_word)))
    }
}

/// A plan that a graph has computed.
pub(crate) struct GraphPathRun {
    pub(crate) computed: Computed,
    /// How long the host staged it.
    pub(crate) staging: Duration,
    pub(crate) device: DeviceTimes,
}
