//! Responses, decoded.

use std::ops::Range;

use pie_wire::{ForwardResponse, Reply, ResponsePayload, decode_reply};

use crate::common::device::DRIVER;

/// A reply as the runtime reads it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Answer {
    /// The fast token reply.
    Fast(Vec<u32>),
    /// An archive.
    Archive(Box<ForwardResponse>),
}

/// What one request gets back: each kind in the order of its samplers, floats as their bits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Returned {
    pub(crate) tokens: Vec<u32>,
    /// Ids and probabilities.
    pub(crate) dists: Vec<(Vec<u32>, Vec<u32>)>,
    pub(crate) logits: Vec<Vec<u32>>,
    pub(crate) logprobs: Vec<Vec<u32>>,
    pub(crate) entropies: Vec<u32>,
}

impl Returned {
    pub(crate) fn is_one_token(&self) -> bool {
        let tokens = vec![self.tokens.first().copied().unwrap_or(0)];
        *self
            == Self {
                tokens,
                ..Self::default()
            }
    }
}

impl Answer {
    /// The outputs of each request.
    pub(crate) fn outputs(&self) -> Vec<Returned> {
        match self {
            Self::Fast(tokens) => tokens
                .iter()
                .map(|&token| Returned {
                    tokens: vec![token],
                    ..Returned::default()
                })
                .collect(),
            Self::Archive(response) => (0..response.num_requests as usize)
                .map(|request| read(response, request))
                .collect(),
        }
    }

    /// The tokens of each request.
    pub(crate) fn tokens(&self) -> Vec<Vec<u32>> {
        let outputs = self.outputs().into_iter();
        outputs.map(|returned| returned.tokens).collect()
    }

    /// How many drafts there are.
    pub(crate) fn drafts(&self) -> usize {
        match self {
            Self::Fast(_) => 0,
            Self::Archive(response) => response.spec_tokens.len(),
        }
    }

    pub(crate) fn is_fast(&self) -> bool {
        matches!(self, Self::Fast(_))
    }

    pub(crate) fn archive(&self) -> &ForwardResponse {
        match self {
            Self::Archive(response) => response,
            Self::Fast(_) => panic!("a fast reply"),
        }
    }
}

/// Reads the outputs of one request as the runtime walks them: offsets per request lead to entries, offsets per entry to
/// values.
pub(crate) fn read(response: &ForwardResponse, request: usize) -> Returned {
    fn part(offsets: &[u32], index: usize) -> Range<usize> {
        if offsets.is_empty() {
            return 0..0;
        }
        offsets[index] as usize..offsets[index + 1] as usize
    }
    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }
    let r = response;
    let entries = |requests: &[u32], entries: &[u32]| -> Vec<Range<usize>> {
        let own = part(requests, request);
        own.map(|entry| part(entries, entry)).collect()
    };
    let dists = entries(&r.dists_req_indptr, &r.dists_kv_indptr).into_iter();
    let logits = entries(&r.logits_req_indptr, &r.logits_byte_indptr).into_iter();
    let logprobs = entries(&r.logprobs_req_indptr, &r.logprobs_val_indptr).into_iter();
    let words = |bytes: &[u8]| {
        let (words, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "logits are whole words");
        words.iter().map(|&word| u32::from_le_bytes(word)).collect()
    };
    Returned {
        tokens: r.tokens[part(&r.tokens_indptr, request)].to_vec(),
        dists: dists
            .map(|own| (r.dists_ids[own.clone()].to_vec(), bits(&r.dists_probs[own])))
            .collect(),
        logits: logits.map(|own| words(&r.logits_bytes[own])).collect(),
        logprobs: logprobs.map(|own| bits(&r.logprobs_values[own])).collect(),
        entropies: bits(&r.entropies[part(&r.entropies_indptr, request)]),
    }
}

/// Reads a reply; `bytes` must be aligned.
pub(crate) fn answer(bytes: &[u8]) -> Answer {
    match decode_reply(bytes).expect("the reply is valid") {
        Reply::Tokens(tokens) => {
            assert_eq!(tokens.driver_id(), DRIVER);
            Answer::Fast(tokens.iter().collect())
        }
        Reply::Frame(_) => {
            let frame = pie_wire::decode_response(bytes).expect("the archive is valid");
            assert_eq!(frame.driver_id, DRIVER);
            assert!(!frame.aborted);
            match frame.payload {
                ResponsePayload::Forward(response) => Answer::Archive(Box::new(response)),
                ResponsePayload::Status(status) => panic!("{status:?} instead of a forward"),
            }
        }
    }
}

/// The rules that the runtime relies on without checking.
pub(crate) fn check_archive(response: &ForwardResponse, requests: usize) {
    assert_eq!(response.num_requests as usize, requests);
    response.check().expect("a response that keeps the rules");
    if requests > 0 {
        assert_eq!(response.tokens_indptr.len(), requests + 1);
    }
    if !response.spec_indptr.is_empty() {
        assert_eq!(response.spec_indptr.len(), requests + 1);
        assert!(!response.spec_tokens.is_empty());
        // Drafts continue tokens.
        let ends = response.spec_indptr.windows(2);
        for (drafts, tokens) in ends.zip(response.tokens_indptr.windows(2)) {
            assert!(drafts[0] == drafts[1] || tokens[0] < tokens[1]);
        }
    }
}
