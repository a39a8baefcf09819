//! Log-probabilities that a frame's extension asks for: what of them is staged, and answered.

use std::collections::{BTreeMap, HashMap};

use pie_planner::{LogprobPosition, SlotClass, StagedGroup};
use pie_wire::{
    ForwardRequest, LogprobOptions, LogprobShape, RequestExtension, ResponseExtension,
    append_extension, extension_len,
};

use crate::common::builder::Encoded;
use crate::common::device::{DRIVER, Noise};
use crate::common::naive::{Plan, Slot};

/// The log-probabilities of one request: positions of the prompt, and of tokens, each as its words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    pub(crate) prompt: Vec<Vec<u32>>,
    pub(crate) tokens: Vec<Vec<u32>>,
}

/// What a device knows of positions.
#[derive(Debug, Default)]
pub(crate) struct Logprobs {
    /// What the requests of the next frame ask for.
    pub(crate) asked: HashMap<usize, LogprobOptions>,
    /// The words that positions were given.
    given: HashMap<(usize, bool, usize), Vec<u32>>,
    noise: Noise,
}

/// A frame, and after it what its requests ask for.
pub(crate) fn encode(frame: &ForwardRequest, asked: &HashMap<usize, LogprobOptions>) -> Vec<u8> {
    let mut rows: Vec<_> = asked
        .iter()
        .map(|(&request, asked)| {
            let row = RequestExtension {
                logprobs: Some(asked.clone()),
                ..RequestExtension::default()
            };
            (request as u32, row)
        })
        .collect();
    rows.sort_unstable_by_key(|row| row.0);
    let listed = rows.iter().map(|(request, row)| (*request, row));
    let mut bytes = Encoded::new(DRIVER, frame).bytes().to_vec();
    let length = bytes.len();
    bytes.resize(length + extension_len(listed.clone()), 0);
    append_extension(listed, &mut bytes, length).expect("there is room");
    bytes
}

fn shape(asked: &LogprobOptions) -> LogprobShape {
    LogprobShape {
        top: asked.top,
        given: asked.token_ids.len() as u32,
        hidden: asked.hidden,
    }
}

impl Logprobs {
    /// Begins a frame.
    pub(crate) fn clear(&mut self) {
        self.given.clear();
    }

    /// Compares what is staged of a group, and gives each of its positions any words.
    pub(crate) fn give(
        &mut self,
        open: &StagedGroup,
        plan: &Plan,
        group: &[(usize, Slot)],
    ) -> Vec<i32> {
        let (mut positions, mut tokens) = (Vec::<LogprobPosition>::new(), Vec::new());
        let mut all = Vec::new();
        for (entry, (_, slot)) in group.iter().enumerate() {
            let Some(asked) = plan.asked_of(slot) else {
                continue;
            };
            let is_prompt = slot.class == SlotClass::Prompt;
            let given = asked.token_ids.iter();
            tokens.extend(given.map(|&token| [positions.len() as i64, i64::from(token)]));
            positions.push([
                entry as i64,
                if is_prompt {
                    i64::from(slot.labels[0])
                } else {
                    -1
                },
                i64::from(asked.top),
                i64::from(asked.scaled && !is_prompt),
                i64::from(asked.hidden),
            ]);
            let words: Vec<u32> = (0..shape(asked).words())
                .map(|_| self.noise.next())
                .collect();
            all.extend(words.iter().map(|word| word.cast_signed()));
            self.given.insert(key(slot), words);
        }
        assert_eq!(open.logprob_positions(), (&positions[..], &tokens[..]));
        all
    }

    /// What the answer must have, by request; `tokens` are those that each returns.
    pub(crate) fn expected(&self, plan: &Plan, tokens: &[Vec<u32>]) -> BTreeMap<u32, TokenCounts> {
        let mut expected = BTreeMap::new();
        for (index, (request, tokens)) in plan.requests.iter().zip(tokens).enumerate() {
            let of = |prompt: bool| {
                let slots = request.slots.iter().filter(move |slot| {
                    plan.asked_of(slot).is_some() && (slot.class == SlotClass::Prompt) == prompt
                });
                slots.map(|slot| self.given[&key(slot)].clone())
            };
            let answered = TokenCounts {
                prompt: of(true).collect(),
                tokens: of(false).take(tokens.len()).collect(),
            };
            if answered != TokenCounts::default() {
                expected.insert(index as u32, answered);
            }
        }
        expected
    }
}

/// What an answer has, by request; and that all of its positions are of the shape that was asked for.
pub(crate) fn read(extension: &ResponseExtension<'_>, plan: &Plan) -> BTreeMap<u32, TokenCounts> {
    let rows = extension.rows();
    rows.map(|row| {
        let asked = plan.requests[row.request() as usize].asked.as_ref();
        let asked = asked.expect("a request that asks for log-probabilities");
        let shape = shape(asked);
        assert_eq!(row.shape(), shape);
        let words: Vec<u32> = row.words().collect();
        let positions = words.chunks_exact(shape.words()).map(<[u32]>::to_vec);
        let (prompt, tokens) = row.position_counts();
        let prompt_positions = positions.clone().take(prompt as usize).collect();
        let others: Vec<_> = positions.skip(prompt as usize).collect();
        assert_eq!(others.len(), tokens as usize);
        let answered = TokenCounts {
            prompt: prompt_positions,
            tokens: others,
        };
        (row.request(), answered)
    })
    .collect()
}

/// Logprobs of a prompt are numbered apart from those of tokens.
fn key(slot: &Slot) -> (usize, bool, usize) {
    (slot.request, slot.class == SlotClass::Prompt, slot.number)
}
