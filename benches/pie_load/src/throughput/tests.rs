//! Tests of `throughput.rs`.

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
    embedding_size: 0,
    embedding_normalized: false,
    hidden_size: 0,
    embed_size: 0,
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
    fn process_output(&mut self, tokens: &[u32]) {
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
        behind.process_output(&answered);
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
    for (total_pages, max_page_refs, why) in [(1, 9, "2 pages, "), (9, 1, "2 pages in a frame")] {
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
    let run = figures(record, 8.0, &lengths(&[8, 1], &[3, 1]));
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
