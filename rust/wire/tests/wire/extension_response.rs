//! The extension of a response: log-probabilities.

use pie_wire::{LogprobRows, LogprobShape, Logprobs};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::extension::float;

/// A request's positions, of its prompt and of its tokens, in owned values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    pub(crate) request: u32,
    pub(crate) shape: LogprobShape,
    pub(crate) prompt: Vec<Logprobs>,
    pub(crate) tokens: Vec<Logprobs>,
}

impl Row {
    pub(crate) fn words(&self) -> Vec<u32> {
        let positions = self.prompt.iter().chain(&self.tokens);
        let words = positions.flat_map(|position| {
            let ids = position.top.iter().map(|&(id, _)| id);
            let values = position.top.iter().map(|&(_, value)| value);
            let values = values.chain(position.given.iter().copied());
            let bits = values.map(f32::to_bits);
            [position.token.to_bits()]
                .into_iter()
                .chain(ids)
                .chain(bits)
        });
        words.collect()
    }
}

pub(crate) fn written(rows: &[Row]) -> LogprobRows {
    let mut written = LogprobRows::default();
    for row in rows {
        let positions = (row.prompt.len() as u32, row.tokens.len() as u32);
        written.push(row.request, row.shape, positions, row.words());
    }
    written
}

pub(crate) fn read(extension: &pie_wire::ResponseExtension<'_>) -> Vec<Row> {
    let rows = extension.rows();
    rows.map(|row| {
        let words: Vec<u32> = row.words().collect();
        let mut positions = row.shape().positions(&words);
        let (prompt, tokens) = row.position_counts();
        let prompt = positions.by_ref().take(prompt as usize).collect();
        assert_eq!(positions.len(), tokens as usize);
        Row {
            request: row.request(),
            shape: row.shape(),
            prompt,
            tokens: positions.collect(),
        }
    })
    .collect()
}

pub(crate) fn answer_rows() -> impl Strategy<Value = Vec<Row>> {
    let position = |top, given| {
        (
            float(),
            vec((any::<u32>(), float()), top),
            vec(float(), given),
        )
            .prop_map(|(token, top, given)| Logprobs { token, top, given })
    };
    let row = (0..4_usize, 0..4_usize, 0..3_usize, 0..3_usize).prop_flat_map(
        move |(top, given, prompt, tokens)| {
            let shape = LogprobShape {
                top: top as u32,
                given: given as u32,
                hidden: 0,
            };
            (
                Just(shape),
                vec(position(top, given), prompt),
                vec(position(top, given), tokens),
            )
        },
    );
    vec((1..9_u32, row), 0..4).prop_map(|rows| {
        let mut request = 0;
        let row = |(more, (shape, prompt, tokens))| {
            request += more;
            Row {
                request,
                shape,
                prompt,
                tokens,
            }
        };
        rows.into_iter().map(row).collect()
    })
}

#[test]
fn the_bytes_of_an_answer_are_as_documented() {
    let row = Row {
        request: 2,
        shape: LogprobShape {
            top: 1,
            given: 2,
            hidden: 0,
        },
        prompt: Vec::new(),
        tokens: vec![Logprobs {
            token: -0.5,
            top: vec![(9, -0.25)],
            given: vec![-1.0, -2.0],
        }],
    };
    let mut bytes = vec![0; written(std::slice::from_ref(&row)).bytes()];
    let length = written(&[row]).append(&mut bytes, 0).unwrap();
    let (words, _) = bytes[..length].as_chunks();
    let words: Vec<u32> = words.iter().map(|&word| u32::from_le_bytes(word)).collect();
    let values = [0xBF00_0000, 9, 0xBE80_0000, 0xBF80_0000, 0xC000_0000];
    let expected = [
        &[2, 0, 1, 1, 2, 0],
        &values[..],
        &[1, 5, 0x5845_4950, 0x3250_5254],
    ];
    assert_eq!(words, expected.concat());
}

#[test]
fn a_position_has_its_hidden_state_last() {
    let shape = LogprobShape {
        top: 1,
        given: 1,
        hidden: 2,
    };
    let words = [1, 2, 3, 4, 50, 60, 5, 6, 7, 8, 70, 80];
    let states: Vec<&[u32]> = shape.hidden_states(&words).collect();
    assert_eq!(states, [&[50, 60][..], &[70, 80]]);
    let given: Vec<usize> = shape.positions(&words).map(|at| at.given.len()).collect();
    assert_eq!((shape.words(), given), (6, vec![1, 1]));
}
