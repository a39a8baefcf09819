//! From a message to what it asks for.

use pie_engine::{Grammar, PromptImages};
use pie_ingress::{RawLogprobs, RawRequest, Refusal};
use tonic::Status;

use crate::grpc::contract::common::Modality;
use crate::grpc::contract::vllm::generate_request::Input;
use crate::grpc::contract::vllm::sampling_params::Constraint;
use crate::grpc::contract::vllm::tensor_data::Payload;
use crate::grpc::contract::vllm::{GenerateRequest, MultimodalInputs, SamplingParams, TensorData};
use crate::grpc::generate_params::GenerateParams;
use crate::grpc::grammars;
use crate::grpc::logprobs::{self, LogprobSides};
use crate::grpc::media::{self, Media, Tensor};
use crate::grpc::queue::StreamInterval;
use crate::grpc::settings::VisionInfo;
use crate::grpc::status::refused;
use crate::grpc::unsupported::{SPLIT, or_one, refuse};

pub(crate) fn parse(
    mut request: GenerateRequest,
    vision: Option<VisionInfo>,
) -> Result<GenerateParams, Status> {
    let params = request.sampling_params.take().unwrap_or_default();
    refuse_unsupported(&request)?;
    let mut prompt = match request.input {
        Some(Input::Tokenized(tokenized)) => tokenized.input_ids,
        Some(Input::Text(_)) => {
            return Err(Status::invalid_argument(
                "`text` is not served: send tokens, as `tokenized.input_ids`",
            ));
        }
        None => Vec::new(),
    };
    if let Some(most) = params.truncate_prompt_tokens {
        let has_images = request.mm_inputs.is_some();
        refuse(&[(
            "truncate_prompt_tokens",
            has_images,
            "it could cut an image",
        )])?;
        truncate(&mut prompt, most)?;
    }
    let inputs = request.mm_inputs.as_ref();
    let images = inputs.map(|inputs| read_images(inputs, vision, prompt.len()));
    let images = images.transpose()?;
    let (logprobs, sides) = logprobs(&params).map_err(|refusal| refused(&refusal))?;
    let bias = |(&token, &bias): (&i32, &f32)| (token.into(), bias);
    let raw = RawRequest {
        sampling: sampling(&params),
        logit_bias: params.logit_bias.iter().map(bias).collect(),
        images,
        logprobs,
        max_new_tokens: params.max_tokens.map(i64::from),
        min_new_tokens: params.min_tokens.into(),
        n: params.n.max(1).into(),
        stop_token_ids: params.stop_token_ids.into_iter().map(i64::from).collect(),
        stop: params.stop,
        ignore_eos: params.ignore_eos,
        grammar: params.constraint.and_then(grammar),
        streams: request.stream,
        ..RawRequest::new(request.request_id, prompt)
    };
    let interval = StreamInterval {
        streams: request.stream,
        interval: 1,
    };
    Ok(GenerateParams {
        raw,
        interval,
        sides,
    })
}

/// Refuses by name what the runtime does not serve.
fn refuse_unsupported(request: &GenerateRequest) -> Result<(), Status> {
    refuse(&[
        (
            "extra_mm_inputs",
            !request.extra_mm_inputs.is_empty(),
            "it takes images, and no audio or video",
        ),
        (
            "media_refs",
            !request.media_refs.is_empty(),
            "the gateway fetches images, and makes tensors of them",
        ),
        (
            "kv_transfer_params",
            request.kv_transfer_params.is_some(),
            SPLIT,
        ),
        (
            "kv_transfer_params_json",
            request.kv_transfer_params_json.is_some(),
            SPLIT,
        ),
        (
            "data_parallel_rank",
            request.data_parallel_rank.is_some_and(|rank| rank > 0),
            "each replica has a port of its own",
        ),
    ])
}

