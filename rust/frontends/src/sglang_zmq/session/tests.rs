//! Sessions against a list of all turns that ever were.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::{SessionParams, Sessions};

const BOS: u32 = 7;

fn params(rid: Option<&str>) -> SessionParams {
    SessionParams {
        id: "s".to_owned(),
        rid: rid.map(str::to_owned),
        ..SessionParams::default()
    }
}

/// Begins and starts a request; returns its whole prompt.
fn ask(
    sessions: &mut Sessions,
    params: &SessionParams,
    rid: &str,
    own: &[u32],
    request: u64,
) -> Result<Vec<u32>, String> {
    let (prompt, begun) = sessions.begin(params, own, Some(BOS), Instant::now())?;
    let replaced = sessions.start(&params.id, rid, begun, (prompt.clone(), request));
    assert!(replaced.is_empty(), "{replaced:?}");
    Ok(prompt)
}

fn answer(
    sessions: &mut Sessions,
    rid: &str,
    request: u64,
    tokens: &[u32],
    well: bool,
) -> Option<u64> {
    sessions.take("s", rid, request, tokens);
    sessions.end("s", rid, request, well)
}

#[test]
fn a_turn_goes_on_from_prompt_and_output() {
    let mut sessions = Sessions::default();
    assert!(sessions.open("s", false, None, Instant::now()));
    assert!(!sessions.open("s", false, None, Instant::now()));
    assert_eq!(
        ask(&mut sessions, &params(None), "a", &[BOS, 1], 0),
        Ok(vec![BOS, 1])
    );
    let early = ask(&mut sessions, &params(Some("a")), "b", &[2], 1).unwrap_err();
    assert!(early.contains("hasn't finished"), "{early}");
    answer(&mut sessions, "a", 0, &[5, 6], true);
    let mut next = params(Some("a"));
    assert_eq!(
        ask(&mut sessions, &next, "b", &[BOS, 2], 1),
        Ok(vec![BOS, 1, 5, 6, 2])
    );
    next.drops_output = true;
    assert_eq!(ask(&mut sessions, &next, "c", &[2], 2), Ok(vec![BOS, 1, 2]));
    next.drops_output = false;
    for (offset, kept) in [(3, 3), (-1, 3), (-9, 0), (99, 4)] {
        next.offset = offset;
        let all = [BOS, 1, 5, 6];
        let expected = [&all[..kept], &[9]].concat();
        assert_eq!(ask(&mut sessions, &next, "d", &[9], 3), Ok(expected));
    }
    let unknown = ask(&mut sessions, &params(Some("z")), "e", &[2], 4).unwrap_err();
    assert!(unknown.contains("has no request z"), "{unknown}");
    let mut closed = params(None);
    closed.id = "t\n".to_owned();
    let unknown = ask(&mut sessions, &closed, "e", &[2], 4).unwrap_err();
    assert!(
        unknown.contains(r"session id t\n does not exist"),
        "{unknown}"
    );
    assert_eq!(sessions.close("s"), Some(1));
    assert_eq!((sessions.close("s"), sessions.len()), (None, 0));
}

#[test]
fn a_session_that_streams_goes_on_from_the_last_that_ended_well() {
    let mut sessions = Sessions::default();
    sessions.open("s", true, None, Instant::now());
    let plain = params(None);
    assert_eq!(ask(&mut sessions, &plain, "a", &[1], 0), Ok(vec![1]));
    let busy = ask(&mut sessions, &plain, "b", &[2], 1).unwrap_err();
    assert!(busy.contains("already has an active request"), "{busy}");
    answer(&mut sessions, "a", 0, &[5], true);
    // What was aborted is as if it had not been.
    assert_eq!(ask(&mut sessions, &plain, "b", &[2], 1), Ok(vec![1, 5, 2]));
    answer(&mut sessions, "b", 1, &[8, 8], false);
    assert_eq!(
        ask(&mut sessions, &params(Some("x")), "c", &[3], 2),
        Ok(vec![1, 5, 3])
    );
    // It is closed when its request has ended.
    assert_eq!(sessions.close("s"), None);
    let closing = ask(&mut sessions, &plain, "d", &[2], 3).unwrap_err();
    assert!(closing.contains("close was requested"), "{closing}");
    assert_eq!(answer(&mut sessions, "c", 2, &[1], true), Some(1));
    assert_eq!(sessions.len(), 0);
    sessions.open("s", true, None, Instant::now());
    for (change, word) in [
        (
            (|p: &mut SessionParams| p.replace = true) as fn(&mut SessionParams),
            "replace",
        ),
        (|p| p.drops_output = true, "drop_previous_output"),
        (|p| p.offset = 2, "offset"),
    ] {
        let mut asked = params(None);
        change(&mut asked);
        let refused = ask(&mut sessions, &asked, "a", &[1], 4).unwrap_err();
        assert!(
            refused.ends_with(&format!("do not support {word}.")),
            "{refused}"
        );
    }
}

#[test]
fn a_session_without_requests_is_closed() {
    let mut sessions = Sessions::default();
    let now = Instant::now();
    sessions.open("s", false, Some(Duration::from_secs(5)), now);
    sessions.open("t", false, None, now);
    assert!(sessions.reap(now + Duration::from_secs(5)).is_empty());
    let later = now + Duration::from_secs(4);
    sessions.begin(&params(None), &[1], None, later).unwrap();
    assert!(sessions.reap(later + Duration::from_secs(5)).is_empty());
    assert_eq!(sessions.reap(later + Duration::from_secs(6)), [1]);
    assert_eq!(sessions.len(), 1);
}

