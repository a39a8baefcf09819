//! Requests of mixed lengths with continuous batching.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Instant;

use pie_engine::{Capabilities, FrameBudget, FrameRow, Link, PreparedFrame, StepTiming};
use serde::{Deserialize, Serialize};

use crate::args::ThroughputArgs;
use crate::context::{Context, prompt};
use crate::error::LoadError;
use crate::pages::PagePool;
use crate::sampler::SamplerMix;
use crate::steps::Samples;
use crate::summary::Summary;
use crate::trace::now_us;

/// The lengths of the standard workload, by `lengths.py`.
pub(crate) const STANDARD: &str = include_str!("../lengths.json");

/// Prompt and output length of every request.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Lengths {
    pub(crate) prompts: Vec<u32>,
    pub(crate) outputs: Vec<u32>,
}

impl Lengths {
    /// The file's, or the standard ones.
    pub(crate) fn load(args: &ThroughputArgs) -> Result<Self, LoadError> {
        let read = |path: &PathBuf| {
            fs::read_to_string(path).map_err(|source| LoadError::File {
                action: "cannot read",
                path: path.clone(),
                source,
            })
        };
        let text = args.lengths.as_ref().map(read).transpose()?;
        let lengths = Self::parse(text.as_deref().unwrap_or(STANDARD))?;
        Ok(lengths.first(args.requests.unwrap_or(usize::MAX)))
    }

    pub(crate) fn parse(text: &str) -> Result<Self, LoadError> {
        let wrong = |why: String| LoadError::Lengths(why);
        let lengths: Self = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        if lengths.prompts.len() != lengths.outputs.len() {
            return Err(wrong("there are not as many prompts as outputs".to_owned()));
        }
        let mut all = lengths.prompts.iter().chain(&lengths.outputs);
        if let Some(length) = all.find(|&length| !(1..=1_000_000).contains(length)) {
            return Err(wrong(format!("{length} is not from 1 to 1000000")));
        }
        Ok(lengths)
    }

    fn first(mut self, count: usize) -> Self {
        self.prompts.truncate(count);
        self.outputs.truncate(count);
        self
    }
}

/// The figures of one repeat.
#[derive(Debug, Serialize)]
pub(crate) struct Run {
    pub(crate) requests: usize,
    pub(crate) output_tokens: u64,
    pub(crate) seconds: f64,
    pub(crate) tokens_per_s: f64,
    /// Steps of one token each.
    pub(crate) decode: Share,
    /// Steps that brought prompts.
    pub(crate) with_prompts: Share,
    /// Between an answer and the next request.
    pub(crate) client_us: Summary,
    /// Means of the trace's events, in µs.
    pub(crate) trace_us: BTreeMap<String, f64>,
    #[serde(skip)]
    pub(crate) window: Range<f64>,
    #[serde(skip)]
    pub(crate) record: Record,
}

/// What a kind of steps took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Share {
    pub(crate) steps: u32,
    /// Seconds of round trips.
    pub(crate) seconds: f64,
    /// Requests of all frames.
    pub(crate) requests: u64,
    /// Input tokens of all frames.
    pub(crate) tokens: u64,
}

/// Every step, in order.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Record {
    #[serde(flatten)]
    pub(crate) samples: Samples,
    pub(crate) requests: Vec<u32>,
    pub(crate) tokens: Vec<u32>,
}

impl Record {
    fn push(&mut self, exchange: &StepTiming) {
        self.samples.push(exchange);
        self.requests.push(exchange.requests);
        self.tokens.push(exchange.tokens);
    }
}

/// Plays the workload once.
pub(crate) fn play(
    link: &mut Link<'_>,
    caps: &Capabilities,
    lengths: &Lengths,
    sampler: &SamplerMix,
) -> Result<Run, LoadError> {
    let mut scheduler = Scheduler::new(caps, lengths, sampler)?;
    let mut record = Record::default();
    link.end_series();
    let (begin, started) = (now_us(), Instant::now());
    link.pipeline(
        |link| scheduler.prepare(link),
        |exchange| record.push(exchange),
    )?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(figures(record, seconds, begin..now_us(), lengths))
}

