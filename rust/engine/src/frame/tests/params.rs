//! Parameters of contexts in frames: registered once, then named by handles.

use super::*;

/// What a driver has under each handle, by frames that are read one after the other.
#[derive(Default)]
struct Keeper(std::collections::HashMap<u32, RequestExtension>);

impl Keeper {
    /// Reads a frame; returns its parameters and what each row asks for.
    fn read(&mut self, frame: &[u8]) -> (usize, Vec<RequestExtension>) {
        let (_, extension) = pie_wire::split_request(frame).unwrap();
        let in_frame: Vec<_> = extension.params().collect();
        for params in &in_frame {
            let handle = params.handle();
            self.0
                .extend(handle.map(|handle| (handle, params.to_owned())));
        }
        let rows = extension.rows().map(|row| match row.params() {
            ParamsRef::None => RequestExtension::default(),
            ParamsRef::InFrame(number) => in_frame[number as usize].to_owned(),
            ParamsRef::Kept(handle) => self.0[&handle].clone(),
        });
        (in_frame.len(), rows.collect())
    }

    fn words(&self) -> usize {
        self.0.values().map(|asked| asked.biases.len()).sum()
    }
}

fn biased(id: u32, count: usize) -> Arc<RequestExtension> {
    Arc::new(RequestExtension {
        biases: vec![(id, 1.0); count],
        ..RequestExtension::default()
    })
}

fn frame_of(builder: &mut FrameBuilder, params: &[Arc<RequestExtension>]) -> Vec<u8> {
    let sampler = Sampler::RawLogits;
    let row = |params| FrameRow {
        extension: Some(RowExtension {
            params,
            history: &[],
            prompt_logprobs: (0, 0),
            next: None,
        }),
        tokens: &[1],
        pages: &[1],
        sampler: Some(&sampler),
        ..FrameRow::EMPTY
    };
    builder.build(params.iter().map(row));
    let mut buffer = vec![0; 8 << 20];
    let length = builder.encode(&mut buffer).unwrap();
    buffer.truncate(length);
    buffer
}

#[test]
fn what_a_context_asks_for_is_sent_once() {
    let mut builder = FrameBuilder::new(4);
    let mut keeper = Keeper::default();
    let asked = [biased(1, 3), biased(2, 5)];
    // Two samples of one request share it.
    let all = [asked[0].clone(), asked[0].clone(), asked[1].clone()];
    let first = frame_of(&mut builder, &all);
    let wanted: Vec<_> = all.iter().map(|asked| (**asked).clone()).collect();
    assert_eq!(keeper.read(&first), (2, wanted.clone()));
    let second = frame_of(&mut builder, &all);
    assert_eq!(keeper.read(&second), (0, wanted.clone()));
    assert_eq!(first.len() - second.len(), 4 * (2 * 19 + 2 * 8));
    // After a failure it is sent again, in the place of what the driver may have.
    builder.resend_params();
    let third = frame_of(&mut builder, &all);
    assert_eq!(keeper.read(&third), (2, wanted));
    assert_eq!(keeper.words(), 8);
}

/// Contexts come and go: the driver keeps what lives, and not much more.
#[test]
fn what_ended_contexts_asked_for_is_freed() {
    let mut builder = FrameBuilder::new(4);
    let mut keeper = Keeper::default();
    let mut live = std::collections::VecDeque::new();
    let mut random = fastrand::Rng::with_seed(3);
    let mut most = (0, 0);
    for round in 0..3000 {
        // Some are freed, others replaced.
        let large = if random.u8(..8) == 0 { 200 } else { 0 };
        live.push_back(biased(round, large + random.usize(..40)));
        while live.len() > random.usize(1..60) {
            live.pop_front();
        }
        if random.u32(..500) == 0 {
            builder.resend_params();
        }
        let frame = frame_of(&mut builder, live.make_contiguous());
        let (_, rows) = keeper.read(&frame);
        assert!(rows.iter().eq(live.iter().map(|asked| &**asked)), "{round}");
        most = (most.0.max(keeper.0.len()), most.1.max(keeper.words()));
    }
    // 60 live at once, twice as many as were found to live, and those that a failure left over.
    assert!(most.0 < 400 && most.1 < 400 * 60, "{most:?}");
    // Large ones are looked for early.
    let large = |id| biased(id, 60_000);
    for round in 0..200 {
        let frame = frame_of(&mut builder, &[large(round)]);
        keeper.read(&frame);
    }
    assert!(8 * keeper.words() < 5 << 22, "{}", keeper.words());
}

/// However many contexts begin and end with each frame, and whatever their lists' sizes: each is sent once, and what is left of
/// those that have ended takes no more than what lived with them.
#[test]
fn contexts_that_begin_and_end_in_each_frame_leave_little_behind() {
    let mut random = fastrand::Rng::with_seed(5);
    for (starts, life, most) in [(12, 8, 300), (60, 3, 400), (20, 10, 4000), (5, 4, 20_000)] {
        let (mut builder, mut keeper) = (FrameBuilder::new(4), Keeper::default());
        let mut live = std::collections::VecDeque::new();
        let (mut most_live, mut most_kept) = (0, 0);
        for round in 0..400 {
            if round == 300 {
                builder.resend_params();
            }
            while live.len() >= starts * life {
                live.pop_front();
            }
            let sizes = [most, random.usize(1..=most)];
            let one = |at: usize| biased(round * 100 + at as u32, sizes[at % 2]);
            live.extend((0..starts).map(one));
            let all = live.make_contiguous();
            let frame = frame_of(&mut builder, all);
            let (sent, rows) = keeper.read(&frame);
            assert!(rows.iter().eq(all.iter().map(|asked| &**asked)), "{round}");
            let brought = if round == 300 {
                all.len()
            } else {
                starts.min(all.len())
            };
            let words = |all: &[Arc<RequestExtension>]| -> usize {
                all.iter().map(|asked| asked.biases.len()).sum()
            };
            let freed: usize = all[all.len() - brought..]
                .iter()
                .map(|asked| pie_wire::params_len(asked) / crate::frame::params::LARGE)
                .sum();
            let expected = brought..=brought + freed + crate::frame::params::MAX_FREED;
            assert!(
                expected.contains(&sent),
                "{sent} of {expected:?} in {round}"
            );
            (most_live, most_kept) = (most_live.max(words(all)), most_kept.max(keeper.words()));
        }
        assert!(
            most_kept <= 2 * most_live.max(1 << 19),
            "{most_kept} {most_live}"
        );
    }
}

/// What a frame has freed that was never taken counts as kept.
#[test]
fn a_frame_that_fails_frees_nothing() {
    let (mut builder, mut keeper) = (FrameBuilder::new(4), Keeper::default());
    let count = 60_000;
    for round in 0..600 {
        let frame = frame_of(&mut builder, &[biased(round, count)]);
        if round % 3 == 1 {
            // It does not come to the driver.
            builder.resend_params();
        } else {
            let (_, rows) = keeper.read(&frame);
            assert_eq!(rows[0].biases.len(), count);
        }
    }
    assert!(8 * keeper.words() < 5 << 22, "{}", keeper.words());
}
