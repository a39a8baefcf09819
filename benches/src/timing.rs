//! Timing ours and its peers in turns, so that a drift of the machine hits all alike.
//!
//! Criterion sets the sample count and judges ours. In each of its samples the sides run one after the other,
//! a slow peer fewer operations than ours, so that turns take about the same time. Every single
//! operation goes into its side's histogram.

use std::cell::RefCell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::Criterion;
use hdrhistogram::Histogram;

use crate::conditions::{Watch, clock_read, involuntary_switches};
use crate::report::{self, Row, Summary, Unit};

/// Before this much time has passed nothing is recorded.
const WARM_UP: Duration = Duration::from_secs(3);
/// Operations before each turn: the side before has evicted the caches.
const TURN_WARM_UP: u64 = 8;
/// Fewest operations of a peer's turn, however slow it is.
const SHORTEST_TURN: u64 = 32;
/// A value is this much longer than the reading of the clock that it contains.
const CLOCK_READS: u32 = 10;
/// A longer time counts as this one.
const LONGEST: Duration = Duration::from_mins(10);
/// How long the length of an operation is looked at before a batch is chosen.
const LOOK: Duration = Duration::from_millis(2);

/// Criterion as every bench uses it.
#[must_use]
pub fn criterion() -> Criterion {
    Criterion::default()
        .warm_up_time(WARM_UP)
        .measurement_time(Duration::from_secs(8))
        .configure_from_args()
}

/// The times of one side.
pub struct Samples {
    /// Nanoseconds per batch.
    histogram: Histogram<u64>,
    batch: u64,
    involuntary_switches: u64,
    recording: bool,
}

impl Samples {
    fn new() -> Self {
        let longest = LONGEST.as_nanos() as u64;
        let histogram = Histogram::new_with_bounds(1, longest, 3).expect("valid bounds");
        Self {
            histogram,
            batch: 1,
            involuntary_switches: 0,
            recording: false,
        }
    }

    /// Runs `operation` so many times and returns how long that took, without the gaps between.
    pub fn time<T>(&mut self, operations: u64, mut operation: impl FnMut() -> T) -> Duration {
        let mut total = Duration::ZERO;
        let mut left = operations;
        while left > 0 {
            let batch = left.min(self.batch);
            let start = Instant::now();
            for _ in 0..batch {
                black_box(operation());
            }
            let elapsed = start.elapsed();
            if batch == self.batch {
                self.record(elapsed);
            }
            total += elapsed;
            left -= batch;
        }
        total
    }

    /// Takes the time of one operation that was measured elsewhere.
    pub fn record(&mut self, elapsed: Duration) {
        if self.recording {
            self.histogram.saturating_record(elapsed.as_nanos() as u64);
        }
    }

    /// Counts switches of a thread other than the calling one.
    pub fn add_involuntary_switches(&mut self, count: u64) {
        if self.recording {
            self.involuntary_switches += count;
        }
    }

    /// Chooses the smallest batch that is well above the clock's cost: usually one operation.
    fn choose_batch<T>(&mut self, mut operation: impl FnMut() -> T) {
        let (begin, mut operations, mut each) = (Instant::now(), 1_u32, f64::INFINITY);
        while begin.elapsed() < LOOK {
            let start = Instant::now();
            for _ in 0..operations {
                black_box(operation());
            }
            each = each.min(start.elapsed().as_secs_f64() / f64::from(operations));
            operations *= 2;
        }
        let wanted = (clock_read() * CLOCK_READS).as_secs_f64() / each;
        self.batch = (wanted.ceil() as u64).max(1).next_power_of_two();
    }

    fn summary(&self, unit: Unit) -> Option<Summary> {
        let size = self.batch as f64 * unit.size();
        let at = |quantile| self.histogram.value_at_quantile(quantile) as f64 / size;
        let Self {
            batch,
            involuntary_switches,
            ..
        } = *self;
        let samples = self.histogram.len();
        (samples > 0).then(|| Summary {
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            samples,
            batch,
            involuntary_switches,
        })
    }
}

type Turn<'a> = Box<dyn FnMut(u64, &mut Samples) -> Duration + 'a>;

struct Side<'a> {
    name: String,
    turn: Turn<'a>,
    samples: Samples,
    /// Seconds per operation in the fastest turn, which nothing else on the machine has made longer.
    fastest: f64,
}

