//! Trees against ones that are grown by searching everything.

use super::{copies, expected, texts};
use crate::drafter::Drafter;
use crate::index::search::SECOND;
use crate::index::{BOUNDARY, share};
use crate::reference::Reference;
use crate::tree::{ROOT, SHARED_PENALTY, Tree};

/// The most frequent continuation of each match and the second one, the longest first: length, token and share.
fn candidates(
    naive: &Reference<'_>,
    own: bool,
    (suffix, start): (&[u32], usize),
    shortest: usize,
) -> Vec<(usize, u32, f64)> {
    let mut found: Vec<(usize, u32, f64)> = Vec::new();
    for length in (shortest..=naive.depth).rev() {
        let all = naive.matches(suffix, length);
        let first = own && suffix.len() == start;
        let last = naive.text.len() - 1;
        let total = all.len() - usize::from(first && !all.is_empty());
        let followed = match all[..] {
            [] => None,
            [only] if only == last && first => None,
            [only] if only == last => own.then(|| (suffix[start], 1)),
            [only] => naive.continuation(only).map(|token| (token, 1)),
            _ => naive.most_frequent(&all).map(|token| {
                let same = |&&at: &&usize| naive.continuation(at) == Some(token);
                (token, all.iter().filter(same).count())
            }),
        };
        let mut add = |token, count| {
            let known = found.iter().any(|&(_, known, _)| known == token);
            let share = share(count, total as f64, length);
            found.extend((!known && count > 0.0).then_some((length, token, share)));
        };
        if let Some((token, count)) = followed {
            add(token, count as f64);
            if let Some(second) = naive.second(&all) {
                add(second, SECOND * (total - count) as f64);
            }
        }
    }
    found
}

/// The tree against one that is grown by searching all open tokens for the most probable.
pub(super) fn check(drafter: &mut Drafter, id: u64, count: usize) {
    let mut tree = Tree::default();
    let before = copies::before(drafter, id);
    drafter.tree(id, count, &mut tree);
    copies::check(drafter, id, before);
    let texts = texts(drafter, id);
    let Some(&top) = texts.first() else {
        assert!(tree.tokens().is_empty());
        return;
    };
    let start = top
        .iter()
        .rposition(|&token| token == BOUNDARY)
        .unwrap_or(0);
    let suffix = &top[start..];
    let resumed = copies::resumed(drafter, id, 0, count);
    let mut expected: Vec<(u32, u32)> = Vec::new();
    let mut open: Vec<(f64, u32, u32)> = Vec::new();
    let (mut parent, mut reached) = (ROOT, 1.0);
    while expected.len() < count {
        let mut path = Vec::new();
        let mut at = parent;
        while at != ROOT {
            path.insert(0, expected[at as usize].0);
            at = expected[at as usize].1;
        }
        let text = [suffix, &path].concat();
        let mut found = Vec::new();
        for (number, known) in texts.iter().enumerate() {
            if number == 1 {
                found.extend(copies::candidate(resumed.as_ref(), &path));
            }
            let (depth, shortest) = (drafter.depth, drafter.config.min_n);
            let naive = Reference { text: known, depth };
            let handicap = if number == 0 { 0 } else { SHARED_PENALTY };
            let all = candidates(&naive, number == 0, (&text, suffix.len()), shortest);
            let ranked = all
                .into_iter()
                .map(|(length, token, share)| (length.saturating_sub(handicap), token, share));
            found.extend(ranked);
        }
        if texts.len() == 1 {
            found.extend(copies::candidate(resumed.as_ref(), &path));
        }
        let mut left: f64 = reached;
        let mut known = Vec::new();
        let longest = found.iter().map(|found| found.0).max();
        for length in (0..=longest.unwrap_or(0)).rev() {
            for &(_, token, share) in found.iter().filter(|found| found.0 == length) {
                if !known.contains(&token) {
                    known.push(token);
                    let probability = left * share;
                    left -= probability;
                    open.push((probability, token, parent));
                }
            }
        }
        let most = (0..open.len())
            .rev()
            .max_by(|&a, &b| open[a].0.total_cmp(&open[b].0));
        let Some(most) = most else { break };
        let (probability, token, from) = open.remove(most);
        (parent, reached) = (expected.len() as u32, probability);
        expected.push((token, from));
    }
    let tokens = tree.tokens().iter().copied();
    let found: Vec<_> = tokens.zip(tree.parents().iter().copied()).collect();
    assert_eq!(found, expected, "{top:?}");
    for nodes in [1, count / 2, count + 1, count + 3] {
        check_padded(&tree, nodes);
    }
    check_chain(drafter, id, count);
}

/// Trees of one size: a root above, and below it the nodes that are missing.
fn check_padded(tree: &Tree, nodes: usize) {
    let (mut tokens, mut mask) = (vec![-1], vec![9]);
    tree.append_padded(77, nodes, &mut tokens, &mut mask);
    let (tokens, mask) = (&tokens[1..], &mask[1..]);
    assert_eq!((tokens.len(), mask.len()), (nodes, nodes * nodes));
    for node in 0..nodes {
        let draft = node
            .checked_sub(1)
            .filter(|&draft| draft < tree.tokens().len());
        let token = draft.map_or(0, |draft| i64::from(tree.tokens()[draft]));
        assert_eq!(tokens[node], if node == 0 { 77 } else { token });
        let mut row = vec![0; nodes];
        (row[0], row[node]) = (1, 1);
        let mut above = draft.map(|draft| tree.parents()[draft]);
        while let Some(parent) = above.filter(|&parent| parent != ROOT) {
            row[parent as usize + 1] = 1;
            above = Some(tree.parents()[parent as usize]);
        }
        assert_eq!(mask[node * nodes..][..nodes], row);
    }
}

/// A tree without branches is what a step drafts.
fn check_chain(drafter: &mut Drafter, id: u64, count: usize) {
    let mut tree = Tree::default();
    drafter.tree(id, 1, &mut tree);
    drafter.chain(id, count, &mut tree);
    assert_eq!(tree.tokens(), expected(drafter, id, count).0);
    let parents = (0..tree.tokens().len()).map(|number| number.checked_sub(1));
    let parents = parents.map(|parent| parent.map_or(ROOT, |parent| parent as u32));
    assert_eq!(tree.parents(), parents.collect::<Vec<_>>());
}
