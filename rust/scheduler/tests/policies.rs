//! The order of admission, held to `SGLang`'s `schedule_policy.py`, transcribed.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use pie_scheduler::{
    Config, FrameBytes, Limits, NewRequest, Outputs, Policy, Scheduler, StepOutput,
};
use proptest::prelude::*;

const SIZE: usize = 4;

const LIMITS: Limits = Limits {
    total_pages: 4096,
    host_pages: 0,
    page_size: SIZE as u32,
    max_forward_tokens: 1 << 20,
    max_forward_requests: 64,
    max_page_refs: 1 << 20,
    max_image_bytes: 0,
    max_model_len: 1 << 20,
    vocab_size: 1 << 20,
    max_logprob_words: 1 << 16,
    frame: FrameBytes::UNLIMITED,
};

/// A request that waits.
#[derive(Debug, Clone)]
struct Waiting {
    id: u64,
    prompt: Vec<u32>,
    max_tokens: u32,
    priority: Option<i32>,
    key: Option<u8>,
}

fn common(one: &[u32], other: &[u32]) -> usize {
    one.iter().zip(other).take_while(|(a, b)| a == b).count()
}

/// Tokens of a prompt that the cache has, all but the last one at most.
fn matched(cache: &[Vec<u32>], prompt: &[u32]) -> usize {
    let limit = &prompt[..prompt.len() - 1];
    let longest = cache.iter().map(|cached| common(cached, limit)).max();
    longest.unwrap_or(0) / SIZE * SIZE
}

/// `_compute_prefix_matches` and `_sort_by_longest_prefix`.
fn by_longest_prefix(waiting: &mut [Waiting], cache: &[Vec<u32>]) {
    if waiting.len() > 128 {
        return;
    }
    let mut simulated: Vec<Vec<u32>> = Vec::new();
    let mut deprioritized = Vec::new();
    for request in &*waiting {
        if matched(cache, &request.prompt) <= 32 {
            let found = simulated
                .iter()
                .map(|other| common(other, &request.prompt))
                .max();
            if found.unwrap_or(0) >= 32 {
                deprioritized.push(request.id);
            } else {
                simulated.push(request.prompt.clone());
            }
        }
    }
    waiting.sort_by_key(|request| {
        let last = deprioritized.contains(&request.id);
        (
            last,
            if last {
                Reverse(0)
            } else {
                Reverse(matched(cache, &request.prompt))
            },
        )
    });
}

/// A trie of pages, and those that wait at its nodes.
#[derive(Default)]
struct Node {
    children: Vec<(Vec<u32>, Node)>,
    own: Vec<Waiting>,
    weight: usize,
}

/// `_sort_by_dfs_weight`.
fn by_weight(waiting: &mut Vec<Waiting>, cache: &[Vec<u32>]) {
    let mut root = Node::default();
    for request in waiting.drain(..) {
        let mut at = &mut root;
        at.weight += 1;
        for page in request.prompt[..matched(cache, &request.prompt)].chunks(SIZE) {
            let index = at.children.iter().position(|(own, _)| own == page);
            let index = index.unwrap_or_else(|| {
                at.children.push((page.to_vec(), Node::default()));
                at.children.len() - 1
            });
            at = &mut at.children[index].1;
            at.weight += 1;
        }
        at.own.push(request);
    }
    visit(root, waiting);
}

fn visit(mut node: Node, order: &mut Vec<Waiting>) {
    node.children
        .sort_by_key(|(_, child)| Reverse(child.weight));
    for (_, child) in node.children {
        visit(child, order);
    }
    order.extend(node.own);
}

/// `_sort_by_routing_key`.
fn by_routing_key(waiting: &mut [Waiting], running: &[Option<u8>]) {
    let mut counts: BTreeMap<u8, usize> = BTreeMap::new();
    for key in running.iter().flatten() {
        *counts.entry(*key).or_default() += 1;
    }
    if counts.is_empty() {
        return;
    }
    waiting.sort_by_key(
        |request| match request.key.and_then(|key| counts.get(&key)) {
            Some(&count) => (0, Reverse(count), request.key),
            None => (1, Reverse(0), request.key),
        },
    );
}

fn rank(priority: Option<i32>, low_first: bool) -> i64 {
    match priority {
        None => i64::MAX,
        Some(value) if low_first => value.into(),
        Some(value) => -i64::from(value),
    }
}

/// Requests that end with their first token, one after the other.
struct Play {
    scheduler: Scheduler<()>,
    outputs: Outputs,
    now: u64,
}

impl Play {
    fn new(config: Config) -> Self {
        Self {
            scheduler: Scheduler::new(config, LIMITS, None).expect("valid"),
            outputs: Outputs::default(),
            now: 0,
        }
    }

    fn submit(&mut self, waiting: &Waiting) {
        let prompt = waiting.prompt.clone();
        let mut request = NewRequest::new(waiting.id, prompt, (), waiting.max_tokens);
        request.priority = waiting.priority;
        request.routing_key = waiting.key.map(|key| key.to_string().into());
        self.scheduler.submit(request).expect("it fits");
    }