/// A turn of the model.
#[derive(Debug, Clone)]
struct Seen {
    rid: String,
    parent: Option<usize>,
    prompt: Vec<u32>,
    output: Vec<u32>,
    ended: bool,
    dropped: bool,
}

/// All turns, in their order.
#[derive(Debug, Default)]
struct Naive(Vec<Seen>);

impl Naive {
    fn find(&self, rid: &str) -> Option<usize> {
        self.0
            .iter()
            .position(|turn| turn.rid == rid && !turn.dropped)
    }

    fn comes_from(&self, mut turn: usize, root: usize) -> bool {
        while let Some(parent) = self.0[turn].parent {
            if parent == root {
                return true;
            }
            turn = parent;
        }
        false
    }

    /// What a request becomes, and the requests that it ends; None if it is refused.
    fn ask(
        &mut self,
        asked: &SessionParams,
        rid: &str,
        own: &[u32],
    ) -> Option<(Vec<u32>, BTreeSet<u64>)> {
        let parent = match &asked.rid {
            Some(rid) => Some(self.find(rid)?),
            None => None,
        };
        if parent.is_some_and(|at| !self.0[at].ended && !asked.replace) {
            return None;
        }
        let mut prompt = Vec::new();
        if let Some(at) = parent {
            prompt.extend_from_slice(&self.0[at].prompt);
            if !asked.drops_output {
                prompt.extend_from_slice(&self.0[at].output);
            }
            let len = prompt.len() as i64;
            let kept = match asked.offset {
                0 => len,
                offset if offset < 0 => (len + offset).max(0),
                offset => offset.min(len),
            };
            prompt.truncate(kept as usize);
        }
        let own = if parent.is_some() && own.first() == Some(&BOS) {
            &own[1..]
        } else {
            own
        };
        prompt.extend_from_slice(own);
        let mut ends = BTreeSet::new();
        if asked.replace {
            for at in 0..self.0.len() {
                let goes = parent.is_none_or(|root| self.comes_from(at, root));
                let turn = &mut self.0[at];
                if (goes && !turn.dropped) || parent == Some(at) {
                    if !turn.ended {
                        ends.insert(at as u64);
                    }
                    turn.ended = true;
                    turn.dropped = parent != Some(at);
                }
            }
        }
        self.0.push(Seen {
            rid: rid.to_owned(),
            parent,
            prompt: prompt.clone(),
            output: Vec::new(),
            ended: false,
            dropped: false,
        });
        Some((prompt, ends))
    }
}

#[derive(Debug, Clone)]
enum Step {
    /// Which earlier request it names, if any; its own tokens.
    Ask {
        parent: Option<usize>,
        offset: i64,
        replace: bool,
        drops_output: bool,
        own: Vec<u32>,
    },
    Take(usize, Vec<u32>),
    End(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tokens = prop::collection::vec(5..9u32, 0..4);
    let ask = (
        prop::option::of(0..30usize),
        prop_oneof![3 => Just(0i64), 1 => -6..6i64],
        prop::bool::weighted(0.2),
        any::<bool>(),
        tokens.clone(),
    )
        .prop_map(|(parent, offset, replace, drops_output, own)| Step::Ask {
            parent,
            offset,
            replace,
            drops_output,
            own,
        });
    let step = prop_oneof![
        ask,
        (0..30usize, tokens).prop_map(|(at, tokens)| Step::Take(at, tokens)),
        (0..30usize).prop_map(Step::End),
    ];
    prop::collection::vec(step, 0..40)
}

proptest! {
    #[test]
    fn any_tree_of_turns_is_as_the_list_says(steps in steps()) {
        let mut sessions = Sessions::default();
        sessions.open("s", false, None, Instant::now());
        let mut naive = Naive::default();
        for step in steps {
            match step {
                Step::Ask { parent, offset, replace, drops_output, own } => {
                    let request = naive.0.len() as u64;
                    let rid = format!("r{request}");
                    let asked = SessionParams {
                        id: "s".to_owned(),
                        rid: parent.map(|at| format!("r{at}")),
                        offset,
                        replace,
                        drops_output,
                    };
                    let expected = naive.ask(&asked, &rid, &own);
                    let begun = sessions.begin(&asked, &own, Some(BOS), Instant::now());
                    let found = begun.ok().map(|(prompt, begun)| {
                        let ends = sessions.start("s", &rid, begun, (prompt.clone(), request));
                        (prompt, ends.into_iter().collect())
                    });
                    prop_assert_eq!(found, expected);
                }
                Step::Take(at, tokens) => {
                    let Some(turn) = naive.0.get_mut(at) else { continue };
                    sessions.take("s", &turn.rid, at as u64, &tokens);
                    if !turn.ended {
                        turn.output.extend(tokens);
                    }
                }
                Step::End(at) => {
                    let Some(turn) = naive.0.get_mut(at) else { continue };
                    sessions.end("s", &turn.rid, at as u64, true);
                    turn.ended = true;
                }
            }
        }
    }
}