fn figures(record: Record, seconds: f64, window: Range<f64>, lengths: &Lengths) -> Run {
    let output_tokens = lengths
        .outputs
        .iter()
        .map(|&length| u64::from(length))
        .sum();
    let (mut decode, mut with_prompts) = (Share::default(), Share::default());
    let trips = record.samples.round_trip_ns.iter();
    for ((&trip, &requests), &tokens) in trips.zip(&record.requests).zip(&record.tokens) {
        let share = if tokens > requests {
            &mut with_prompts
        } else {
            &mut decode
        };
        share.steps += 1;
        share.seconds += trip as f64 / 1e9;
        share.requests += u64::from(requests);
        share.tokens += u64::from(tokens);
    }
    Run {
        requests: lengths.prompts.len(),
        output_tokens,
        seconds,
        tokens_per_s: output_tokens as f64 / seconds,
        decode,
        with_prompts,
        client_us: Summary::of(&record.samples.client_ns),
        trace_us: BTreeMap::new(),
        window,
        record,
    }
}

/// Forms frames: every running context, and the next ones as far as they fit. Pages for a whole output are promised when
/// a context starts, so that none must be suspended.
pub(crate) struct Scheduler<'a> {
    caps: &'a Capabilities,
    waiting: VecDeque<Context>,
    running: Vec<Context>,
    pool: PagePool,
    promised: u32,
}

impl<'a> Scheduler<'a> {
    pub(crate) fn new(
        caps: &'a Capabilities,
        lengths: &Lengths,
        sampler: &SamplerMix,
    ) -> Result<Self, LoadError> {
        let waiting = lengths.prompts.iter().zip(&lengths.outputs).enumerate();
        let waiting = waiting.map(|(index, (&length, &output))| {
            let id = index as u64 + 1;
            let tokens = prompt(id, length, caps.vocab_size);
            Context::new(id, tokens, sampler.of(index), output)
        });
        let scheduler = Self {
            caps,
            waiting: waiting.collect(),
            running: Vec::new(),
            pool: PagePool::new(caps.total_pages),
            promised: 0,
        };
        scheduler
            .waiting
            .iter()
            .try_for_each(|context| scheduler.check(context))?;
        Ok(scheduler)
    }

    /// Whether a context can be served when nothing else runs.
    fn check(&self, context: &Context) -> Result<(), LoadError> {
        let (prompt, output) = (context.tokens(), context.remaining);
        let pages = context.lifetime_pages(self.caps.kv_page_size);
        let limits = [
            ("tokens in a frame", prompt, self.caps.max_forward_tokens),
            ("positions", prompt + output - 1, self.caps.max_model_len),
            ("pages", pages, self.caps.total_pages),
            ("pages in a frame", pages, self.caps.max_page_refs),
        ];
        match limits.into_iter().find(|(_, needed, limit)| needed > limit) {
            None => Ok(()),
            Some((what, needed, limit)) => Err(LoadError::NeverFits {
                prompt,
                output,
                why: format!("{needed} {what}, the driver has {limit}"),
            }),
        }
    }

    /// Makes the next frame and moves on past it; `None` when all is done.
    fn prepare<'c>(&mut self, link: &mut Link<'c>) -> Result<Option<PreparedFrame<'c>>, LoadError> {
        if !self.form()? {
            return Ok(None);
        }
        let prepared = link.prepare(self.turns())?;
        self.advance();
        Ok(Some(prepared))
    }

    pub(crate) fn turns(&self) -> impl Iterator<Item = FrameRow<'_>> + Clone {
        self.running.iter().map(Context::turn)
    }

    /// Forms the next frame; false when all is done.
    pub(crate) fn form(&mut self) -> Result<bool, LoadError> {
        let page_size = self.caps.kv_page_size;
        let mut room = FrameBudget::new(self.caps);
        for context in &self.running {
            // Requests were only let in as far as all last pages fit.
            let _ = room.reserve(context.tokens(), context.lifetime_pages(page_size));
        }
        while let Some(next) = self.waiting.front() {
            let pages = next.lifetime_pages(page_size);
            let promised = self.promised + pages;
            if promised > self.caps.total_pages || !room.reserve(next.tokens(), pages) {
                break;
            }
            self.promised = promised;
            self.running.extend(self.waiting.pop_front());
        }
        for context in &mut self.running {
            context.reserve(&mut self.pool, page_size)?;
        }
        Ok(!self.running.is_empty())
    }

    /// Moves on before the frame is answered: only which token each context gets is not known. The pages of those that end
    /// by it are free for the next frame, which the driver computes after this one.
    pub(crate) fn advance(&mut self) {
        for (request, context) in self.running.iter_mut().enumerate() {
            context.advance(request);
        }
        self.let_go();
    }

    /// Ends the contexts that have all of their tokens.
    fn let_go(&mut self) {
        let page_size = self.caps.kv_page_size;
        for mut context in self
            .running
            .extract_if(.., |context| context.remaining == 0)
        {
            self.promised -= context.lifetime_pages(page_size);
            context.release(&mut self.pool);
        }
    }
}

