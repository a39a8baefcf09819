//! What a request brings besides tokens.

use pie_engine::PromptImages;
use pie_ingress::{Refusal, one_line};

use crate::sglang_zmq::backend::Backend;
use crate::sglang_zmq::request::GenerateRequest;

const IN_SESSION: &str = "images in a session are not served by this server's scheduler: send the whole conversation in one request, or \
     start the server with `--scheduler sglang`";

/// Checks what comes with a prompt of embeddings.
///
/// # Errors
/// [`Refusal`] for images, and in a session.
pub(crate) fn check_embeds(request: &GenerateRequest, has_images: bool) -> Result<(), Refusal> {
    let reason = if has_images {
        "a prompt has `input_embeds` or images, not both: put the embeddings of the images among the others"
    } else if request.session.is_some() {
        "`input_embeds` in a session are not served by this server's scheduler: send token ids, or no `session_params`"
    } else {
        return Ok(());
    };
    Err(Refusal::Other(reason.to_owned()))
}

/// The images of a request, or what is wrong with them.
pub(crate) fn open(
    backend: &impl Backend,
    request: &mut GenerateRequest,
) -> Result<Option<PromptImages>, Refusal> {
    let Some(media) = request.media.take() else {
        return Ok(None);
    };
    // Also of a request that is refused: reading them frees the shared memory that they came in.
    match backend.images(media?) {
        Ok(images) if images.is_empty() => Ok(None),
        Ok(_) if request.session.is_some() => Err(Refusal::Other(IN_SESSION.to_owned())),
        Ok(images) => Ok(Some(images)),
        Err(reason) => Err(Refusal::Other(one_line(&reason))),
    }
}