/// A row to be measured: ours first, then peers.
pub struct Race<'a> {
    bench: String,
    unit: Unit,
    sides: Vec<Side<'a>>,
    handed_in: Vec<(String, Summary)>,
}

impl<'a> Race<'a> {
    /// A race of ours; `operation` is one operation.
    pub fn new<T: 'a>(
        bench: impl Into<String>,
        unit: Unit,
        operation: impl FnMut() -> T + 'a,
    ) -> Self {
        Self::new_turns(bench, unit, turn_of(operation))
    }

    /// A race of ours that times itself: `turn` runs so many operations, through
    /// [`Samples::time`] or [`Samples::record`], and returns how long they took.
    pub fn new_turns(
        bench: impl Into<String>,
        unit: Unit,
        turn: impl FnMut(u64, &mut Samples) -> Duration + 'a,
    ) -> Self {
        let race = Self {
            bench: bench.into(),
            unit,
            sides: Vec::new(),
            handed_in: Vec::new(),
        };
        race.peer_turns("ours", turn)
    }

    /// Adds a peer; `operation` is one operation.
    #[must_use]
    pub fn peer<T: 'a>(self, name: &str, operation: impl FnMut() -> T + 'a) -> Self {
        self.peer_turns(name, turn_of(operation))
    }

    /// Adds a peer that times itself, as in [`Race::new_turns`].
    #[must_use]
    pub fn peer_turns(
        mut self,
        name: &str,
        turn: impl FnMut(u64, &mut Samples) -> Duration + 'a,
    ) -> Self {
        self.sides.push(Side {
            name: name.to_owned(),
            turn: Box::new(turn),
            samples: Samples::new(),
            fastest: f64::INFINITY,
        });
        self
    }

    /// Adds a peer that was measured elsewhere in this run, in the row's unit.
    #[must_use]
    pub fn peer_summary(mut self, name: &str, summary: Summary) -> Self {
        self.handed_in.push((name.to_owned(), summary));
        self
    }

    /// Measures and writes the row, unless criterion's filter leaves it out.
    ///
    /// # Panics
    /// When the row's file cannot be written.
    pub fn run(mut self, criterion: &mut Criterion) {
        let watch = Watch::start();
        let begin = RefCell::new(None);
        let bench = self.bench.clone();
        criterion.bench_function(&bench, |bencher| {
            bencher.iter_custom(|operations| {
                let begin = *begin.borrow_mut().get_or_insert_with(Instant::now);
                let recording = report::is_quick() || begin.elapsed() >= WARM_UP;
                let (ours, peers) = self.sides.split_first_mut().expect("ours is a side");
                let elapsed = ours.take_turn(operations, recording, peers.is_empty());
                for peer in peers {
                    let fitting = peer.fitting(operations, ours.fastest);
                    peer.take_turn(fitting, recording, false);
                }
                elapsed
            });
        });
        if let Some(mut row) = self.row() {
            row.disturbance = watch.disturbance();
            row.write(&report::folder())
                .expect("the row's file can be written");
        }
    }

    /// Nothing if a side has no samples: filtered out, or only tested.
    fn row(self) -> Option<Row> {
        let mut summaries = Vec::new();
        for side in self.sides {
            summaries.push((side.name, side.samples.summary(self.unit)?));
        }
        let mut sides = summaries.into_iter();
        let row = Row::new(&self.bench, self.unit, sides.next()?.1);
        Some(
            sides
                .chain(self.handed_in)
                .fold(row, |row, (name, summary)| row.peer(&name, summary)),
        )
    }
}

impl Side<'_> {
    /// How many operations take as long as so many of ours; at most the same number.
    fn fitting(&self, operations: u64, ours: f64) -> u64 {
        // Zero as long as the peer has had no turn.
        let fitting = operations as f64 * ours / self.fastest;
        (fitting as u64).max(SHORTEST_TURN).min(operations)
    }

    fn take_turn(&mut self, operations: u64, recording: bool, alone: bool) -> Duration {
        self.samples.recording = false;
        if !alone {
            (self.turn)(TURN_WARM_UP, &mut self.samples);
        }
        self.samples.recording = recording;
        let before = involuntary_switches("thread-self");
        let elapsed = (self.turn)(operations, &mut self.samples);
        let switches = involuntary_switches("thread-self") - before;
        self.samples.add_involuntary_switches(switches);
        self.fastest = self.fastest.min(elapsed.as_secs_f64() / operations as f64);
        elapsed
    }
}

