//! Forward frames as the Pie runtime sends them, made in buffers that are used again.

use pie_wire::{AdapterBinding, Brle, ForwardRequest, Frame, Payload, Sampler, WireError};

use crate::answer::Asked;

/// What one context brings to a frame.
#[derive(Clone, Copy)]
pub(crate) struct Turn<'a> {
    pub(crate) context_id: u64,
    pub(crate) tokens: &'a [u32],
    /// The request of the frame before whose answer is the token; `tokens` only keeps its place.
    pub(crate) awaits: Option<usize>,
    /// Position, and KV index, of the first token.
    pub(crate) start: u32,
    /// Behind the tokens, to be verified.
    pub(crate) drafts: &'a [u32],
    /// Whether it asks for drafts.
    pub(crate) wants_drafts: bool,
    /// Every page up to the last token, or draft.
    pub(crate) pages: &'a [u32],
    /// For the last token; `None` to sample nothing.
    pub(crate) sampler: Option<&'a Sampler>,
}

impl<'a> Turn<'a> {
    /// A request without a token. With it the answer must be an archive, which has the driver's probes.
    pub(crate) const EMPTY: Self = Self {
        context_id: 0,
        tokens: &[],
        awaits: None,
        start: 1,
        drafts: &[],
        wants_drafts: false,
        pages: &[],
        sampler: None,
    };

    /// Position behind the last token.
    pub(crate) const fn end(&self) -> u32 {
        self.start + self.tokens.len() as u32
    }

    /// What it asks for.
    pub(crate) const fn asked(self) -> Asked<'a> {
        Asked {
            samples: self.sampler.is_some(),
            drafts: self.drafts,
            wants_drafts: self.wants_drafts,
            end: self.end(),
        }
    }
}

/// A token that is not known when its frame is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    /// Index among the frame's tokens.
    place: usize,
    /// The request of the frame before whose answer it is.
    request: usize,
}

/// Puts what the frame before was answered, a token for each request, into an encoded frame by `write`, which takes
/// offsets and bytes.
pub(crate) fn fill_gaps<E>(
    gaps: &[Gap],
    answered: &[u32],
    mut write: impl FnMut(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    // An archive begins with the first array of its schema: the tokens.
    gaps.iter().try_for_each(|gap| {
        let token = answered[gap.request].to_le_bytes();
        write(size_of::<u32>() * gap.place, &token)
    })
}

/// [`fill_gaps`] of a frame in memory.
#[cfg(test)]
pub(crate) fn fill(frame: &mut [u8], gaps: &[Gap], answered: &[u32]) {
    let write = |at: usize, token: &[u8]| {
        frame[at..at + token.len()].copy_from_slice(token);
        Ok::<_, std::convert::Infallible>(())
    };
    let Ok(()) = fill_gaps(gaps, answered, write);
}

/// What there is to know of a frame beside its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Outline {
    pub(crate) requests: usize,
    /// Requests with a sampler; they come first.
    pub(crate) sampled: usize,
    /// Input tokens, without drafts.
    pub(crate) tokens: usize,
    pub(crate) gaps: Vec<Gap>,
}

/// Builds frames one after the other.
pub(crate) struct FrameBuilder {
    frame: Frame,
    page_size: u32,
}

impl FrameBuilder {
    pub(crate) fn new(page_size: u32) -> Self {
        let body = ForwardRequest {
            image_pixel_indptr: vec![0],
            image_mrope_indptr: vec![0],
            audio_feature_indptr: vec![0],
            ..ForwardRequest::default()
        };
        let frame = Frame {
            driver_id: 0,
            payload: Payload::Forward(body),
        };
        Self { frame, page_size }
    }

    /// Writes the frame that was laid out last to `buffer` and returns its length.
    pub(crate) fn encode(&self, buffer: &mut [u8]) -> Result<usize, WireError> {
        pie_wire::encode_request(&self.frame, buffer)
    }

    /// Lays out the frame of `turns`; those that sample come first.
    pub(crate) fn lay_out<'a>(&mut self, turns: impl Iterator<Item = Turn<'a>> + Clone) -> Outline {
        let Payload::Forward(body) = &mut self.frame.payload else {
            unreachable!("made so by `new`");
        };
        clear(body);
        body.single_token_mode = turns.clone().all(|turn| turn.tokens.len() <= 1);
        // Mask rows are left out of the whole frame when every request has one token and no draft.
        let with_masks =
            !body.single_token_mode || turns.clone().any(|turn| !turn.drafts.is_empty());
        let mut gaps = Vec::new();
        for turn in turns {
            let place = body.token_ids.len();
            gaps.extend(turn.awaits.map(|request| Gap { place, request }));
            append(body, &turn, self.page_size, with_masks);
        }
        Outline {
            requests: body.context_ids.len(),
            sampled: body.samplers.len(),
            tokens: body.token_ids.len(),
            gaps,
        }
    }
}

