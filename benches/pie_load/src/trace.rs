//! The Chrome trace that a driver writes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;
use serde_json::Value;

/// Microseconds of the clock that the driver's events are stamped with.
pub(crate) fn now_us() -> f64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

/// When something was, by that clock.
pub(crate) fn clock_us(at: Instant) -> f64 {
    now_us() - at.elapsed().as_secs_f64() * 1e6
}

/// An event with a duration, in µs.
#[derive(Debug, Deserialize)]
struct Event {
    name: String,
    ts: f64,
    dur: f64,
}

/// The durations of a trace.
#[derive(Debug, Default)]
pub(crate) struct Trace(Vec<Event>);

impl Trace {
    /// Reads a JSON array of events, whose end may be missing, or an object that has it. Events of other kinds are left
    /// out.
    pub(crate) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let events = match parse_json(text)? {
            Value::Array(events) => events,
            Value::Object(mut object) => match object.remove("traceEvents") {
                Some(Value::Array(events)) => events,
                _ => Vec::new(),
            },
            _ => Vec::new(),
        };
        let events = events.into_iter();
        Ok(Self(
            events
                .filter_map(|event| serde_json::from_value(event).ok())
                .collect(),
        ))
    }

    /// Mean µs per event of each name, of the events that begin within the window.
    pub(crate) fn means(&self, window: &Range<f64>) -> BTreeMap<String, f64> {
        let mut sums: BTreeMap<String, (f64, u32)> = BTreeMap::new();
        for event in self.0.iter().filter(|event| window.contains(&event.ts)) {
            let (sum, count) = sums.entry(event.name.clone()).or_default();
            *sum += event.dur;
            *count += 1;
        }
        let means = sums.into_iter();
        means
            .map(|(name, (sum, count))| (name, sum / f64::from(count)))
            .collect()
    }
}

/// A driver need not end its array, and may leave in the middle of a line.
fn parse_json(text: &str) -> Result<Value, serde_json::Error> {
    let text = text.trim_end();
    let close = |text: &str| serde_json::from_str(&format!("{}]", text.trim_end_matches(',')));
    let whole_lines = text.rfind('\n').map_or("", |end| text[..end].trim_end());
    serde_json::from_str(text)
        .or_else(|_| close(text))
        .or_else(|_| close(whole_lines))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = r#"[
{"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "driver"}},
{"name": "step", "ph": "X", "ts": 100.0, "dur": 8.0, "args": {"requests": 1}},
{"name": "plan", "ph": "X", "ts": 100.0, "dur": 2.5},
{"name": "step", "ph": "X", "ts": 200.0, "dur": 10.0},
{"name": "step", "ph": "X", "ts": 300.0, "dur": 99.0}"#;

    #[test]
    fn means_are_of_the_window() {
        let half_a_line = format!("{TRACE},\n{{\"name\": \"st");
        let object = format!("{{\"traceEvents\": {TRACE}]}}");
        let forms = [
            TRACE,
            &half_a_line,
            &format!("{TRACE},\n"),
            &format!("{TRACE}]"),
            &object,
        ];
        for text in forms {
            let trace = Trace::parse(text).unwrap();
            let means = trace.means(&(100.0..300.0));
            let expected = [("plan", 2.5), ("step", 9.0)];
            let expected = expected.map(|(name, mean)| (name.to_owned(), mean));
            assert_eq!(means, BTreeMap::from(expected), "{text}");
            assert_eq!(trace.means(&(0.0..1e9))["step"], 39.0);
        }
    }

    #[test]
    fn absence_is_no_error() {
        assert!(Trace::parse("[").unwrap().means(&(0.0..1e9)).is_empty());
        assert!(Trace::parse("{}").unwrap().means(&(0.0..1e9)).is_empty());
        assert!(Trace::parse("no trace").is_err());
    }
}