    /// Returns the requests of the step that sample.
    fn step(&mut self) -> Vec<u64> {
        self.now += 1;
        let step = self
            .scheduler
            .schedule(self.now)
            .expect("consistent bookkeeping");
        let step = step.expect("there is something to do");
        let ids: Vec<u64> = step.rows().map(|row| row.id).collect();
        let tokens = vec![1; ids.len()];
        let token_ends: Vec<u32> = (0..=ids.len() as u32).collect();
        let answer = StepOutput {
            tokens: &tokens,
            token_ends: &token_ends,
            ..StepOutput::default()
        };
        self.scheduler
            .process_output(self.now, &answer)
            .expect("its step");
        self.scheduler.outputs(&mut self.outputs);
        ids
    }
}

fn waiting() -> impl Strategy<Value = Vec<Waiting>> {
    let one = (
        0_u32..3,
        0_u32..60,
        1_u32..30,
        1_u32..4,
        prop::option::of(-2_i32..3),
        prop::option::of(0_u8..3),
    );
    let many = prop_oneof![9 => prop::collection::vec(one.clone(), 1..25), 1 => prop::collection::vec(one, 120..140)];
    many.prop_map(|many| {
        let requests = (0..).zip(many);
        let make = |(id, (family, shared, own, max_tokens, priority, key)): (u64, _)| {
            let begin = (0..shared).map(|at| family * 1000 + at);
            let rest = (0..own).map(|at| 10_000 + id as u32 * 100 + at);
            Waiting {
                id,
                prompt: begin.chain(rest).collect(),
                max_tokens,
                priority,
                key,
            }
        };
        requests.map(make).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn cache_aware_policies_admit_in_sglangs_order(
        mut queue in waiting(),
        policy in prop_oneof![Just(Policy::Lpm), Just(Policy::DfsWeight), Just(Policy::Fcfs)],
    ) {
        let config = Config { policy, max_running: 1, max_overtakes: u32::MAX, ..Config::default() };
        let mut play = Play::new(config);
        for request in &mut queue {
            request.max_tokens = 1;
            play.submit(request);
        }
        let mut cache: Vec<Vec<u32>> = Vec::new();
        while !queue.is_empty() {
            let mut order = queue.clone();
            match policy {
                Policy::Lpm => by_longest_prefix(&mut order, &cache),
                Policy::DfsWeight => by_weight(&mut order, &cache),
                _ => {}
            }
            prop_assert_eq!(play.step(), [order[0].id]);
            let full = order[0].prompt.len() / SIZE * SIZE;
            cache.push(order[0].prompt[..full].to_vec());
            queue.retain(|request| request.id != order[0].id);
        }
        prop_assert!(play.scheduler.is_idle());
    }

    #[test]
    fn longest_output_and_priority_admit_in_sglangs_order(
        mut queue in waiting(),
        (lof, priority, low_first) in any::<(bool, bool, bool)>(),
    ) {
        let config = Config {
            policy: if lof { Policy::Lof } else { Policy::Fcfs },
            priority,
            low_priority_first: low_first,
            max_running: 1,
            max_overtakes: u32::MAX,
            prefix_cache: false,
            ..Config::default()
        };
        let mut play = Play::new(config);
        for request in &queue {
            play.submit(request);
        }
        queue.sort_by_key(|request| {
            let rank = if priority { rank(request.priority, low_first) } else { 0 };
            (rank, if lof { Reverse(request.max_tokens) } else { Reverse(0) })
        });
        let mut begun: Vec<u64> = Vec::new();
        while !play.scheduler.is_idle() {
            for id in play.step() {
                if !begun.contains(&id) {
                    begun.push(id);
                }
            }
        }
        prop_assert_eq!(begun, queue.iter().map(|request| request.id).collect::<Vec<_>>());
    }

    #[test]
    fn routing_keys_of_running_requests_come_first(
        running in prop::collection::vec(prop::option::of(0_u8..3), 1..6),
        mut queue in waiting(),
    ) {
        let config = Config {
            policy: Policy::RoutingKey,
            max_running: running.len() as u32 + 1,
            max_overtakes: u32::MAX,
            prefix_cache: false,
            ..Config::default()
        };
        let mut play = Play::new(config);
        for (id, key) in (1000..).zip(&running) {
            play.submit(&Waiting { id, prompt: vec![1; 4], max_tokens: 1000, priority: None, key: *key });
        }
        play.step();
        for request in &mut queue {
            request.max_tokens = 1;
            play.submit(request);
        }
        by_routing_key(&mut queue, &running);
        for request in &queue {
            let rows = play.step();
            prop_assert!(rows.contains(&request.id), "{} is not in {:?}", request.id, rows);
        }
    }
}

#[test]
fn a_seed_fixes_the_random_order() {
    let play = |seed| {
        let config = Config {
            policy: Policy::Random,
            max_running: 1,
            seed,
            ..Config::default()
        };
        let mut play = Play::new(config);
        for id in 0..20 {
            play.submit(&Waiting {
                id,
                prompt: vec![id as u32; 5],
                max_tokens: 1,
                priority: None,
                key: None,
            });
        }
        (0..20).flat_map(|_| play.step()).collect::<Vec<u64>>()
    };
    assert_eq!(play(1), play(1));
    assert_ne!(play(1), play(2));
    let mut all = play(1);
    all.sort_unstable();
    assert_eq!(all, (0..20).collect::<Vec<u64>>());
}
