//! Times as the contracts have them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tonic::Status;

/// Seconds that a client may choose.
pub(crate) fn seconds(seconds: f32) -> Result<Duration, Status> {
    Duration::try_from_secs_f32(seconds)
        .map_err(|error| Status::invalid_argument(format!("`timeout_s` is {seconds}: {error}")))
}

/// So long before now, as seconds since 1970.
pub(crate) fn ago(passed: Duration) -> f64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    now.saturating_sub(passed).as_secs_f64()
}

/// Now, as ISO 8601.
pub(crate) fn now() -> String {
    prost_types::Timestamp::from(SystemTime::now()).to_string()
}

/// So long before now.
pub(crate) fn moment(ago: Duration) -> prost_types::Timestamp {
    let now = SystemTime::now();
    now.checked_sub(ago).unwrap_or(now).into()
}