#[cfg(test)]
mod tests {
    use pie_engine::{FrameBuilder, FrameMeta, patch_tokens};

    use super::*;

    const CAPS: Capabilities = Capabilities {
        total_pages: 10,
        kv_page_size: 4,
        swap_pool_size: 0,
        max_forward_tokens: 12,
        max_forward_requests: 3,
        max_page_refs: 9,
        max_model_len: 32,
        vocab_size: 100,
        arch_name: String::new(),
        activation_dtype: String::new(),
        snapshot_dir: String::new(),
        rs_cache_slots: 0,
        system_speculation_supported: false,
        enable_system_speculation: false,
    };

    fn lengths(prompts: &[u32], outputs: &[u32]) -> Lengths {
        Lengths {
            prompts: prompts.to_vec(),
            outputs: outputs.to_vec(),
        }
    }

    /// The tokens of every request of every frame.
    fn frames(caps: &Capabilities, lengths: &Lengths) -> Vec<Vec<u32>> {
        let sampler = SamplerMix::parse("greedy").unwrap();
        let mut scheduler = Scheduler::new(caps, lengths, &sampler).unwrap();
        let mut frames = Vec::new();
        while scheduler.form().unwrap() {
            let running = scheduler.running.iter();
            frames.push(running.map(Context::tokens).collect::<Vec<u32>>());
            assert!(frames.len() < 100);
            scheduler.advance();
        }
        assert_eq!(
            (scheduler.pool.free(), scheduler.promised),
            (caps.total_pages, 0)
        );
        frames
    }

    impl Scheduler<'_> {
        /// Moves on once the frame is answered, as if nothing were prepared.
        fn settle(&mut self, tokens: &[u32]) {
            for (context, token) in self.running.iter_mut().zip(tokens) {
                context.take(&[*token], &[]);
            }
            self.let_go();
        }

