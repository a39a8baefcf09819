//! What a request is before the backend has it: what its names stand for, what binds and ends it, and whether it can be served.

use std::sync::Arc;
use std::time::Instant;

use pie_runtime::{Constrain, Ends, Unbindable};

use super::Front;
use crate::backend::Backend;
use crate::request::GenerateRequest;
use crate::session::Begun;

/// What the names of a request stand for.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// The backend's id.
    pub(super) adapter: Option<u64>,
    pub(super) turn: Option<Begun>,
}

impl Front {
    /// What binds a request that has a grammar.
    pub(super) fn bind(
        &self,
        backend: &impl Backend,
        request: &mut GenerateRequest,
    ) -> Result<Option<Arc<dyn Constrain>>, Unbindable> {
        let Some(grammar) = request.params.grammar.take() else {
            return Ok(None);
        };
        let thinks = if request.reasons {
            &self.settings.think_end[..]
        } else {
            &[]
        };
        backend.bind(&grammar, thinks).map(Some)
    }

    /// Finds what a request names: its adapter, and the session whose tokens come before its own. What there is not is a
    /// refusal.
    pub(super) fn look_up(&self, request: &mut GenerateRequest) -> Known {
        let mut known = Known::default();
        let mut state = self.lock();
        if let Some(params) = &request.session {
            let (own, bos) = (&request.prompt, self.settings.bos_token);
            match state.sessions.begin(params, own, bos, Instant::now()) {
                Ok((prompt, turn)) => {
                    request.prompt = prompt;
                    known.turn = Some(turn);
                }
                Err(reason) => {
                    request.refusal.get_or_insert(reason);
                }
            }
        }
        if let Some(name) = &request.adapter {
            known.adapter = state.adapters.get(name).copied();
            if known.adapter.is_none() {
                request.refusal.get_or_insert_with(|| {
                    format!("the adapter `{name}` is not loaded: load it by `/load_lora_adapter`")
                });
            }
        }
        known
    }

    /// What is wrong with a prompt, or with tokens that are named.
    pub(super) fn unfit(&self, request: &GenerateRequest) -> Option<String> {
        let (settings, prompt) = (&self.settings, &request.prompt);
        let (tokens, longest) = (prompt.len(), settings.max_prompt_tokens as usize);
        if prompt.is_empty() {
            return Some("the prompt is empty: send a token or more".to_owned());
        }
        if tokens > longest {
            return Some(format!(
                "the prompt has {tokens} tokens, and this server takes {longest} at most, as its context length and its KV \
                 cache allow: shorten it, or start the server with `--allow-auto-truncate`"
            ));
        }
        let vocab = settings.vocab_size;
        if let Some(unknown) = prompt.iter().position(|&token| token >= vocab) {
            let token = prompt[unknown];
            return Some(format!(
                "token {token} at {unknown} of the prompt is not in the vocabulary, which has {vocab}"
            ));
        }
        let mut biased = request.params.sampling.logit_bias.iter();
        if let Some((token, _)) = biased.find(|&&(token, _)| token >= vocab) {
            return Some(format!(
                "token {token} of `logit_bias` is not in the vocabulary, which has {vocab}"
            ));
        }
        let checked = request.logprobs.as_ref()?.check(tokens, vocab);
        checked.err().map(|error| error.to_string())
    }

    /// When it ends.
    pub(super) fn ends(&self, request: &GenerateRequest) -> Ends {
        let params = &request.params;
        let mut stop_tokens = Vec::new();
        if !params.ignore_eos {
            stop_tokens.extend_from_slice(&params.stop_token_ids);
            stop_tokens.extend_from_slice(&self.settings.eos_tokens);
        }
        // A request without a limit gets what one with a limit may ask for: the front end has checked that.
        let room = self.settings.context_length;
        let room = room.saturating_sub(request.prompt.len() as u32);
        let max_tokens = params.max_new_tokens.unwrap_or(u32::MAX).min(room);
        Ends {
            max_tokens,
            min_tokens: params.min_new_tokens.min(max_tokens),
            stop_tokens,
            stop_strings: params.stop_strs.clone(),
            stop_regexes: params.stop_regexes.clone(),
        }
    }
}