fn clear(body: &mut ForwardRequest) {
    for array in [
        &mut body.token_ids,
        &mut body.position_ids,
        &mut body.kv_page_indices,
        &mut body.kv_last_page_lens,
        &mut body.sampling_indices,
        &mut body.spec_token_ids,
        &mut body.spec_position_ids,
    ] {
        array.clear();
    }
    body.masks.clear();
    body.samplers.clear();
    body.adapter_bindings.clear();
    body.output_spec_flags.clear();
    body.context_ids.clear();
    for indptr in indptrs(body) {
        indptr.clear();
        indptr.push(0);
    }
}

fn append(body: &mut ForwardRequest, turn: &Turn<'_>, page_size: u32, with_masks: bool) {
    let positions = turn.start..turn.end();
    body.token_ids.extend(turn.tokens);
    body.position_ids.extend(positions.clone());
    body.kv_page_indices.extend(turn.pages);
    body.kv_last_page_lens
        .push((turn.end() - 1) % page_size + 1);
    if with_masks {
        body.masks.extend(positions.map(|position| Brle {
            buffer: vec![0, position + 1],
            total_size: u64::from(position) + 1,
        }));
    }
    if let Some(sampler) = turn.sampler {
        body.sampling_indices.push(turn.tokens.len() as u32 - 1);
        body.samplers.push(sampler.clone());
    }
    body.adapter_bindings.push(AdapterBinding::NONE);
    body.spec_token_ids.extend(turn.drafts);
    body.spec_position_ids
        .extend(turn.end()..turn.end() + turn.drafts.len() as u32);
    body.output_spec_flags.push(turn.wants_drafts);
    body.context_ids.push(turn.context_id);
    let ends = [
        body.token_ids.len(),
        body.kv_page_indices.len(),
        body.masks.len(),
        body.samplers.len(),
        body.samplers.len(),
        0,
        body.spec_token_ids.len(),
        0,
        0,
    ];
    for (indptr, end) in indptrs(body).into_iter().zip(ends) {
        indptr.push(end as u32);
    }
}

