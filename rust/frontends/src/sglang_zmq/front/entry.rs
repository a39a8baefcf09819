//! What a request is before the backend has it: what its names stand for.

use std::time::Instant;

use pie_ingress::{RawRequest, Refusal, shown};

use super::Front;
use crate::sglang_zmq::request::GenerateRequest;
use crate::sglang_zmq::session::Begun;

impl Front {
    /// Finds what a request names: its adapter, and the session whose tokens come before its own. What there is not is a
    /// refusal.
    pub(super) fn look_up(
        &self,
        request: &GenerateRequest,
        raw: &mut RawRequest,
    ) -> Result<Option<Begun>, Refusal> {
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
