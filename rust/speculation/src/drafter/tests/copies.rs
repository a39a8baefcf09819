//! The copies that contexts follow, against searches of their whole text.

use crate::copy_tracker::{CopyTracker, RESUMED_BONUS};
use crate::drafter::Drafter;
use crate::index::{BOUNDARY, share};

/// The copy, the context's first position, and its text.
type Before = Option<(Option<CopyTracker>, usize, Vec<u32>)>;

pub(super) fn before(drafter: &Drafter, id: u64) -> Before {
    let context = drafter.contexts.peek(&id)?;
    let (start, text) = context.all();
    Some((context.copying(), start, text))
}

/// How many tokens before two positions of a text are the same, none of them a boundary.
fn matching(text: &[u32], a: usize, b: usize, depth: usize) -> usize {
    let pairs = text[..a].iter().rev().zip(text[..b].iter().rev());
    let same = pairs.take_while(|&(a, b)| a == b && *a != BOUNDARY);
    same.take(depth).count()
}

/// Checks the copy of a context after a draft, against that before the last tokens came.
pub(super) fn check(drafter: &Drafter, id: u64, before: Before) {
    let Some(context) = drafter.contexts.peek(&id) else {
        return;
    };
    let (start, text) = context.all();
    let (depth, end) = (drafter.depth, start + text.len());
    // As it was if all of that text is still there.
    let known = before.and_then(|(copying, from, old)| {
        let kept = old.iter().zip(&text).take_while(|(a, b)| a == b).count();
        copying.filter(|copying| from == start && copying.end <= start + kept)
    });
    let index = context.index();
    let own = (index.own_match()).map(|found| (found.length, start + index.next(found) - 1));
    let mut wanted = known.filter(|known| known.end == end);
    if let Some(known) = known.filter(|known| known.end < end) {
        let expected = known.source + end - known.end;
        let found = (known.source..end)
            .filter(|at| (expected.saturating_sub(16)..=expected + 8).contains(at));
        let found = found.map(|at| (at, matching(&text, at - start, end - start, depth)));
        let mut found: Vec<_> = found.filter(|at| at.1 > 0).collect();
        found.sort_by_key(|at| (at.1, usize::MAX - at.0.abs_diff(expected), end - at.0));
        wanted = match (found.last(), own) {
            (_, Some((length, next))) if next == expected => Some((next, length)),
            (last, _) => last.copied(),
        }
        .map(|(source, matched)| CopyTracker {
            source,
            end,
            matched,
        })
        .or((end - known.end <= 16).then_some(known));
    }
    let matched = wanted
        .filter(|wanted| wanted.end == end)
        .map_or(0, |wanted| wanted.matched);
    if let Some((length, source)) = own.filter(|own| own.0 >= 3 && own.0 > matched + RESUMED_BONUS)
    {
        wanted = Some(CopyTracker {
            source,
            end,
            matched: length,
        });
    }
    assert_eq!(
        context.copying(),
        wanted,
        "{text:?} from {start}, {known:?}"
    );
    if let Some(CopyTracker {
        source,
        end,
        matched,
    }) = wanted
    {
        assert!((start..end).contains(&source));
        let same = matching(&text, source - start, end - start, matched);
        // A boundary is the first token of a match.
        assert!(same + 1 >= matched, "{text:?} from {start}, {wanted:?}");
    }
}

/// The draft of a copy that continues, if none of the context's own matches is longer, and the length that it counts for.
pub(super) fn resumed(
    drafter: &Drafter,
    id: u64,
    own: usize,
    count: usize,
) -> Option<(Vec<u32>, usize)> {
    let context = drafter.contexts.peek(&id)?;
    let (start, mut text) = context.all();
    let end = start + text.len();
    let copying = context
        .copying()
        .filter(|copying| copying.end == end && copying.matched <= 2)?;
    let length = copying.matched + RESUMED_BONUS;
    if copying.matched < drafter.config.min_n || length <= own {
        return None;
    }
    for at in copying.source - start..copying.source - start + count {
        if text[at] == BOUNDARY {
            break;
        }
        text.push(text[at]);
    }
    let draft = text.split_off(end - start);
    (!draft.is_empty()).then_some((draft, length))
}

/// The candidate after `path` in a tree if the copy continues: length, token and share.
pub(super) fn candidate(
    resumed: Option<&(Vec<u32>, usize)>,
    path: &[u32],
) -> Option<(usize, u32, f64)> {
    let (draft, length) = resumed?;
    let &token = draft.strip_prefix(path)?.first()?;
    let length = length + path.len();
    Some((length, token, share(1.0, 1.0, length - RESUMED_BONUS)))
}

#[test]
fn a_copy_is_resumed_after_an_edit() {
    let mut run = super::new(0, usize::MAX);
    // 1 and 2 occur at many positions.
    let text: Vec<u32> = (10..40).chain([1, 70, 1, 71, 1]).chain(40..60).collect();
    let noise = [2, 80, 1, 81, 1, 81, 2, 80, 1, 81, 1, 81];
    run.say(1, 0, &[&text[..], &noise].concat());
    let mut at = (text.len() + noise.len()) as u32;
    let mut say = |tokens: &[u32]| {
        let (drafts, length) = run.say(1, at, tokens);
        at += tokens.len() as u32;
        (drafts.to_vec(), length)
    };
    assert_eq!(say(&[10, 11, 12]), (vec![13, 14, 15, 16], 3));
    // One token is replaced by two. The last that follows is known from one position only.
    assert_eq!(say(&[90, 91]), (vec![], 0));
    assert_eq!(say(&[15]), (vec![16, 17, 18, 19], 3));
    assert_eq!(say(&[16, 17, 18]), (vec![19, 20, 21, 22], 4));
    // A token is put in. The next occurs at many positions, and the newest is a wrong one.
    assert_eq!(say(&(19..40).collect::<Vec<_>>()).1, 18);
    assert_eq!(say(&[92, 1]), (vec![70, 1, 71, 1], 3));
}

#[test]
fn edits_are_limited() {
    let text: Vec<u32> = (100..200).chain(100..110).collect();
    let after = |change: &[u32], on: u32| {
        let mut run = super::new(0, usize::MAX);
        run.say(1, 0, &text);
        let (drafts, length) = run.say(1, 110, &[change, &[on]].concat());
        (drafts[0], length)
    };
    for left_out in 0..12 {
        let length = if left_out <= 8 { 3 } else { 1 };
        assert_eq!(after(&[990], 111 + left_out), (112 + left_out, length));
    }
    for put_in in 0..20 {
        let change: Vec<u32> = (900..900 + put_in).collect();
        let length = match put_in {
            0 => 11,
            1..=16 => 3,
            _ => 1,
        };
        assert_eq!(after(&change, 110), (111, length));
    }
}
