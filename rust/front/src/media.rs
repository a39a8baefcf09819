//! What a request brings besides tokens.

use pie_runtime::Pictures;

use crate::backend::Backend;
use crate::request::GenerateRequest;

const IN_SESSION: &str = "images in a session are not served by this server's scheduler: send the whole conversation in one request, or \
     start the server with `--scheduler sglang`";

/// The images of a request; what is wrong with them is its refusal.
pub(crate) fn open(
    backend: &impl Backend,
    request: &mut GenerateRequest,
    refusal: &mut Option<String>,
) -> Option<Pictures> {
    let media = request.media.take()?;
    // Also of a request that is refused: reading them frees the shared memory that they came in.
    let pictures = match backend.pictures(&media) {
        Ok(pictures) if pictures.is_empty() => return None,
        Ok(_) if request.session.is_some() => Err(IN_SESSION.to_owned()),
        other => other,
    };
    match pictures {
        Ok(pictures) => Some(pictures),
        Err(reason) => {
            refusal.get_or_insert(reason);
            None
        }
    }
}
