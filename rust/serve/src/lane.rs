//! The fast lane: a planned batch becomes one launch of a captured graph, and its tokens are read where the device writes
//! them. No Python runs in between.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pie_batch::{Layout, Planner, StageError, StagedStep, StepMemory, StepSize};
use pie_launch::{Launch, LaunchError};
use pie_ring::{Message, Wait};
use thiserror::Error;

use crate::follow::{Lead, StepHead};
use crate::timing::DeviceTimes;

/// Memory that the host shares with the graphs.
pub trait Memory: Send {
    /// What the graphs read.
    fn step(&mut self) -> StepMemory<'_>;

    /// What they write, one word for each slot: the step's number in the upper half, the token in the lower one. Each word
    /// is written at once, so the number says that the token is there.
    fn results(&self) -> &[AtomicU64];
}

/// Why the fast lane did not answer a batch that it accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LaneError {
    /// The memory does not fit the graphs.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// The other ranks cannot be told.
    #[error("the other ranks cannot be told of a step: {0}")]
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

impl LaneError {
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
pub struct Lane {
    device: Box<dyn Launch>,
    memory: Box<dyn Memory>,
    /// Room and block layout of each graph, fewest rows first; then those of graphs that know groups.
    graphs: Vec<(StepSize, Layout)>,
    /// Graphs that know no groups.
    plain: usize,
    /// Most rows of one request.
    most: usize,
    step: u32,
    /// How long results are awaited without sleeping; `None` = for ever.
    spin: Option<Duration>,
    /// Tells the other ranks of a model on several devices.
    lead: Option<Lead>,
}

impl Lane {
    /// Graph `i` of `device` runs steps that fit `sizes[i]`, whose rows rise. Batches with more than `most` rows of one
    /// request are not taken. Results are awaited as requests are.
    #[must_use]
    pub fn new(
        device: Box<dyn Launch>,
        memory: Box<dyn Memory>,
        sizes: &[StepSize],
        most: usize,
        wait: Wait,
    ) -> Self {
        Self {
            device,
            memory,
            most,
            graphs: sizes
                .iter()
                .map(|&size| (size, Layout::graph(size)))
                .collect(),
            plain: sizes.len(),
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
        self
    }

    /// Tells other ranks of every step before it is launched here, so that they [follow](crate::Follow).
    #[must_use]
    pub fn leading(mut self, lead: Lead) -> Self {
        self.lead = Some(lead);
        self
    }

    /// Whether other ranks do what this lane does.
    pub(crate) const fn leads(&self) -> bool {
        self.lead.is_some()
    }

    /// Runs the plan if a graph can; `None` if it must go another way, untouched.
    pub(crate) fn run(
        &mut self,
        planner: &mut Planner,
    ) -> Option<Result<(Duration, DeviceTimes), LaneError>> {
        let needed = planner.graph_size(self.most)?;
        let rows = needed.rows;
        let graph = self.choose(planner, needed)?;
        let graph_rows = self.graphs[graph].0.rows;
        let failed = |source| LaneError::Launch {
            graph_rows,
            rows,
            source,
        };
        let started = Instant::now();
        Some(self.stage(planner, graph, rows).and_then(|step| {
            let staged = Instant::now();
            self.device.launch(graph).map_err(failed)?;
            let launched = Instant::now();
            planner.prepare_drafts();
            self.await_results(step.results).map_err(failed)?;
            let results = self.memory.results();
            planner.put_slot_tokens(|slot| results[slot].load(Ordering::Relaxed) as u32);
            let times = DeviceTimes {
                h2d_us: 0,
                launch_us: micros(launched - staged),
                sync_us: micros(launched.elapsed()),
            };
            Ok((staged - started, times))
        }))
    }

    /// The smallest graph that runs such a step.
    fn choose(&self, planner: &mut Planner, needed: StepSize) -> Option<usize> {
        let smallest = |graphs: &[(StepSize, Layout)]| {
            let fewest = graphs.partition_point(|(room, _)| room.rows < needed.rows);
            let runs = |(room, _): &(StepSize, Layout)| room.runs(needed);
            Some(fewest + graphs[fewest..].iter().position(runs)?)
        };
        let (plain, grouped) = self.graphs.split_at(self.plain);
        let own = smallest(plain)?;
        let other = smallest(grouped).filter(|&graph| {
            // There are few of them, so they may have more rows.
            let more = grouped[graph].0.rows.saturating_sub(plain[own].0.rows);
            planner.find_groups(more)
        });
        Some(other.map_or(own, |graph| self.plain + graph))
    }

    fn stage(
        &mut self,
        planner: &mut Planner,
        graph: usize,
        rows: usize,
    ) -> Result<StagedStep, LaneError> {
        // 0 is what the results hold at first.
        self.step = self.step.checked_add(1).unwrap_or(1);
        let layout = &self.graphs[graph].1;
        let staged = planner.stage_graph(layout, self.memory.step(), self.step)?;
        let Some(lead) = &self.lead else {
            return Ok(staged);
        };
        let head = StepHead {
            graph: graph as u32,
            rows: rows as u32,
            results: staged.results as u32,
            step: self.step,
            mask_words: staged.mask_words as u32,
        };
        let memory = self.memory.step();
        let (block, masks) = (
            &memory.block[..layout.bytes()],
            &memory.mask_words[..staged.mask_words],
        );
        lead.step(head, block, masks)
            .map_err(|error| LaneError::Lead(error.to_string()))?;
        Ok(staged)
    }

    /// Runs a step that another rank has staged, to its end: `data` has its block, then its mask words. Returns false, and
    /// does nothing, if it is none of this lane's graphs.
    pub(crate) fn follow(
        &mut self,
        head: StepHead,
        data: &Message<'_>,
        block: Range<usize>,
    ) -> Result<bool, LaneError> {
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
        self.step = head.step;
        let graph_rows = self.graphs[graph].0.rows;
        let failed = |source| LaneError::Launch {
            graph_rows,
            rows,
            source,
        };
        self.device.launch(graph).map_err(failed)?;
        // The next step must not be staged before this one has read its own.
        self.await_results(results).map_err(failed)?;
        Ok(true)
    }

    fn await_results(&mut self, slots: usize) -> Result<(), LaunchError> {
        let started = Instant::now();
        let mut next_check = CHECK_INTERVAL;
        let mut ended = false;
        let mut slot = 0;
        loop {
            for _ in 0..POLLS {
                let results = &self.memory.results()[slot..slots];
                slot += results
                    .iter()
                    // SYNC: pairs with the device's write of the whole word.
                    .take_while(|word| (word.load(Ordering::Acquire) >> 32) as u32 == self.step)
                    .count();
                if slot == slots {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if ended {
                let text = format!("it ended without a result in slot {slot}");
                return Err(LaunchError::Failed(text));
            }
            let waited = started.elapsed();
            if waited >= next_check {
                next_check = waited + CHECK_INTERVAL;
                ended = self.device.ended()?;
            }
            if self.spin.is_some_and(|spin| waited >= spin) {
                std::thread::sleep(NAP);
            }
        }
    }
}

fn micros(duration: Duration) -> u32 {
    u32::try_from(duration.as_micros()).unwrap_or(u32::MAX)
}
