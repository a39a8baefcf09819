//! Arbitrary bytes go through access, plan, staging and reply without a panic, and leave no trace.

use crate::common::answer::check_archive;
use crate::common::builder::{Encoded, GREEDY, LARGE, Req, decode, frame};
use crate::common::device::{DRIVER, Device};
use crate::common::engine::Engine;
use crate::common::generate;
use pie_planner::{ForwardTimings, Limits, Planner, ReplyError, StagedPass};
use pie_wire::{
    ForwardRequest, Reply, ResponsePayload, Sampler, WireError, decode_reply, decode_response,
};
use proptest::collection::vec;
use proptest::prelude::*;
use rustix::time::{ClockId, clock_gettime};
use std::num::NonZeroUsize;
use std::time::Duration;

/// Takes whatever the bytes say; returns whether they were planned.
fn feed(planner: &mut Planner, encoded: &Encoded) -> bool {
    let Some(request) = encoded.try_forward() else {
        return false;
    };
    let Ok(plan) = planner.plan(DRIVER, request) else {
        return false;
    };
    let mut block = vec![0_u64; planner.layout().bytes() / 8];
    let block = bytemuck::cast_slice_mut(&mut block);
    let limits = *planner.limits();
    let (mut tokens, mut slots) = (0, 0);
    let see = |pass: &StagedPass, _: &[u8]| {
        let pass = pass.pass();
        assert!(pass.tokens > 0 && pass.tokens <= limits.chunk_tokens as usize);
        assert!(pass.requests > 0 && pass.requests <= limits.max_requests as usize);
        tokens += pass.tokens;
        slots += pass.slots;
    };
    let mut answered = 0;
    let mut engine = Engine::default();
    let mut computed = engine.run_noting(planner, plan, block, see, |group| {
        assert!(!group.is_empty() && group.len() <= limits.max_slots as usize);
        answered += group.len();
    });
    assert_eq!((tokens, slots), (computed.token_count(), answered));
    for capacity in [1 << 16, 300, 0] {
        let mut words = vec![0_u64; capacity / 8];
        let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        match planner.reply(&mut computed, ForwardTimings::default(), buffer) {
            Ok(length) => check_reply(&buffer[..length], computed.request_count()),
            Err(ReplyError::Wire(WireError::BufferTooSmall { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
    planner.recycle(computed);
    true
}

fn check_reply(bytes: &[u8], requests: usize) {
    match decode_reply(bytes).expect("the reply is valid") {
        Reply::Tokens(tokens) => assert_eq!(tokens.len(), requests),
        Reply::Frame(_) => match decode_response(bytes).expect("a valid archive").payload {
            ResponsePayload::Forward(response) => check_archive(&response, requests),
            ResponsePayload::Status(status) => panic!("{status:?}"),
        },
    }
}

/// A device whose planner has seen hostile bytes still serves an honest frame.
fn serves_honest_frames(device: &mut Device) {
    // The bytes were staged into a block that this device never saw.
    device.lose_table();
    let page_size = device.planner.limits().page_size;
    let pages: &[u32] = if page_size == 1 { &[0, 1, 2] } else { &[0] };
    let prompt = Req::new(page_size, 0, &[1, 2, 3], pages);
    let step = Req::new(page_size, 0, &[4], &[3]).sample(0, GREEDY);
    device.run(&frame(&[prompt, step]), |_, _| 1);
    assert!(device.request_errors().is_empty());
}

/// One change to the bytes of a frame.
#[derive(Debug, Clone)]
enum Damage {
    Bit(usize),
    Word(usize, u32),
    Cut(usize),
    CutFront(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    prop_oneof![
        4 => any::<usize>().prop_map(Damage::Bit),
        6 => (any::<usize>(), prop_oneof![0_u32..9, any::<u32>(), Just(u32::MAX), Just(u32::MAX - 15)])
            .prop_map(|(at, word)| Damage::Word(at, word)),
        1 => (1_usize..400).prop_map(Damage::Cut),
        1 => (1_usize..40).prop_map(Damage::CutFront),
    ]
}

fn apply(encoded: &Encoded, damages: &[Damage]) -> Encoded {
    let mut bytes = encoded.bytes().to_vec();
    for damage in damages {
        let length = bytes.len();
        if length < 8 {
            break;
        }
        match *damage {
            Damage::Bit(at) => bytes[at / 8 % length] ^= 1 << (at % 8),
            Damage::Word(at, word) => {
                let at = at % (length / 4) * 4;
                bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            }
            Damage::Cut(count) => bytes.truncate(length.saturating_sub(count)),
            Damage::CutFront(count) => drop(bytes.drain(..(8 * count).min(length))),
        }
    }
    Encoded::from_bytes(&bytes)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]

    #[test]
    fn damaged_frames(
        (limits, frames) in generate::sequence(),
        damages in vec(vec(damage(), 1..5), 1..8),
    ) {
        let mut device = Device::new(limits);
        for frame in &frames {
            let encoded = Encoded::new(DRIVER, frame);
            feed(&mut device.planner, &encoded);
            for damage in &damages {
                feed(&mut device.planner, &apply(&encoded, damage));
            }
        }
        if limits.max_kv_len() >= 3 && limits.reply_bytes >= 200 {
            serves_honest_frames(&mut device);
        }
    }

    #[test]
    fn random_bytes(bytes in vec(any::<u8>(), 0..900)) {
        feed(&mut Planner::new(LARGE, 0), &Encoded::from_bytes(&bytes));
    }

    /// Arrays of plausible lengths and arbitrary contents.
    #[test]
    fn random_arrays(
        arrays in vec(vec(prop_oneof![8 => 0_u32..4, 1 => any::<u32>()], 0..4), 12),
        user in any::<bool>(),
    ) {
        let mut arrays = arrays.into_iter();
        let mut next = || arrays.next().unwrap_or_default();
        let request = ForwardRequest {
            token_ids: next(),
            position_ids: next(),
            qo_indptr: next(),
            kv_page_indices: next(),
            kv_page_indptr: next(),
            kv_last_page_lens: next(),
            spec_token_ids: next(),
            spec_indptr: next(),
            sampling_indptr: next(),
            sampling_indices: next(),
            mask_indptr: next(),
            sampler_indptr: next(),
            has_user_mask: user,
            ..ForwardRequest::default()
        };
        feed(&mut Planner::new(LARGE, 0), &Encoded::new(DRIVER, &request));
    }
}

/// A small frame with something in every array that the planner reads.
fn sample() -> ForwardRequest {
    let labels = Sampler::Logprobs {
        token_ids: vec![4, 5],
    };
    let dist = Sampler::Dist {
        temperature: 1.0,
        num_tokens: 2,
    };
    let prompt = Req::new(16, 0, &[1, 2], &[0])
        .sample(1, GREEDY)
        .sample(0, labels)
        .sample(1, dist)
        .allow(&[3, 4])
        .masked([&[0, 1], &[0, 2]]);
    let verify = decode(7, 5, &[3]).verify(&[6]).masked([&[0, 8]]);
    let mut sample = frame(&[prompt, verify]);
    sample.has_user_mask = true;
    sample
}

#[test]
fn every_bit_flip() {
    let mut device = Device::new(Limits {
        chunk_tokens: 2,
        ..LARGE
    });
    let mut encoded = Encoded::new(DRIVER, &sample());
    assert!(feed(&mut device.planner, &encoded));
    let mut planned = 0;
    for bit in 0..8 * encoded.bytes().len() {
        encoded.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
        planned += u32::from(feed(&mut device.planner, &encoded));
        encoded.bytes_mut()[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(planned > 0);
    serves_honest_frames(&mut device);
}

#[test]
fn every_truncation() {
    let mut device = Device::new(LARGE);
    let encoded = Encoded::new(DRIVER, &sample());
    for length in 0..encoded.bytes().len() {
        feed(
            &mut device.planner,
            &Encoded::from_bytes(&encoded.bytes()[..length]),
        );
        feed(
            &mut device.planner,
            &Encoded::from_bytes(&encoded.bytes()[length..]),
        );
    }
    serves_honest_frames(&mut device);
}

/// What this thread has run so far; that others run meanwhile does not count.
fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// CPU time to plan a frame in which each request binds an adapter that is not there, and every third has another error, too.
fn refusal_time(requests: u32) -> Duration {
    let rows: Vec<Req> = (0..requests)
        .map(|index| Req {
            adapter: i64::from(index) + 1,
            ..decode(if index % 3 == 0 { 50_000 } else { 3 }, 1, &[0])
        })
        .collect();
    let encoded = Encoded::new(DRIVER, &frame(&rows));
    let slots = NonZeroUsize::new(2).expect("two");
    let mut planner = Planner::new(LARGE, 0).with_adapters(slots);
    let once = |_| {
        let started = cpu_time();
        let plan = planner.plan(DRIVER, encoded.forward());
        let took = cpu_time().saturating_sub(started);
        let plan = plan.expect("a sound frame");
        assert_eq!(plan.request_errors().len(), requests as usize);
        took
    };
    (0..7).map(once).min().expect("seven")
}

/// Refusing took time that grew with the square of the refused requests.
#[test]
fn many_unknown_adapters_take_time_in_proportion() {
    let (few, many) = (refusal_time(2_000), refusal_time(32_000));
    assert!(many < few * 64, "{few:?} for 2,000 and {many:?} for 32,000");
}