fn turn_of<T>(mut operation: impl FnMut() -> T) -> impl FnMut(u64, &mut Samples) -> Duration {
    let mut batch = None;
    move |operations, samples| {
        if batch.is_none() {
            samples.choose_batch(&mut operation);
            batch = Some(samples.batch);
        }
        samples.time(operations, &mut operation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thousand operations that get slower, recorded as if measured elsewhere.
    fn recorded(batch: u64) -> Samples {
        let mut samples = Samples::new();
        samples.batch = batch;
        samples.recording = true;
        (1..=1000).for_each(|nanos| samples.record(Duration::from_nanos(nanos)));
        samples
    }

    #[test]
    fn percentiles_are_in_the_unit_and_per_operation() {
        let near =
            |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 2e-3, "{found}");
        let whole = recorded(1).summary(Unit::Us).unwrap();
        near(whole.p50, 0.5);
        near(whole.p99, 0.99);
        near(whole.p999, 0.999);
        let mut slow = recorded(1);
        (0..10).for_each(|_| slow.record(Duration::from_secs(100)));
        near(slow.summary(Unit::Ms).unwrap().p999, 1e5);
        let batched = recorded(4).summary(Unit::Ns).unwrap();
        near(batched.p50, 125.0);
        assert_eq!((batched.samples, batched.batch), (1000, 4));
    }

    #[test]
    fn every_operation_runs_and_full_batches_are_recorded() {
        for (batch, operations, recorded) in [(1, 10, 10), (4, 10, 2), (16, 10, 0)] {
            let mut samples = Samples::new();
            samples.batch = batch;
            samples.recording = true;
            let mut runs = 0;
            samples.time(operations, || runs += 1);
            assert_eq!((runs, samples.histogram.len()), (operations, recorded));
        }
    }

    #[test]
    fn nothing_is_recorded_while_warming_up() {
        let mut samples = Samples::new();
        samples.time(10, || ());
        samples.add_involuntary_switches(1);
        assert!(samples.summary(Unit::Ns).is_none());
        assert_eq!(samples.involuntary_switches, 0);
    }

    #[test]
    fn sides_take_turns_and_share_a_row() {
        let order = RefCell::new(Vec::new());
        let side = |name| {
            let order = &order;
            move |operations, samples: &mut Samples| {
                order
                    .borrow_mut()
                    .push((name, operations, samples.recording));
                samples.time(operations, || ())
            }
        };
        let mut race =
            Race::new_turns("a/1", Unit::Ns, side("ours")).peer_turns("peer", side("peer"));
        for side in &mut race.sides {
            side.take_turn(50, true, false);
        }
        let wanted = [
            ("ours", 8, false),
            ("ours", 50, true),
            ("peer", 8, false),
            ("peer", 50, true),
        ];
        assert_eq!(*order.borrow(), wanted);
        let row = race
            .peer_summary("numpy", Summary::exact(3.0))
            .row()
            .unwrap();
        assert_eq!((row.ours.samples, row.peers["peer"].samples), (50, 50));
        assert!((row.peers["numpy"].p50 - 3.0).abs() < 1e-9);
    }

    #[test]
    fn a_slow_peer_runs_fewer_operations() {
        let mut race = Race::new("a/1", Unit::Ns, || ());
        let side = &mut race.sides[0];
        assert_eq!((side.fitting(1000, 1.0), side.fitting(7, 1.0)), (32, 7));
        side.fastest = 4.0;
        let fitting = [0.01, 1.0, 3.0, 8.0].map(|ours| side.fitting(1000, ours));
        assert_eq!(fitting, [32, 250, 750, 1000]);
    }

    #[test]
    fn the_fastest_turn_counts() {
        let times = RefCell::new(vec![50, 20, 30]);
        let turn = |_, _: &mut Samples| Duration::from_secs(times.borrow_mut().pop().unwrap());
        let mut race = Race::new_turns("a/1", Unit::Ns, turn);
        for _ in 0..3 {
            race.sides[0].take_turn(10, true, true);
        }
        assert!((race.sides[0].fastest - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_row_that_did_not_run_is_not_written() {
        assert!(Race::new("a/1", Unit::Ns, || ()).row().is_none());
    }
}
