//! Bound sequences: what they say, and that others do not notice them.

#[path = "grammar/world.rs"]
mod world;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pie_scheduler::{Finish, NewRequest};
use proptest::prelude::*;
use world::{Busy, END, Path, World, bound, expected};

const SETS: [&[u32]; 9] = [
    &[5],
    &[6],
    &[1, 2, 3],
    &[9],
    &[9],
    &[9],
    &[40, 41, 98],
    &[7],
    &[8, 64],
];

proptest! {
    /// Whatever happens to the driver and the pages, each says what it says by itself.
    #[test]
    fn constrained_and_free_sequences_generate_what_they_do_alone(
        (pages, masks) in (14_u32..60, 1_u32..9),
        requests in prop::collection::vec((any::<bool>(), 1_usize..20, 1_u32..3, 0_usize..9), 1..7),
        events in prop::collection::vec(0_u8..12, 0..60),
    ) {
        let mut world = World::with_masks(pages, masks);
        let mut wanted = BTreeMap::new();
        for (id, &(binds, length, samples, from)) in (0..).zip(&requests) {
            let prompt: Vec<u32> = (0..length as u32).map(|at| (at * 7 + id as u32) % 90).collect();
            let path = Path::late(&SETS[from..], from as u32 % 4);
            let mut request = bound(id, prompt.clone(), &path, samples);
            if !binds {
                request.grammar = None;
                request.stop.max_tokens = 12;
            }
            world.scheduler.submit(request).unwrap();
            let said = expected(&prompt, binds.then_some(&*path), if binds { 50 } else { 12 });
            for sample in 0..samples {
                wanted.insert((id, sample), said.clone());
            }
        }
        let mut failures = 0;
        for event in events {
            match event {
                0 => {
                    world.scheduler.driver_lost();
                    world.driver.out.clear();
                }
                // Three in a row end a request.
                1 if !world.driver.out.is_empty() && failures < 2 => {
                    failures += 1;
                    world.scheduler.step_failed(true);
                    world.driver.out.clear();
                }
                2..=6 => {
                    world.step();
                }
                _ => world.answer(),
            }
            world.collect();
            world.scheduler.check_invariants().unwrap();
        }
        world.run();
        for (sequence, wanted) in wanted {
            let (said, end) = &world.said[&sequence];
            prop_assert_eq!(said, &wanted, "{:?}", sequence);
            let failed = matches!(end, Some((Finish::Failed, _)));
            prop_assert!(end.is_some() && !failed, "{:?}", end);
        }
        prop_assert!(world.scheduler.is_idle());
    }
}

#[test]
fn jump_forward_tokens_are_not_sampled() {
    let mut world = World::new(60);
    let path = Path::new(&SETS);
    world
        .scheduler
        .submit(bound(1, vec![1, 2], &path, 1))
        .unwrap();
    world.run();
    let (said, end) = &world.said[&(1, 0)];
    assert_eq!(said.len(), 10);
    assert_eq!(*end, Some((Finish::StopToken(END), None)));
    // Three choices and the end: one step each.
    let forced = world.scheduler.stats().forced_tokens;
    assert_eq!((forced, world.driver.sampled), (6, 4));
}

#[test]
fn a_request_whose_grammar_compiles_is_overtaken() {
    let mut world = World::new(60);
    let path = Path::new(&SETS);
    path.ready.store(false, Ordering::Relaxed);
    world.scheduler.submit(bound(1, vec![1], &path, 1)).unwrap();
    world
        .scheduler
        .submit(NewRequest::new(2, vec![2], (), 5))
        .unwrap();
    world.run();
    assert!(world.scheduler.awaits_grammar());
    assert_eq!(world.said[&(2, 0)].0.len(), 5);
    assert!(!world.said.contains_key(&(1, 0)));
    world.scheduler.submit(bound(3, vec![1], &path, 1)).unwrap();
    assert!(world.scheduler.abort(3));
    world.run();
    assert_eq!(world.said[&(3, 0)].1, Some((Finish::Unready, None)));
    path.ready.store(true, Ordering::Relaxed);
    world.run();
    assert!(!world.scheduler.awaits_grammar());
    assert_eq!(world.said[&(1, 0)].0, expected(&[1], Some(&path), 50));
}

#[test]
fn free_sequences_do_not_wait_for_late_masks() {
    let free = |world: &mut World| {
        let request = NewRequest::new(2, vec![2], (), 12);
        world.scheduler.submit(request).unwrap();
    };
    let choices = [SETS[2]; 6];
    for (late, steps) in [(0, 0), (4, 18)] {
        let path = Path::late(&choices, late);
        let mut world = World::new(60);
        world.scheduler.submit(bound(1, vec![1], &path, 1)).unwrap();
        free(&mut world);
        // As many steps as it has tokens: none is without it.
        for _ in 0..12 {
            assert!(world.step());
            world.answer();
        }
        assert_eq!(world.said[&(2, 0)].0, expected(&[2], None, 12));
        assert!(late == 0 || world.said[&(1, 0)].1.is_none());
        // Alone it is waited for.
        world.run();
        assert_eq!(world.said[&(1, 0)].0, expected(&[1], Some(&path), 50));
        assert!(world.scheduler.stats().late_masks <= steps);
        assert_eq!(world.scheduler.stats().late_masks > 0, late > 0);
    }
}

#[test]
fn a_grammar_that_fails_ends_its_sequences_with_the_reason() {
    let mut world = World::new(60);
    let broken = Arc::new(Path {
        sets: SETS.iter().map(|set| set.to_vec()).collect(),
        ready: AtomicBool::new(true),
        broken_at: Some(3),
        late: 0,
    });
    world
        .scheduler
        .submit(bound(1, vec![1], &Path::new(&[]), 2))
        .unwrap();
    world
        .scheduler
        .submit(bound(2, vec![2], &broken, 1))
        .unwrap();
    world
        .scheduler
        .submit(NewRequest::new(3, vec![3], (), 5))
        .unwrap();
    let busy = NewRequest {
        grammar: Some(Arc::new(Busy)),
        ..NewRequest::new(4, vec![4], (), 5)
    };
    world.scheduler.submit(busy).unwrap();
    world.run();
    let later = Some((Finish::Busy, Some("try again later".to_owned())));
    assert_eq!(
        (world.said[&(4, 0)].0.len(), &world.said[&(4, 0)].1),
        (0, &later)
    );
    for sample in 0..2 {
        let (said, end) = &world.said[&(1, sample)];
        let reason = Some("it has no path".to_owned());
        assert_eq!((said.len(), end), (0, &Some((Finish::Grammar, reason))));
    }
    let (said, end) = &world.said[&(2, 0)];
    let reason = Some("it broke".to_owned());
    assert_eq!((said.len(), end), (3, &Some((Finish::Grammar, reason))));
    assert_eq!(world.said[&(3, 0)].0.len(), 5);
    assert!(world.scheduler.is_idle());
}

#[test]
fn jump_forward_stops_at_max_tokens() {
    let mut world = World::new(60);
    let path = Path::new(&[&[5], &[6], &[7], &[8]]);
    let mut request = bound(1, vec![1], &path, 1);
    request.stop.max_tokens = 3;
    world.scheduler.submit(request).unwrap();
    world.run();
    assert_eq!(
        world.said[&(1, 0)],
        (vec![5, 6, 7], Some((Finish::Length, None)))
    );
}
