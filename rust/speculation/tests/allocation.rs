//! What the drafter holds is what it says, stays within its budgets, and does not grow with the contexts that it has seen.

use allocation_counter::measure;
use std::time::Duration;

use pie_speculation::{Config, DraftProposal, Drafter, Drafts, Policy, Step, SuffixConfig, Tree};

/// Pseudo-random numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    /// A token below `vocab`, each as frequent as its number is small.
    fn zipf(&mut self, vocab: u32) -> u32 {
        let uniform = self.next() as f64 / (1_u64 << 53) as f64;
        f64::from(vocab).powf(uniform) as u32 - 1
    }
}

fn fibonacci(length: usize) -> Vec<u32> {
    let (mut a, mut b) = (vec![1], vec![1, 2]);
    while b.len() < length {
        let next = [&b[..], &a[..]].concat();
        (a, b) = (b, next);
    }
    b.truncate(length);
    b
}

/// Every context is followed by 0 and 1 in turns, so that each token replaces what followed best at every length.
fn alternating(length: usize) -> Vec<u32> {
    let mut text = vec![0; 20];
    let mut last = std::collections::HashMap::new();
    while text.len() < length {
        let end: Vec<u32> = text[text.len() - 12..].to_vec();
        let next = last.entry(end).or_insert(0);
        *next = 1 - *next;
        text.push(*next);
    }
    text
}

/// Texts of so many tokens that ask for much memory, or little.
fn texts(length: usize) -> Vec<(&'static str, Vec<u32>)> {
    let mut random = Random(88_172_645_463_325_252);
    let zipf = (0..length).map(|_| random.zipf(50_000)).collect();
    let bits = (0..length).map(|_| (random.next() & 1) as u32).collect();
    let letters = (0..length).map(|_| (random.next() % 20) as u32).collect();
    let numbers = (0..length as u32).collect();
    let phrase: Vec<_> = (0..100).map(|_| random.zipf(5000)).collect();
    let edited = (0..length).map(|at| {
        if random.next().is_multiple_of(20) {
            random.zipf(5000)
        } else {
            phrase[at % 100]
        }
    });
    let edited = edited.collect();
    vec![
        ("zipf", zipf),
        ("bits", bits),
        ("letters", letters),
        ("numbers", numbers),
        ("same", vec![7; length]),
        ("fibonacci", fibonacci(length)),
        ("edited", edited),
        ("alternating", alternating(length)),
    ]
}

const ALONE: Config = Config {
    max_depth: 18,
    min_n: 1,
    max_n: None,
    capacity: 0,
    context_bytes: usize::MAX,
    suffix: None,
};

fn step(context: u64, position: usize, tokens: &[u32]) -> Step<'_> {
    Step {
        context,
        position: position as u32,
        tokens,
        drafts: 4,
    }
}

#[test]
fn a_token_takes_at_most_64_bytes() {
    // Sizes at which tables have just grown, and others.
    for length in [3_500, 20_000, 55_000, 70_000, 140_000] {
        for (name, text) in texts(length) {
            for (kind, capacity) in [("context", 0), ("history", 2 * length + 10)] {
                let mut made = None;
                let held = measure(|| {
                    let config = Config { capacity, ..ALONE };
                    let drafter = made.insert(Drafter::new(config).unwrap());
                    drafter.step(&[step(1, 0, &text)], &mut Drafts::default());
                    if capacity > 0 {
                        drafter.release(1);
                    }
                });
                let held = held.bytes_current as f64;
                let each = held / length as f64;
                assert!(
                    each <= 64.0,
                    "{each} bytes for each of {length} tokens of {name} in a {kind}"
                );
                let said = made.map_or(0, |drafter| drafter.bytes()) as f64;
                // A history has of some texts next to nothing; what a drafter needs to draft counts then.
                assert!(
                    (said - held).abs() < 0.05 * held + 1000.0,
                    "{said} bytes are said to be held, not {held}"
                );
            }
        }
    }
}

#[test]
fn a_new_drafter_is_small() {
    let made = measure(|| drop(Drafter::new(Config::default()).unwrap()));
    assert!(made.bytes_max < 10_000, "{made:?}");
    assert_eq!(made.bytes_current, 0);
}

#[test]
fn a_million_contexts_leave_nothing() {
    let mut random = Random(7);
    let mut drafter = Drafter::new(Config {
        capacity: 4000,
        context_bytes: 200_000,
        ..Config::default()
    })
    .unwrap();
    let mut drafts = Drafts::default();
    let mut open = |context: u64| {
        let tokens = [(); 6].map(|()| random.zipf(1000));
        drafter.step(&[step(context, 0, &tokens)], &mut drafts);
        if context.is_multiple_of(3) {
            drafter.release(context);
        }
        assert!(drafter.contexts() < 1000);
    };
    let early = measure(|| (1..=50_000).for_each(&mut open));
    let later = measure(|| (50_001..=1_000_000).for_each(&mut open));
    let early = early.bytes_current as u64;
    assert!(
        later.bytes_max < early / 4 + 200_000,
        "{} bytes more than {early} early on",
        later.bytes_max
    );
}

#[test]
fn short_contexts_are_counted_whole() {
    let mut drafter = Drafter::new(ALONE).unwrap();
    let held = measure(|| {
        for context in 1..=20_000 {
            drafter.step(&[step(context, 0, &[1, 2, 3])], &mut Drafts::default());
        }
    });
    let (held, said) = (held.bytes_current as f64, drafter.bytes() as f64);
    assert!((said / held - 1.0).abs() < 0.1, "{said}, not {held}");
}

