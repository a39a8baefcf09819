//! From a message to what the engine takes of it.

use std::sync::Arc;

use pie_engine::{Grammar, GrammarHandle, GrammarSetupError};
use pie_ingress::{Ingress, ModelInfo, RawRequest, Refusal, RequestSpec};
use tonic::Status;

use crate::grpc::encoded::decode;
use crate::grpc::settings::{Contract, GatewaySettings, VisionInfo};
use crate::grpc::sglang::request as sglang;
use crate::grpc::status::refused;
use crate::grpc::vllm::request as vllm;

/// Reads requests of either contract, and validates them.
#[derive(Clone, Debug)]
pub struct RequestReader {
    pub(crate) ingress: Ingress,
    /// How the model takes images, if it takes any.
    pub(crate) images: Option<VisionInfo>,
    speculates: bool,
}

impl RequestReader {
    /// Reads requests for a server with these settings, whose model has token ids below `vocab_size` and takes
    /// `input_embeds` of `embed_size` numbers, or none for 0.
    #[must_use]
    pub fn new(settings: &GatewaySettings, vocab_size: u32, embed_size: u32) -> Self {
        let model = ModelInfo {
            vocab_size,
            // An embedding model is refused at the start.
            embeddings: None,
            eos_token_ids: settings.model.eos_tokens.clone(),
            // The scheduler knows its pool.
            max_prompt_tokens: None,
            context_length: None,
            logit_processors: false,
            hidden_size: 0,
            embed_size,
        };
        Self {
            ingress: Ingress::new(settings.limits.clone(), model),
            images: settings.images,
            speculates: settings.speculates,
        }
    }

    /// Reads the bytes of a contract's `GenerateRequest`, as its `Generate` call does. `bind` asks for what constrains it by a
    /// grammar, if all else is well.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for what is no such message, and for a request that is refused.
    pub fn read(
        &self,
        contract: Contract,
        message: &[u8],
        bind: impl FnOnce(&Grammar, &[u32]) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError>,
    ) -> Result<RequestSpec, Status> {
        let asked = match contract {
            Contract::Vllm => vllm::parse(decode(message)?, self.images),
            Contract::Sglang => sglang::parse(decode(message)?, self.images, &self.ingress),
        };
        let spec = self.validate(asked?.raw, bind);
        spec.map_err(|refusal| refused(&refusal))
    }

    /// What the engine takes of a request. It is aborted by its name, so it must have one.
    pub(crate) fn validate(
        &self,
        mut raw: RawRequest,
        bind: impl FnOnce(&Grammar, &[u32]) -> Result<Arc<dyn GrammarHandle>, GrammarSetupError>,
    ) -> Result<RequestSpec, Refusal> {
        if raw.name.is_empty() {
            return Err(Refusal::Other(
                "`request_id` is empty: name the request, so that it can be aborted".to_owned(),
            ));
        }
        raw.speculates = self.speculates;
        self.ingress.validate(raw, bind)
    }
}
