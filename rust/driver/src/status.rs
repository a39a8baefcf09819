//! Status codes and status responses of the Pie driver protocol.

use pie_ring::Lease;

use crate::log_line::LogLine;

/// Done.
pub const OK: i32 = 0;
/// The frame or its arrays are malformed.
pub const MALFORMED: i32 = 2;
/// A page id is out of range.
pub const OUT_OF_RANGE: i32 = 3;
/// The operation is not supported.
pub const UNSUPPORTED: i32 = 4;
/// The engine failed.
pub const FAILED: i32 = 5;
/// `GenerateAudio` counts frames with positive numbers; its errors are negative.
pub const NO_AUDIO: i32 = -1;

/// [`answer`] with the reason in words, if there is one.
pub(crate) fn answer_with_reason(
    lease: Lease,
    driver_id: u32,
    code: i32,
    reason: &str,
) -> Option<LogLine> {
    let frame = pie_wire::status_frame(driver_id, code, false);
    LogLine::of_publication(lease.reply(&pie_wire::with_reason(&frame, reason)))
}

/// Responds with a status code; returns a log line if the response was not delivered.
pub(crate) fn answer(lease: Lease, driver_id: u32, code: i32) -> Option<LogLine> {
    LogLine::of_publication(lease.reply(&pie_wire::status_frame(driver_id, code, false)))
}
