//! Log-probabilities by both contracts: every row is what the driver has said of it.

use pie_engine::LogprobShape;
use pie_frontends::grpc::Contract;
use pie_frontends::grpc::contract::sglang;
use pie_frontends::grpc::contract::sglang::generate_response::Response;

use crate::bench::{self, Bench, collect_one, expected, prompt, run};
use crate::{driver, sglang as by_sglang};

/// What one position has: its own, the most probable tokens, those of the given ones.
type Position = (f32, Vec<u32>, Vec<f32>, Vec<f32>);

/// The positions of the tokens of `text` from `first` on.
fn positions(text: &[u32], first: usize, top: u32, given: &[u32]) -> Vec<Position> {
    let shape = LogprobShape {
        top,
        given: given.len() as u32,
        hidden: 0,
    };
    let words = (first..text.len())
        .flat_map(|at| driver::position_words(&text[..at], text[at], top, given));
    let words: Vec<u32> = words.collect();
    let found = shape.positions(&words).map(|position| {
        let (ids, values) = position.top.into_iter().unzip();
        (position.token, ids, values, position.given)
    });
    found.collect()
}

#[test]
fn the_contract_of_vllm_has_its_numbers_for_each_side() {
    run(async {
        let bench = Bench::new("serve", Contract::Vllm);
        let mut client = bench.vllm().await;
        let prompt = prompt(5);
        let mut asked = bench::request("a", &prompt, 6);
        let params = asked.sampling_params.as_mut().unwrap();
        (params.logprobs, params.prompt_logprobs) = (Some(3), Some(1));
        let stream = client.generate(asked.clone()).await.unwrap();
        let story = collect_one(&mut stream.into_inner()).await;
        let text = [&prompt[..], &expected(&prompt, 6)].concat();
        let end = story.end();
        let found = end.output_logprobs.as_ref().unwrap();
        let wanted = positions(&text, prompt.len(), 3, &[]);
        assert_eq!(found.token_ids, story.tokens);
        for (at, (own, ids, values, _)) in wanted.iter().enumerate() {
            assert_eq!(found.token_logprobs[at].to_bits(), own.to_bits());
            assert_eq!(found.top_logprobs[at].token_ids, *ids);
            assert_eq!(found.top_logprobs[at].values, *values);
        }
        let found = end.input_logprobs.as_ref().unwrap();
        assert_eq!(found.token_ids, prompt);
        assert_eq!(found.token_logprobs[0].value, None);
        assert!(found.top_logprobs[0].token_ids.is_empty());
        for (at, (own, ids, values, _)) in positions(&text[..prompt.len()], 1, 3, &[])
            .iter()
            .enumerate()
        {
            assert_eq!(found.token_logprobs[at + 1].value, Some(*own));
            assert_eq!(found.top_logprobs[at + 1].token_ids, ids[..1]);
            assert_eq!(found.top_logprobs[at + 1].values, values[..1]);
        }
        // Those of the prompt alone.
        asked.request_id = "b".to_owned();
        asked.sampling_params.as_mut().unwrap().logprobs = None;
        let stream = client.generate(asked.clone()).await.unwrap();
        let story = collect_one(&mut stream.into_inner()).await;
        assert_eq!(story.end().output_logprobs, None);
        assert!(story.end().input_logprobs.is_some());
        asked.sampling_params.as_mut().unwrap().prompt_logprobs = Some(-1);
        let refused = client.generate(asked).await.unwrap_err();
        assert!(
            refused
                .message()
                .contains("prompt_logprobs is -1, it must be 0 or more"),
            "{refused}"
        );
    });
}

#[test]
fn parts_of_a_stream_have_the_rows_of_their_tokens() {
    run(async {
        let bench = Bench::new("serve", Contract::Sglang);
        let mut client = by_sglang::client(&bench).await;
        let prompt = prompt(7);
        let mut asked = by_sglang::request("a", &prompt, 6);
        asked.return_logprob = true;
        asked.top_logprobs_num = 2;
        asked.token_ids_logprob = vec![4, 9];
        asked.logprob_start_len = prompt.len() as i32 - 2;
        let text = [&prompt[..], &expected(&prompt, 6)].concat();
        let wanted = positions(&text, prompt.len(), 2, &[4, 9]);
        let mut stream = client.generate(asked.clone()).await.unwrap().into_inner();
        let (mut rows, mut inputs, mut parts) = (Vec::new(), Vec::new(), 0);
        while let Some(message) = stream.message().await.unwrap() {
            match message.response.unwrap() {
                Response::Chunk(chunk) => {
                    let found = chunk.output_logprobs.unwrap();
                    assert_eq!(found.token_ids, chunk.token_ids);
                    rows.extend(rows_of(&found));
                    assert_eq!(chunk.input_logprobs.is_some(), parts == 0);
                    inputs.extend(chunk.input_logprobs);
                    parts += 1;
                }
                Response::Complete(complete) => {
                    assert_eq!(rows_of(&complete.output_logprobs.unwrap()), wanted);
                    inputs.extend(complete.input_logprobs);
                }
            }
        }
        assert_eq!(rows, wanted);
        let [first, last] = &inputs[..] else {
            panic!("{inputs:?}")
        };
        assert_eq!(first, last);
        assert_eq!(first.token_ids, prompt[prompt.len() - 2..]);
        let [(own, ..)] = &positions(&text[..prompt.len()], prompt.len() - 1, 2, &[4, 9])[..]
        else {
            panic!("one position")
        };
        let values: Vec<Option<f32>> = first.token_logprobs.iter().map(|one| one.value).collect();
        assert_eq!(values, [None, Some(*own)]);

        // No token is wanted: one row says what would come.
        let mut asked = sglang::GenerateRequest {
            request_id: "b".to_owned(),
            logprob_start_len: -1,
            ..asked
        };
        asked.sampling_params.as_mut().unwrap().max_new_tokens = Some(0);
        let mut stream = client.generate(asked.clone()).await.unwrap().into_inner();
        let message = stream.message().await.unwrap().unwrap();
        let Some(Response::Complete(complete)) = message.response else {
            panic!("{message:?}")
        };
        assert!(complete.output_ids.is_empty());
        assert_eq!(rows_of(&complete.output_logprobs.unwrap()), wanted[..1]);

        asked.token_ids_logprob = vec![driver::VOCABULARY];
        let refused = client.generate(asked).await.unwrap_err();
        assert!(refused.message().contains("token_ids_logprob"), "{refused}");
    });
}

fn rows_of(found: &sglang::OutputLogProbs) -> Vec<Position> {
    let rows = found.token_logprobs.iter().enumerate();
    rows.map(|(at, &own)| {
        let (top, given) = (&found.top_logprobs[at], &found.token_ids_logprobs[at]);
        assert_eq!(given.token_ids, [4, 9]);
        (
            own,
            top.token_ids.clone(),
            top.values.clone(),
            given.values.clone(),
        )
    })
    .collect()
}
