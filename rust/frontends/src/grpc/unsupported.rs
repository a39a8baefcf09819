//! What a request may ask for and is not served here, by the field's name.

use tonic::Status;

/// Refuses the first field that asks for something.
pub(crate) fn refuse(fields: &[(&str, bool, &str)]) -> Result<(), Status> {
    let asked = fields.iter().find(|(_, asked, _)| *asked);
    asked.map_or(Ok(()), |(name, _, why)| {
        Err(Status::invalid_argument(format!(
            "`{name}` is not served by this server: {why}. Remove it from the request"
        )))
    })
}

pub(crate) const SPLIT: &str = "prefill and decode run in one driver";
/// What both contracts say to a request for an embedding.
pub(crate) const NO_EMBEDDINGS: &str = "the gateway's services return text: start `pie-sglang serve` without `--front gateway` for embeddings";

/// The value of a field in which 0 says that there is none.
pub(crate) fn or_one(value: f32) -> f32 {
    if value == 0.0 { 1.0 } else { value }
}