fn read_images(
    inputs: &MultimodalInputs,
    vision: Option<VisionInfo>,
    prompt: usize,
) -> Result<PromptImages, Status> {
    let is_picture = matches!(inputs.modality(), Modality::Unspecified | Modality::Image);
    if !is_picture {
        return Err(media::refusal(vision));
    }
    let grids = Media::grids(inputs.model_specific_tensors.iter());
    let placeholders = inputs.mm_placeholders.iter();
    let media = Media {
        pixels: inputs.pixel_values.as_ref().map(tensor).transpose()?,
        grids: grids.map(tensor).transpose()?,
        placeholders: placeholders
            .map(|range| (range.offset, range.length))
            .collect(),
    };
    media::images(&media, vision, prompt)
}

fn tensor(data: &TensorData) -> Result<Tensor<'_>, Status> {
    let Some(Payload::Inline(bytes)) = &data.payload else {
        return Err(Status::invalid_argument(
            "`mm_inputs` cannot be served: its tensors must be in the message, as `inline`",
        ));
    };
    Ok(Tensor {
        shape: &data.shape,
        dtype: &data.dtype,
        data: bytes,
    })
}

/// As vLLM has them: before the temperature.
fn logprobs(params: &SamplingParams) -> Result<(Option<RawLogprobs>, LogprobSides), Refusal> {
    let top =
        |field, value: Option<i32>| value.map(|value| logprobs::top(field, value)).transpose();
    let of_output = top("logprobs", params.logprobs)?;
    let of_prompt = top("prompt_logprobs", params.prompt_logprobs)?;
    if of_output.is_none() && of_prompt.is_none() {
        return Ok((None, LogprobSides::default()));
    }
    let tops = (of_prompt.unwrap_or(0), of_output.unwrap_or(0));
    let wanted = RawLogprobs {
        top_logprobs_num: tops.0.max(tops.1).into(),
        token_ids_logprob: Vec::new(),
        logprob_start_len: of_prompt.map_or(-1, |_| 0),
        original: true,
    };
    let sides = LogprobSides {
        tops: Some(tops),
        only_prompt: of_output.is_none(),
    };
    Ok((Some(wanted), sides))
}

/// Keeps the last tokens of a prompt; -1 for as many as fit, which is left to the scheduler.
fn truncate(prompt: &mut Vec<u32>, most: i32) -> Result<(), Status> {
    match usize::try_from(most) {
        Ok(most) if most > 0 => {
            prompt.drain(..prompt.len().saturating_sub(most));
            Ok(())
        }
        _ if most == -1 => Ok(()),
        _ => Err(Status::invalid_argument(format!(
            "`truncate_prompt_tokens` is {most}, it must be 1 or more, or -1"
        ))),
    }
}

/// Fields without a value are 0, which stands for the neutral value where it has no meaning of its own.
fn sampling(params: &SamplingParams) -> pie_engine::SamplingParams {
    pie_engine::SamplingParams {
        temperature: params.temperature.unwrap_or(1.0),
        top_k: if params.top_k == 0 {
            -1
        } else {
            params.top_k.into()
        },
        top_p: or_one(params.top_p),
        min_p: params.min_p,
        // Seeds of the driver are not negative; the same one stays the same.
        seed: params.seed.map(|seed| u64::from(seed.cast_unsigned())),
        frequency_penalty: params.frequency_penalty,
        presence_penalty: params.presence_penalty,
        repetition_penalty: or_one(params.repetition_penalty),
        logit_bias: Vec::new(),
    }
}

fn grammar(constraint: Constraint) -> Option<Grammar> {
    Some(match constraint {
        Constraint::JsonSchema(text) => Grammar::JsonSchema(text.into()),
        Constraint::Regex(text) => Grammar::Regex(text.into()),
        Constraint::Grammar(text) => Grammar::Ebnf(text.into()),
        Constraint::StructuralTag(text) => Grammar::StructuralTag(text.into()),
        Constraint::JsonObject(true) => grammars::any_object(),
        Constraint::JsonObject(false) => return None,
        Constraint::Choice(choice) => grammars::one_of(&choice.choices),
    })
}