#[test]
fn contexts_keep_to_their_budget() {
    let mut random = Random(9);
    let budget = 1_000_000;
    let mut drafter = Drafter::new(Config {
        capacity: 0,
        context_bytes: budget,
        ..ALONE
    })
    .unwrap();
    let mut drafts = Drafts::default();
    let mut ends = [0; 200];
    for round in 0..3000 {
        let context = (random.next() % 200) as usize;
        let tokens: Vec<_> = (0..random.next() % 400).map(|_| random.zipf(100)).collect();
        drafter.step(
            &[step(context as u64 + 1, ends[context], &tokens)],
            &mut drafts,
        );
        ends[context] += tokens.len();
        // Contexts beyond the budget go with the next step.
        assert!(
            drafter.bytes() < budget + 400 * 64,
            "{} bytes in round {round}",
            drafter.bytes()
        );
    }
    assert!(drafter.bytes() > budget / 2);
}

#[test]
fn decoding_allocates_only_to_grow() {
    for suffix in [None, Some(SuffixConfig::default())] {
        check_allocations_of_decoding(suffix);
    }
}

fn check_allocations_of_decoding(suffix: Option<SuffixConfig>) {
    let mut random = Random(3);
    let phrase: Vec<_> = (0..300).map(|_| random.zipf(1000)).collect();
    let mut drafter = Drafter::new(Config {
        capacity: 1_000_000,
        suffix,
        ..ALONE
    })
    .unwrap();
    let (mut drafts, mut tree) = (Drafts::default(), Tree::default());
    let said = |context: usize, at: usize| phrase[(at + context * 7) % phrase.len()];
    let mut quiet = 0;
    for at in 0..4000 {
        let tokens: Vec<_> = (0..16).map(|context| [said(context, at)]).collect();
        let steps = tokens
            .iter()
            .zip(1..)
            .map(|(tokens, context)| step(context, at, tokens));
        let steps: Vec<_> = steps.collect();
        let stepped = measure(|| drafter.step(&steps, &mut drafts));
        quiet += u32::from(stepped.count_total == 0);
        if at > 1000 {
            assert_eq!(
                drafts.tokens(3),
                [1, 2, 3, 4].map(|ahead| said(3, at + ahead))
            );
            // The text of a context only grows by its tokens now, so most steps find room.
            drafter.tree(4, 8, &mut tree);
        }
    }
    assert!(quiet > 3300, "{quiet} of 4000 steps allocated nothing");
    // Verifying again what is known takes nothing at all, wherever it goes back to.
    let again: Vec<_> = (3000..4000).map(|at| said(0, at)).collect();
    let count = |drafter: &mut Drafter, drafts: &mut Drafts, from: usize| {
        measure(|| drafter.step(&[step(1, 3000 + from, &again[from..])], drafts)).count_total
    };
    for from in [0, 500, 999, 1000] {
        assert_eq!(count(&mut drafter, &mut drafts, from), 0);
    }
}

#[test]
fn choose_allocates_nothing() {
    let mut policy = Policy::new(16, &[256, 512, 1024, 2048, 4096, 8192]);
    let offers: Vec<_> = (1..=256)
        .map(|context| DraftProposal {
            context,
            match_length: 1 + context as usize % 20,
            drafts: 16,
            ..DraftProposal::default()
        })
        .collect();
    let (mut marks, mut lengths) = (Vec::new(), Vec::new());
    let mut drafted = 0;
    let mut choose = || {
        policy.preselect(&offers, &mut marks);
        policy.choose(&offers, &mut lengths);
        let rows = 256 + lengths.iter().sum::<usize>();
        drafted = drafted.max(rows - 256);
        for (offer, &drafts) in offers
            .iter()
            .zip(&lengths)
            .filter(|(_, drafts)| **drafts > 0)
        {
            policy.verified(offer, drafts, offer.context as usize % 5);
        }
        let time = Duration::from_millis(10);
        policy.timed(rows, false, time);
        policy.answered(rows, time);
    };
    (0..600).for_each(|_| choose());
    let later = measure(|| (0..300).for_each(|_| choose()));
    assert_eq!(later.count_total, 0);
    assert!(drafted > 256, "{drafted} drafts");
    assert!(policy.counters().probes > 0);
}

#[test]
fn rewinds_do_not_accumulate_memory() {
    let mut random = Random(5);
    let text: Vec<_> = (0..5000).map(|_| random.zipf(300)).collect();
    let mut drafter = Drafter::new(ALONE).unwrap();
    let mut drafts = Drafts::default();
    drafter.step(&[step(1, 0, &text)], &mut drafts);
    for round in 0..1000 {
        drafter.step(&[step(1, 4900, &text[..100])], &mut drafts);
        drafter.step(&[step(1, 4900, &text[100 + round..][..100])], &mut drafts);
    }
    let again = measure(|| {
        for round in 0..1000 {
            drafter.step(&[step(1, 4900, &text[..100])], &mut drafts);
            drafter.step(&[step(1, 4900, &text[1000 + round..][..100])], &mut drafts);
        }
    });
    assert!(again.bytes_current <= 50_000, "{again:?}");
}
