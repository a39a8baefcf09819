//! Answers as the messages of a contract.

/// Defines `Words`, which makes messages of answers. The messages of both contracts have the same names, and are different types; a
/// contract may have one field more in its response, and one in the log-probabilities of an output.
macro_rules! answer_messages {
    (
        $(response { $response:ident: $value:expr })?
        $(output { $given:ident })?
    ) => {
        #[derive(Debug)]
        pub(crate) struct Words;

        impl Wording for Words {
            type Message = GenerateResponse;

            #[allow(
                clippy::needless_update,
                reason = "the messages of one contract have further fields"
            )]
            fn say(answer: Answer, prompt_tokens: u32) -> GenerateResponse {
                let response = match answer {
                    Answer::Tokens {
                        sample,
                        tokens,
                        counts,
                        scores,
                    } => Message::Chunk(GenerateStreamChunk {
                        token_ids: tokens,
                        prompt_tokens,
                        completion_tokens: counts.tokens,
                        cached_tokens: counts.cached,
                        index: sample,
                        output_logprobs: scores.output.map(output),
                        input_logprobs: scores.input.map(input),
                        ..Default::default()
                    }),
                    Answer::End {
                        sample,
                        tokens,
                        counts,
                        scores,
                        reason,
                        matched,
                    } => Message::Complete(GenerateComplete {
                        output_ids: tokens,
                        finish_reason: reason.to_owned(),
                        prompt_tokens,
                        completion_tokens: counts.tokens,
                        cached_tokens: counts.cached,
                        index: sample,
                        output_logprobs: scores.output.map(output),
                        input_logprobs: scores.input.map(input),
                        matched_stop: match matched {
                            Matched::Nothing => None,
                            Matched::Token(token) => Some(MatchedStop::MatchedTokenId(token)),
                            Matched::Text(text) => Some(MatchedStop::MatchedStopStr(text)),
                        },
                        ..Default::default()
                    }),
                };
                GenerateResponse {
                    $( $response: $value, )?
                    response: Some(response),
                }
            }
        }

        fn output(rows: Rows) -> OutputLogProbs {
            OutputLogProbs {
                token_logprobs: rows.values,
                token_ids: rows.ids,
                top_logprobs: rows.top.into_iter().map(tokens).collect(),
                $( $given: rows.given.into_iter().map(tokens).collect(), )?
            }
        }

        /// Nothing comes before the first token of a prompt.
        fn input(rows: Rows) -> InputLogProbs {
            let none = (!rows.top.is_empty()).then(TopLogProbs::default);
            let values = rows.values.into_iter().map(Some);
            InputLogProbs {
                token_logprobs: once(None)
                    .chain(values)
                    .map(|value| InputTokenLogProb { value })
                    .collect(),
                token_ids: rows.ids,
                top_logprobs: none
                    .into_iter()
                    .chain(rows.top.into_iter().map(tokens))
                    .collect(),
            }
        }

        fn tokens(row: Row) -> TopLogProbs {
            TopLogProbs {
                values: row.values,
                token_ids: row.ids,
            }
        }
    };
}

pub(crate) use answer_messages;