        fn encode(&self, builder: &mut FrameBuilder) -> (Vec<u8>, FrameMeta) {
            let mut buffer = vec![0; 1 << 16];
            let meta = builder.build(self.turns());
            let length = builder.encode(&mut buffer).unwrap();
            buffer.truncate(length);
            (buffer, meta)
        }
    }

    /// How many frames a schedule takes. Those that are made before their tokens are known must be equal, byte for byte, to
    /// those that are made after.
    fn compare_frames(caps: &Capabilities, lengths: &Lengths, seed: u64) -> usize {
        let sampler = SamplerMix::parse("mixed").unwrap();
        let scheduler = || Scheduler::new(caps, lengths, &sampler).unwrap();
        let (mut ahead, mut behind) = (scheduler(), scheduler());
        let mut builder = FrameBuilder::as_pie(caps.kv_page_size);
        let mut answered = Vec::new();
        let mut frames = 0;
        while ahead.form().unwrap() {
            let (mut prepared, meta) = ahead.encode(&mut builder);
            // All of this is before the answer that the gaps await.
            ahead.advance();

            assert!(behind.form().unwrap());
            let (expected, known) = behind.encode(&mut FrameBuilder::as_pie(caps.kv_page_size));
            assert!(known.patches.is_empty());
            patch_tokens(&mut prepared, &meta.patches, &answered);
            assert_eq!(prepared, expected, "frame {frames}");
            answered = prompt(seed + frames as u64, meta.requests as u32, u32::MAX);
            behind.settle(&answered);
            frames += 1;
        }
        assert!(!behind.form().unwrap());
        frames
    }

    #[test]
    fn prepared_frames_are_those_made_with_the_tokens_at_hand() {
        let mut frames = 0;
        for seed in 0..200 {
            let mut random = prompt(1000 * seed + 1, 48, u32::MAX).into_iter();
            let mut up_to = |limit| random.next().unwrap() % limit + 1;
            let requests = up_to(20);
            let lengths = Lengths {
                prompts: (0..requests).map(|_| up_to(12)).collect(),
                outputs: (0..requests).map(|_| up_to(20)).collect(),
            };
            let caps = Capabilities {
                total_pages: 8 + up_to(40),
                kv_page_size: up_to(5) + 3,
                max_forward_tokens: 12 + up_to(20),
                max_forward_requests: up_to(9),
                max_page_refs: 8 + up_to(40),
                ..CAPS
            };
            frames += compare_frames(&caps, &lengths, seed);
        }
        assert!(frames > 5000, "{frames}");
    }

    #[test]
    fn the_standard_workload_is_the_peers() {
        let standard = Lengths::parse(STANDARD).unwrap();
        assert_eq!(
            (standard.prompts.len(), standard.outputs.iter().sum::<u32>()),
            (256, 133_966)
        );
        assert_eq!(standard.prompts.iter().sum::<u32>(), 142_827);
        assert_eq!(standard.first(2).outputs.len(), 2);
    }

    #[test]
    fn newcomers_join_those_who_decode() {
        let found = frames(&CAPS, &lengths(&[8, 4, 3], &[3, 1, 2]));
        // The third does not fit into the first frame: 12 tokens. It takes the second's place.
        assert_eq!(found, [vec![8, 4], vec![1, 3], vec![1, 1]]);
    }

    #[test]
    fn pages_of_the_whole_output_are_promised() {
        // 8 + 9 - 1 tokens are 4 pages each; page references allow two of them, requests three.
        let found = frames(&CAPS, &lengths(&[8, 2, 2], &[9, 15, 1]));
        assert_eq!(found[0], [8, 2, 2]);
        let tight = Capabilities {
            total_pages: 8,
            ..CAPS
        };
        let found = frames(&tight, &lengths(&[8, 2, 2], &[9, 15, 1]));
        assert_eq!(found[0], [8, 2]);
        assert!(
            found[1..9].iter().all(|frame| *frame == [1, 1]),
            "{found:?}"
        );
        assert_eq!(found[9], [1, 2]);
        let few = Capabilities {
            max_page_refs: 7,
            ..CAPS
        };
        assert_eq!(frames(&few, &lengths(&[8, 2], &[9, 15]))[0], [8]);
        let single = Capabilities {
            max_forward_requests: 1,
            ..CAPS
        };
        assert_eq!(frames(&single, &lengths(&[2, 2], &[2, 1])), [[2], [1], [2]]);
    }

    #[test]
    fn what_never_fits_is_said_at_once() {
        let sampler = SamplerMix::parse("greedy").unwrap();
        for (prompt, output, why) in [
            (13, 1, "13 tokens in a frame"),
            (12, 22, "33 positions"),
            (12, 26, "37 positions"),
        ] {
            let error = Scheduler::new(&CAPS, &lengths(&[prompt], &[output]), &sampler).err();
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains(why), "{text}");
        }
        for (total_pages, max_page_refs, why) in [(1, 9, "2 pages, "), (9, 1, "2 pages in a frame")]
        {
            let caps = Capabilities {
                total_pages,
                max_page_refs,
                ..CAPS
            };
            let error = Scheduler::new(&caps, &lengths(&[4], &[2]), &sampler).err();
            let text = error.map(|error| error.to_string()).unwrap_or_default();
            assert!(text.contains(why), "{text}");
        }
    }

    #[test]
    fn unusable_lengths_are_refused() {
        for text in [
            "[]",
            r#"{"prompts": [1], "outputs": []}"#,
            r#"{"prompts": [0], "outputs": [1]}"#,
            r#"{"prompts": [1], "outputs": [1000001]}"#,
            r#"{"prompts": [1]}"#,
        ] {
            assert!(
                matches!(Lengths::parse(text), Err(LoadError::Lengths(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn frames_with_prompts_are_told_from_decodes() {
        let record = Record {
            samples: Samples {
                round_trip_ns: vec![5_000_000_000, 1_000_000_000, 2_000_000_000],
                client_ns: vec![0, 3000, 6000],
            },
            requests: vec![2, 2, 1],
            tokens: vec![9, 2, 1],
        };
        let run = figures(record, 8.0, 0.0..1.0, &lengths(&[8, 1], &[3, 1]));
        let expected = Share {
            steps: 2,
            seconds: 3.0,
            requests: 3,
            tokens: 3,
        };
        assert_eq!(run.decode, expected);
        assert_eq!((run.with_prompts.steps, run.with_prompts.tokens), (1, 9));
        assert_eq!(
            (run.output_tokens, run.tokens_per_s, run.client_us.p50),
            (4, 0.5, 3.0)
        );
    }
}
