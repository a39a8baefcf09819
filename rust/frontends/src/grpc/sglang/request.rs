//! From a message to what it asks for.

use pie_engine::{Grammar, PromptImages};
use pie_ingress::{Ingress, RawLogprobs, RawRequest, Refusal};
use tonic::Status;

use crate::grpc::contract::sglang::sampling_params::Constraint;
use crate::grpc::contract::sglang::{
    GenerateRequest, MultimodalInputs, SamplingParams, TensorData,
};
use crate::grpc::generate_params::GenerateParams;
use crate::grpc::logprobs::LogprobSides;
use crate::grpc::media::{self, Media, Tensor};
use crate::grpc::queue::StreamInterval;
use crate::grpc::settings::VisionInfo;
use crate::grpc::status::refused;
use crate::grpc::unsupported::{SPLIT, or_one, refuse};

pub(crate) fn parse(
    mut request: GenerateRequest,
    vision: Option<VisionInfo>,
    ingress: &Ingress,
) -> Result<GenerateParams, Status> {
    let params = request.sampling_params.take().unwrap_or_default();
    refuse_unsupported(&request, &params)?;
    let interval = stream_interval(&params)?;
    let bias = |(token, &bias): (&String, &f32)| {
        let token = ingress.token_of_text("logit_bias", token)?;
        Ok((token, bias))
    };
    let logit_bias: Result<Vec<_>, Refusal> = params.logit_bias.iter().map(bias).collect();
    let logit_bias = logit_bias.map_err(|refusal| refused(&refusal))?;
    let logprobs = logprobs(&request);
    let mut prompt = request.tokenized.take().unwrap_or_default().input_ids;
    let inputs = request.mm_inputs.as_ref();
    let images = inputs.map(|inputs| read_images(inputs, vision, prompt.len()));
    let mut images = images.transpose()?;
    if !request.input_embeds.is_empty() {
        let embeds = read_embeds(&request.input_embeds, images.as_ref(), ingress)?;
        // Tokens, if there are any, are ignored, as with SGLang.
        prompt = vec![0; embeds.tokens() as usize];
        images = Some(embeds);
    }
    let raw = RawRequest {
        sampling: sampling(&params),
        logit_bias,
        logprobs,
        images,
        max_new_tokens: params.max_new_tokens.map(i64::from),
        min_new_tokens: params.min_new_tokens.into(),
        n: params.n.max(1).into(),
        stop_token_ids: params.stop_token_ids.into_iter().map(i64::from).collect(),
        stop: params.stop,
        ignore_eos: params.ignore_eos,
        grammar: params.constraint.map(grammar),
        streams: request.stream,
        ..RawRequest::new(request.request_id, prompt)
    };
    let interval = StreamInterval {
        streams: request.stream,
        interval,
    };
    let sides = LogprobSides::default();
    Ok(GenerateParams {
        raw,
        interval,
        sides,
    })
}

/// Refuses by name what the runtime does not serve.
fn refuse_unsupported(request: &GenerateRequest, params: &SamplingParams) -> Result<(), Status> {
    refuse(&[
        (
            "disaggregated_params",
            request.disaggregated_params.is_some(),
            SPLIT,
        ),
        (
            "custom_logit_processor",
            !request.custom_logit_processor.is_empty(),
            "it is a Python object",
        ),
        (
            "custom_params",
            params.custom_params.iter().any(|bytes| !bytes.is_empty()),
            "they are for a custom logit processor",
        ),
        (
            "lora_id",
            !request.lora_id.is_empty(),
            "this server loads no adapters",
        ),
        (
            "data_parallel_rank",
            request.data_parallel_rank > 0,
            "each replica has a port of its own",
        ),
        (
            "return_hidden_states",
            request.return_hidden_states,
            "hidden states stay in the driver",
        ),
    ])
}

fn stream_interval(params: &SamplingParams) -> Result<u32, Status> {
    u32::try_from(params.stream_interval.unwrap_or(1))
        .ok()
        .filter(|&interval| interval > 0)
        .ok_or_else(|| {
            Status::invalid_argument("`stream_interval` must be 1 or more: leave it out for 1")
        })
}

/// A prompt of embeddings, one after the other.
fn read_embeds(
    embeds: &[f32],
    images: Option<&PromptImages>,
    ingress: &Ingress,
) -> Result<PromptImages, Status> {
    refuse(&[(
        "mm_inputs",
        images.is_some(),
        "`input_embeds` have the embeddings of images among the others",
    )])?;
    ingress
        .input_embeds(embeds)
        .map_err(|refusal| refused(&refusal))
}

fn read_images(
    inputs: &MultimodalInputs,
    vision: Option<VisionInfo>,
    prompt: usize,
) -> Result<PromptImages, Status> {
    // Media that no gateway has made tensors of.
    let urls = [&inputs.image_urls, &inputs.video_urls, &inputs.audio_urls];
    let data = [&inputs.image_data, &inputs.video_data, &inputs.audio_data];
    let is_raw = urls.iter().any(|urls| !urls.is_empty());
    let has_others = [data[1], data[2]].iter().any(|data| !data.is_empty());
    if is_raw || has_others || inputs.pixel_values.is_none() {
        return Err(media::refusal(vision));
    }
    let grids = Media::grids(inputs.model_specific_tensors.iter());
    let placeholders = inputs.mm_placeholders.iter();
    let media = Media {
        pixels: inputs.pixel_values.as_ref().map(tensor),
        grids: grids.map(tensor),
        placeholders: placeholders
            .map(|range| (range.offset, range.length))
            .collect(),
    };
    media::images(&media, vision, prompt)
}

fn tensor(data: &TensorData) -> Tensor<'_> {
    Tensor {
        shape: &data.shape,
        dtype: &data.dtype,
        data: &data.data,
    }
}

fn logprobs(request: &GenerateRequest) -> Option<RawLogprobs> {
    let is_wanted = request.return_logprob || !request.token_ids_logprob.is_empty();
    is_wanted.then(|| RawLogprobs {
        top_logprobs_num: request.top_logprobs_num.into(),
        token_ids_logprob: request
            .token_ids_logprob
            .iter()
            .copied()
            .map(i64::from)
            .collect(),
        logprob_start_len: request.logprob_start_len.into(),
        original: false,
    })
}

/// The contract asks for explicit values. A `top_p` or `top_k` of 0 stands for the neutral one. A repetition penalty of 0 is
/// refused.
fn sampling(params: &SamplingParams) -> pie_engine::SamplingParams {
    pie_engine::SamplingParams {
        temperature: params.temperature,
        top_k: params.top_k.into(),
        top_p: or_one(params.top_p),
        min_p: params.min_p,
        seed: None,
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        repetition_penalty: params.repetition_penalty,
        logit_bias: Vec::new(),
    }
}

fn grammar(constraint: Constraint) -> Grammar {
    match constraint {
        Constraint::JsonSchema(text) => Grammar::JsonSchema(text.into()),
        Constraint::Regex(text) => Grammar::Regex(text.into()),
        Constraint::EbnfGrammar(text) => Grammar::Ebnf(text.into()),
        Constraint::StructuralTag(text) => Grammar::StructuralTag(text.into()),
    }
}