/// The offsets of requests, in the order of the ends in [`append`].
fn indptrs(body: &mut ForwardRequest) -> [&mut Vec<u32>; 9] {
    [
        &mut body.qo_indptr,
        &mut body.kv_page_indptr,
        &mut body.mask_indptr,
        &mut body.sampling_indptr,
        &mut body.sampler_indptr,
        &mut body.logit_mask_indptr,
        &mut body.spec_indptr,
        &mut body.image_indptr,
        &mut body.audio_indptr,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(builder: &mut FrameBuilder, turns: &[Turn<'_>]) -> Vec<u8> {
        let mut buffer = vec![0; 1 << 16];
        builder.lay_out(turns.iter().copied());
        let length = builder.encode(&mut buffer).unwrap();
        buffer.truncate(length);
        buffer
    }

    /// An archive is read in place and must start at a multiple of 8.
    #[repr(align(8))]
    struct Aligned([u8; 2048]);

    fn decoded(bytes: &[u8]) -> ForwardRequest {
        let mut aligned = Aligned([0; 2048]);
        aligned.0[..bytes.len()].copy_from_slice(bytes);
        let frame = pie_wire::decode_request(&aligned.0[..bytes.len()]).unwrap();
        match frame.payload {
            Payload::Forward(body) => body,
            other => panic!("{other:?}"),
        }
    }

    /// The golden decode frame of the protocol's vectors, taken apart and made again, in a builder that has made a
    /// larger frame before.
    #[test]
    fn a_decode_frame_has_the_golden_bytes() {
        let golden = include_bytes!("../../../tests/data/wire/forward_decode.bin");
        let body = decoded(golden);
        let turns: Vec<Turn<'_>> = (0..body.context_ids.len())
            .map(|request| Turn {
                context_id: body.context_ids[request],
                tokens: &body.token_ids[request..=request],
                awaits: None,
                start: body.position_ids[request],
                drafts: &[],
                wants_drafts: false,
                pages: &body.kv_page_indices[2 * request..2 * request + 2],
                sampler: Some(&body.samplers[request]),
            })
            .collect();
        let mut builder = FrameBuilder::new(16);
        let prompt = Turn {
            tokens: &[1; 40],
            start: 0,
            pages: &[9, 8, 7],
            ..turns[0]
        };
        encoded(&mut builder, &[prompt, turns[0]]);
        assert_eq!(encoded(&mut builder, &turns), golden);
    }

    #[test]
    fn one_prompt_brings_the_mask_rows_back() {
        let sampler = Sampler::RawLogits;
        let decode = Turn {
            context_id: 5,
            tokens: &[30],
            start: 4,
            pages: &[2, 6],
            sampler: Some(&sampler),
            ..Turn::EMPTY
        };
        let prompt = Turn {
            context_id: 6,
            tokens: &[10, 11, 12],
            start: 0,
            pages: &[3],
            sampler: Some(&sampler),
            ..Turn::EMPTY
        };
        let body = decoded(&encoded(
            &mut FrameBuilder::new(4),
            &[decode, prompt, Turn::EMPTY],
        ));
        let rows: Vec<&[u32]> = body.masks.iter().map(|row| &row.buffer[..]).collect();
        assert_eq!(rows, [&[0, 5][..], &[0, 1], &[0, 2], &[0, 3]]);
        assert_eq!(body.mask_indptr, [0, 1, 4, 4]);
        assert!(!body.single_token_mode && !body.has_user_mask);
        assert_eq!(body.position_ids, [4, 0, 1, 2]);
        assert_eq!(body.kv_page_indices, [2, 6, 3]);
        assert_eq!(body.kv_page_indptr, [0, 2, 3, 3]);
        assert_eq!(body.kv_last_page_lens, [1, 3, 1]);
        assert_eq!(body.sampling_indices, [0, 2]);
        assert_eq!(body.sampler_indptr, [0, 1, 2, 2]);
        assert_eq!(body.sampling_indptr, body.sampler_indptr);
        assert_eq!(body.context_ids, [5, 6, 0]);

        let pair = Turn {
            tokens: &[10, 11],
            ..prompt
        };
        let body = decoded(&encoded(&mut FrameBuilder::new(4), &[pair]));
        assert!(!body.single_token_mode && body.masks.len() == 2);
    }

    #[test]
    fn a_frame_is_made_before_its_tokens_are_known() {
        let prompt = Turn {
            context_id: 5,
            tokens: &[10, 11, 12],
            start: 0,
            pages: &[3],
            sampler: Some(&Sampler::RawLogits),
            ..Turn::EMPTY
        };
        let decode = |token: &'static [u32], awaits| Turn {
            tokens: token,
            awaits,
            start: 7,
            ..prompt
        };
        let known = [decode(&[91], None), prompt, decode(&[92], None)];
        let awaiting = [decode(&[0], Some(3)), prompt, decode(&[0], Some(1))];
        let mut builder = FrameBuilder::new(4);
        let mut frame = encoded(&mut builder, &awaiting);
        let Outline {
            requests,
            sampled,
            tokens,
            gaps,
        } = builder.lay_out(awaiting.into_iter().chain([Turn::EMPTY]));
        assert_eq!((requests, sampled, tokens), (4, 3, 5));
        fill(&mut frame, &gaps, &[90, 92, 90, 91]);
        assert_eq!(frame, encoded(&mut builder, &known));
        assert_eq!(builder.lay_out(known.into_iter()).gaps, []);
    }

    /// The worked example of the protocol, beside a request that has no drafts.
    #[test]
    fn drafts_lie_behind_the_last_page_length() {
        let sampler = Sampler::RawLogits;
        let verifies = Turn {
            context_id: 5,
            tokens: &[30],
            awaits: None,
            start: 13,
            drafts: &[40, 41, 42, 43],
            wants_drafts: true,
            pages: &[2, 6],
            sampler: Some(&sampler),
        };
        let plain = Turn {
            context_id: 6,
            start: 15,
            drafts: &[],
            wants_drafts: false,
            pages: &[3],
            ..verifies
        };
        let mut builder = FrameBuilder::new(16);
        let body = decoded(&encoded(&mut builder, &[verifies, plain]));
        assert_eq!(body.spec_token_ids, [40, 41, 42, 43]);
        assert_eq!(body.spec_position_ids, [14, 15, 16, 17]);
        assert_eq!(body.spec_indptr, [0, 4, 4]);
        assert_eq!(body.output_spec_flags, [true, false]);
        assert_eq!(body.kv_last_page_lens, [14, 16]);
        assert_eq!(
            (&body.token_ids[..], &body.sampling_indices[..]),
            (&[30, 30][..], &[0, 0][..])
        );
        let rows: Vec<&[u32]> = body.masks.iter().map(|row| &row.buffer[..]).collect();
        assert_eq!(rows, [[0, 14], [0, 16]]);
        assert!(body.single_token_mode);

        let body = decoded(&encoded(&mut builder, &[plain]));
        assert!(body.masks.is_empty() && body.spec_token_ids.is_empty());
        assert_eq!(body.spec_indptr, [0, 0]);
    }
}
