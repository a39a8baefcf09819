//! Which version of the weights each output token of a request is of: `meta_info.weight_versions` of `SGLang` 0.5.23.

use std::sync::Arc;

use pie_engine::{OutputDelta, WeightVersionEvent};

use crate::sglang_zmq::schema::{array, text, uint};

/// Output tokens of one version, from `start` to before `end`; `SGLang`'s class of this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightVersionSpan {
    version: Arc<str>,
    start: u32,
    end: u32,
}

/// The names of all versions that have computed. The backend knows them by their index.
#[derive(Debug)]
pub(crate) struct WeightVersions(Vec<Arc<str>>);

impl WeightVersions {
    pub(crate) fn new(name: &str) -> Self {
        Self(vec![name.into()])
    }

    /// Adds the one that computes from now on and returns its index; `None` if it has the name of the last one.
    pub(crate) fn add(&mut self, name: &str) -> Option<u32> {
        if self.0.last().is_some_and(|last| **last == *name) {
            return None;
        }
        self.0.push(name.into());
        Some(self.0.len() as u32 - 1)
    }

    /// The spans of a request that ended with this output and has `tokens` tokens; at least one, which may be empty.
    pub(crate) fn spans(&self, last: Option<&OutputDelta>, tokens: u32) -> Vec<WeightVersionSpan> {
        let events = last.map_or(&[][..], |last| &last.weight_events);
        let version = last.and_then(|last| last.weight_version);
        let version = version.unwrap_or(self.0.len() as u32 - 1);
        let events = events.iter().copied().chain([WeightVersionEvent {
            old_version: version,
            num_output_tokens: tokens,
        }]);
        let mut spans: Vec<WeightVersionSpan> = Vec::new();
        for event in events {
            let Some(version) = self.0.get(event.old_version as usize) else {
                continue;
            };
            let end = event.num_output_tokens.min(tokens);
            match spans.last_mut() {
                Some(last) if end <= last.end => {}
                Some(last) if last.version == *version => last.end = end,
                last => {
                    let start = last.map_or(0, |last| last.end);
                    let version = Arc::clone(version);
                    spans.push(WeightVersionSpan {
                        version,
                        start,
                        end,
                    });
                }
            }
        }
        spans
    }
}

/// Writes spans as the message has them.
pub(crate) fn write_spans(bytes: &mut Vec<u8>, spans: &[WeightVersionSpan]) {
    array(bytes, spans.len());
    for span in spans {
        array(bytes, 3);
        text(bytes, &span.version);
        uint(bytes, span.start.into());
        uint(bytes, span.end.into());
    }
}
