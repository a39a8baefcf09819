//! JSON of clients.

use serde_json::Value;

/// Arrays and objects in each other that `serde_json` reads.
const JSON_DEPTH: usize = 128;

/// JSON that is nested no deeper than the reader goes.
pub(crate) fn json_of(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| {
        let reason = error.to_string();
        match reason.strip_prefix("recursion limit exceeded") {
            Some(at) => {
                format!("it is nested deeper than {JSON_DEPTH} levels{at}: flatten it")
            }
            None => format!("it is not JSON: {reason}"),
        }
    })
}
