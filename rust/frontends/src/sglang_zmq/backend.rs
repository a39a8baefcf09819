//! What a front end needs from the runtime.

use std::sync::Arc;

use pie_engine::{Grammar, GrammarHandle, GrammarSetupError, PromptImages, Service, SubmitError};
use pie_ingress::RequestSpec;

use crate::sglang_zmq::processor_output::ProcessorOutput;

/// Why a backend that reads no media takes none.
const NOT_SERVED: &str = "the parameter `mm_inputs` is not served by this server's scheduler: it takes images, of models with \
     images, and no audio or video. Remove it, or start the server with `--scheduler sglang`";

/// What `SGLang`'s processors make of images, audio and video: a `MultimodalProcessorOutput`.
#[derive(Debug)]
pub enum Media {
    /// A pickle, of 0.5.17.
    Pickle(Box<[u8]>),
    /// As it is part of a message of 0.5.23.
    Message(ProcessorOutput),
}

/// Who computes the requests.
pub trait Backend {
    /// Takes a request, and returns its id at once.
    ///
    /// # Errors
    /// [`SubmitError`].
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError>;
    /// What binds a request to a grammar, from its start on or after some tokens.
    ///
    /// # Errors
    /// [`GrammarSetupError`].
    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError>;
    /// Ends a request; one that has ended is ignored.
    fn abort(&self, request: u64);
    /// Lets go of what it keeps for a session, by the number that requests name as theirs.
    fn end_session(&self, session: u64);
    /// The weights that compute from now on are version `version`, which outputs name.
    fn set_weight_version(&self, version: u32);
    /// The images of a request. By default none are taken.
    ///
    /// # Errors
    /// Why they cannot be served, for the client.
    fn images(&self, _media: Media) -> Result<PromptImages, String> {
        Err(NOT_SERVED.to_owned())
    }
}

impl Backend for Service {
    fn submit(&self, spec: RequestSpec) -> Result<u64, SubmitError> {
        let (arrival, deadline) = spec.into_request();
        Self::submit(self, arrival, deadline)
    }

    fn compile_grammar(
        &self,
        grammar: &Grammar,
        after: &[u32],
    ) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError> {
        Self::compile_grammar(self, grammar, after)
    }

    fn abort(&self, request: u64) {
        Self::abort(self, request);
    }

    fn end_session(&self, session: u64) {
        Self::end_session(self, session);
    }

    fn set_weight_version(&self, version: u32) {
        Self::set_weight_version(self, version);
    }
}
