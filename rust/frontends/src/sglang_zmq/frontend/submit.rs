//! From a decoded request to the backend, or to its refusal.

use std::mem;
use std::time::Instant;

use pie_engine::PromptImages;
use pie_ingress::{RawRequest, Refusal, RequestSpec, one_line, shown};

use super::SglangFrontend;
use crate::sglang_zmq::backend::Backend;
use crate::sglang_zmq::hidden_states::OpenHiddenStates;
use crate::sglang_zmq::logprobs::OpenLogprobs;
use crate::sglang_zmq::media;
use crate::sglang_zmq::open_request::{OpenRequest, OutputIntervals};
use crate::sglang_zmq::output::SglangFinish;
use crate::sglang_zmq::request::GenerateRequest;
use crate::sglang_zmq::session::SessionTurn;

const NO_PRIORITY: &str =
    "Using priority is disabled for this server. Please send a new request without a priority.";

impl SglangFrontend {
    /// Submits a request, or returns its refusal.
    pub(super) fn submit(
        &self,
        backend: &impl Backend,
        mut request: GenerateRequest,
    ) -> Option<(OpenRequest, SglangFinish)> {
        let settings = &self.settings;
        let images = media::open(backend, &mut request);
        let parsed = mem::replace(&mut request.parsed, Err(Refusal::Other(String::new())));
        let parsed = parsed.and_then(|mut raw| {
            let turn = self.resolve_names(&request, &mut raw)?;
            // Embeddings are not cut: such a prompt is refused with its length.
            if settings.truncates && raw.images.is_none() {
                raw.prompt.truncate(settings.max_prompt_tokens as usize);
            }
            let name = request.session.as_ref().map(|session| session.id.clone());
            Ok((raw, name.zip(turn)))
        });
        let intervals = OutputIntervals {
            stream: settings.stream_interval,
            other: settings.other_interval,
        };
        let prompt = parsed.as_ref().map_or(&[][..], |(raw, _)| &raw.prompt[..]);
        let mut open =
            OpenRequest::new(&request, prompt, intervals, !settings.think_end.is_empty());
        let priority = parsed.as_ref().ok().and_then(|(raw, _)| raw.priority);
        open.set_priority(priority);
        if settings.refuses_priority && priority.is_some() {
            return Some((open, SglangFinish::Abort(NO_PRIORITY.to_owned(), Some(503))));
        }
        if let Some(reason) = self.lock().unavailable.clone() {
            return Some((open, SglangFinish::Abort(reason, Some(503))));
        }
        let spec = parsed.and_then(|(raw, turn)| {
            let spec = self.validate(backend, &request, raw, images?, &mut open)?;
            Ok((spec, turn))
        });
        match spec {
            Ok((spec, turn)) => self.submit_spec(backend, open, spec, turn),
            Err(refusal) => Some((open, SglangFinish::Abort(refusal.to_string(), Some(400)))),
        }
    }

    fn validate(
        &self,
        backend: &impl Backend,
        request: &GenerateRequest,
        mut raw: RawRequest,
        images: Option<PromptImages>,
        open: &mut OpenRequest,
    ) -> Result<RequestSpec, Refusal> {
        let settings = &self.settings;
        if request.reasons {
            raw.grammar_after.clone_from(&settings.think_end);
        }
        raw.speculates = settings.speculates;
        open.image_tokens = images.as_ref().map_or(0, PromptImages::tokens);
        if raw.images.is_some() {
            media::check_embeds(request, images.is_some())?;
        }
        raw.images = images.or(raw.images);
        let spec = self.ingress.validate(raw, |grammar, after| {
            backend.compile_grammar(grammar, after)
        })?;
        open.logprobs = spec.logprobs().cloned().map(OpenLogprobs::new);
        let hidden = spec.hidden();
        open.hidden_states =
            hidden.map(|shape| OpenHiddenStates::new(shape, request.hidden_states));
        open.stops = spec.stops().clone();
        if let Some(embedding) = &mut open.embedding {
            embedding.row = spec.embedding();
        }
        Ok(spec)
    }

    fn submit_spec(
        &self,
        backend: &impl Backend,
        mut open: OpenRequest,
        spec: RequestSpec,
        turn: Option<(String, SessionTurn)>,
    ) -> Option<(OpenRequest, SglangFinish)> {
        let prompt = turn.is_some().then(|| spec.prompt().to_vec());
        // Its first output may come before `submit` returns, and waits for the lock.
        let mut state = self.lock();
        // Again, under the lock of `set_unavailable`, which aborts the requests that are open.
        if let Some(reason) = state.unavailable.clone() {
            return Some((open, SglangFinish::Abort(reason, Some(503))));
        }
        match backend.submit(spec) {
            Ok(id) => {
                if let (Some((name, turn)), Some(prompt)) = (turn, prompt) {
                    open.session = Some((name.clone(), turn.number));
                    let replaced = state.sessions.start(&name, &open.rid, turn, (prompt, id));
                    for request in replaced {
                        backend.abort(request);
                    }
                }
                state.names.insert(open.rid.clone(), id);
                state.open.insert(id, open);
                None
            }
            Err(rejected) => {
                let reason = one_line(&rejected.to_string());
                Some((open, SglangFinish::Abort(reason, Some(503))))
            }
        }
    }

    /// Ends a request that is not submitted.
    pub(super) fn refuse(
        &self,
        mut open: OpenRequest,
        finish: SglangFinish,
    ) -> (OpenRequest, SglangFinish) {
        if let (Some(timeline), SglangFinish::Abort(reason, _)) = (&mut open.timeline, &finish) {
            timeline.refuse(reason);
        }
        open.weight_versions = self.lock().weight_versions.spans(None, 0);
        (self.keep_timeline(open), finish)
    }

    /// Resolves a request's names: its adapter, and the session whose tokens precede its own.
    fn resolve_names(
        &self,
        request: &GenerateRequest,
        raw: &mut RawRequest,
    ) -> Result<Option<SessionTurn>, Refusal> {
        let mut state = self.lock();
        let turn = match &request.session {
            Some(params) => {
                let (own, bos) = (&raw.prompt, self.settings.bos_token);
                let begun = state.sessions.begin(params, own, bos, Instant::now());
                let (prompt, turn) = begun.map_err(Refusal::Other)?;
                let held = state.sessions.tokens(&params.id) + prompt.len() as u64;
                let limits = self.ingress.limits();
                limits.check("session_params", "session_tokens", held)?;
                raw.prompt = prompt;
                raw.session = Some(turn.number);
                Some(turn)
            }
            None => None,
        };
        if let Some(name) = &request.adapter {
            raw.adapter = state.adapters.get(name).copied();
            if raw.adapter.is_none() {
                let name = shown(name);
                return Err(Refusal::Other(format!(
                    "the adapter `{name}` is not loaded: load it by `/load_lora_adapter`"
                )));
            }
        }
        Ok(turn)
    }
}
