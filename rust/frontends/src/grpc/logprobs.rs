//! Log-probabilities, from the runtime's words to rows, in the words of neither contract.

use pie_ingress::{LogprobRows, Refusal};

/// Which log-probabilities of a request are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogprobSides {
    /// Most probable tokens of a position of the prompt, and of one of the output, where these differ; at least one of them is what the
    /// runtime is asked for.
    pub(crate) tops: Option<(u32, u32)>,
    /// Those of the output are not sent.
    pub(crate) only_prompt: bool,
}

/// A number of most probable tokens.
pub(crate) fn top(field: &'static str, value: i32) -> Result<u32, Refusal> {
    u32::try_from(value).map_err(|_| Refusal::Range {
        field,
        value: value.to_string(),
        wanted: "0 or more: send how many of the most probable tokens you want".to_owned(),
    })
}

/// What comes with the tokens of a part.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    /// Of the prompt; `None` where they were sent before, or the prompt is not computed.
    pub(crate) prompt: Option<Vec<u32>>,
    /// Of the part's tokens.
    pub(crate) tokens: Vec<u32>,
    /// The token that would come first, of a request that wants none.
    pub(crate) scored: Option<u32>,
}

/// Those of an open request.
#[derive(Debug)]
pub(crate) struct Reader {
    rows: LogprobRows,
    tops: (u32, u32),
    of_output: bool,
}

/// What a part says.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct OutputLogprobs {
    /// Of the prompt's tokens: the first one has a number and no values.
    pub(crate) input: Option<Rows>,
    pub(crate) output: Option<Rows>,
}

/// Of tokens one after the other.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Rows {
    pub(crate) ids: Vec<u32>,
    pub(crate) values: Vec<f32>,
    /// The most probable tokens of each position; none where they are not wanted.
    pub(crate) top: Vec<Row>,
    /// The tokens that were given, of each position; none where they are not wanted.
    pub(crate) given: Vec<Row>,
}

/// Some tokens of one position.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Row {
    pub(crate) ids: Vec<u32>,
    pub(crate) values: Vec<f32>,
}

impl Reader {
    pub(crate) fn new(rows: LogprobRows, sides: LogprobSides) -> Self {
        let top = rows.params().top_logprobs_num;
        Self {
            rows,
            tops: sides.tops.unwrap_or((top, top)),
            of_output: !sides.only_prompt,
        }
    }

    /// What the words of a part with these tokens mean.
    pub(crate) fn read(&self, tokens: &[u32], words: &Words) -> OutputLogprobs {
        let tokens = LogprobRows::of_output(tokens, words.scored.as_ref());
        let prompt = self.rows.prompt();
        let input = words.prompt.as_ref().filter(|_| !prompt.is_empty());
        OutputLogprobs {
            input: input.map(|words| Rows {
                ids: prompt.to_vec(),
                ..self.rows(&prompt[1..], words, self.tops.0)
            }),
            output: self
                .of_output
                .then(|| self.rows(tokens, &words.tokens, self.tops.1)),
        }
    }

    fn rows(&self, tokens: &[u32], words: &[u32], top: u32) -> Rows {
        let params = self.rows.params();
        let mut rows = Rows::default();
        for (position, &token) in params.shape().positions(words).zip(tokens) {
            rows.ids.push(token);
            rows.values.push(position.token);
            if top > 0 {
                let (ids, values) = position.top.into_iter().take(top as usize).unzip();
                rows.top.push(Row { ids, values });
            }
            if !position.given.is_empty() {
                let (ids, values) = (params.token_ids_logprob.clone(), position.given);
                rows.given.push(Row { ids, values });
            }
        }
        rows
    }
}

#[cfg(test)]
mod tests {
    use pie_engine::LogprobParams;

    use super::*;

    fn words(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn each_side_has_as_many_as_it_wants() {
        let params = LogprobParams {
            hidden: 0,
            top_logprobs_num: 2,
            token_ids_logprob: vec![9],
            logprob_start_len: Some(1),
            original: false,
        };
        let sides = LogprobSides {
            tops: Some((1, 2)),
            only_prompt: false,
        };
        let reader = Reader::new(LogprobRows::new(params, &[4, 5, 6]), sides);
        // Its own, the two best with theirs, the one that was given.
        let position = |first: f32| {
            let mut position = words(&[first, 0.0, 0.0, first + 1.0, first + 2.0, first + 3.0]);
            position[1..3].copy_from_slice(&[7, 8]);
            position
        };
        let part = Words {
            prompt: Some(position(10.0)),
            tokens: [position(20.0), position(30.0)].concat(),
            scored: None,
        };
        let row = |ids: &[u32], values: &[f32]| Row {
            ids: ids.to_vec(),
            values: values.to_vec(),
        };
        let found = reader.read(&[50, 51], &part);
        let input = Rows {
            ids: vec![5, 6],
            values: vec![10.0],
            top: vec![row(&[7], &[11.0])],
            given: vec![row(&[9], &[13.0])],
        };
        assert_eq!(found.input, Some(input));
        let output = found.output.unwrap();
        assert_eq!(
            (&output.ids[..], &output.values[..]),
            (&[50, 51][..], &[20.0, 30.0][..])
        );
        assert_eq!(output.top[1], row(&[7, 8], &[31.0, 32.0]));
        assert_eq!(output.given[1], row(&[9], &[33.0]));
        // Later parts have nothing of the prompt.
        let later = Words {
            prompt: None,
            ..part
        };
        assert_eq!(reader.read(&[50, 51], &later).input, None);
    }

    #[test]
    fn a_request_for_no_token_has_one_row() {
        let rows = LogprobRows::new(LogprobParams::default(), &[4]);
        let reader = Reader::new(rows, LogprobSides::default());
        let part = Words {
            prompt: Some(Vec::new()),
            tokens: words(&[-1.5]),
            scored: Some(77),
        };
        let found = reader.read(&[], &part);
        assert_eq!(found.input, None);
        let output = found.output.unwrap();
        assert_eq!((output.ids, output.values), (vec![77], vec![-1.5]));
    }
}
