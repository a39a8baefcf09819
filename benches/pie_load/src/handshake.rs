//! What the driver announces on its pipe.

use std::io::{BufRead, BufReader, PipeReader};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::LoadError;

/// The capabilities that matter to a load.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Capabilities {
    pub(crate) total_pages: u32,
    pub(crate) kv_page_size: u32,
    pub(crate) max_forward_tokens: u32,
    pub(crate) max_forward_requests: u32,
    pub(crate) max_page_refs: u32,
    pub(crate) max_model_len: u32,
    pub(crate) vocab_size: u32,
    pub(crate) arch_name: String,
}

impl Capabilities {
    /// Why the driver cannot serve `batch` contexts together, whose prompts of `prompt` tokens grow to `length`.
    pub(crate) fn obstacle(&self, batch: u32, prompt: u32, length: u32) -> Option<String> {
        let pages = u64::from(batch) * u64::from(length.div_ceil(self.kv_page_size));
        let limits = [
            ("tokens in a frame", prompt.into(), self.max_forward_tokens),
            (
                "requests in a frame",
                batch.into(),
                self.max_forward_requests,
            ),
            ("positions", length.into(), self.max_model_len),
            ("pages", pages, self.total_pages.min(self.max_page_refs)),
        ];
        let (what, needed, limit) = limits
            .into_iter()
            .find(|&(_, needed, limit)| needed > u64::from(limit))?;
        Some(format!("{needed} {what}, the driver has {limit}"))
    }
}

/// Collects the lines of a handshake.
pub(crate) struct Handshake {
    group: u32,
    caps: Option<Capabilities>,
}

impl Handshake {
    pub(crate) const fn new(group: u32) -> Self {
        Self { group, caps: None }
    }

    /// Reads one line; the capabilities once the sentinel has come.
    pub(crate) fn line(&mut self, line: &str) -> Result<Option<Capabilities>, LoadError> {
        let wrong = |problem: String| LoadError::Handshake {
            line: line.chars().take(80).collect(),
            problem,
        };
        let mut message: Map<String, Value> =
            serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        if message.contains_key("ready") {
            let caps = self.caps.take();
            return caps
                .map(Some)
                .ok_or_else(|| wrong("no group line came before".to_owned()));
        }
        let (id, name) = (message.get("group_id"), message.get("shmem_name"));
        if id != Some(&self.group.into()) || name != Some(&region(self.group).into()) {
            return Err(wrong(format!(
                "expected group {} with its region",
                self.group
            )));
        }
        let caps = message.remove("caps").unwrap_or_default();
        let caps: Capabilities =
            serde_json::from_value(caps).map_err(|error| wrong(error.to_string()))?;
        if caps.total_pages == 0 || caps.kv_page_size == 0 || caps.max_forward_requests == 0 {
            return Err(wrong("a capacity is 0".to_owned()));
        }
        self.caps = Some(caps);
        Ok(None)
    }
}

/// The region's name.
pub(crate) fn region(group: u32) -> String {
    format!("/pie_shmem_g{group}")
}

/// The pipe's lines, read by a thread of their own; it ends when the pipe is closed.
pub(crate) fn lines(pipe: PipeReader) -> Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        let lines = BufReader::new(pipe).lines().map_while(Result::ok);
        for line in lines.filter(|line| !line.trim().is_empty()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: &str = r#"{"group_id":3,"shmem_name":"/pie_shmem_g3","more":1,"caps":{"total_pages":9,"kv_page_size":16,"max_forward_tokens":100,"max_forward_requests":4,"max_page_refs":50,"max_model_len":64,"vocab_size":7,"arch_name":"qwen3","swap_pool_size":0}}"#;

    #[test]
    fn the_sentinel_completes_the_group_line() {
        let mut handshake = Handshake::new(3);
        assert_eq!(handshake.line(GROUP).unwrap(), None);
        let caps = handshake.line(r#"{"ready":false}"#).unwrap().unwrap();
        assert_eq!((caps.total_pages, caps.kv_page_size), (9, 16));
        assert_eq!(caps.max_page_refs, 50);
    }

    #[test]
    fn other_lines_are_refused() {
        let foreign = GROUP.replace("\"group_id\":3", "\"group_id\":4");
        let renamed = GROUP.replace("_g3", "_g4");
        let without = GROUP.replace("\"max_page_refs\":50,", "");
        let zero = GROUP.replace("\"total_pages\":9", "\"total_pages\":0");
        let early = r#"{"ready":true}"#;
        for line in ["ready", "[]", early, &foreign, &renamed, &without, &zero] {
            assert!(Handshake::new(3).line(line).is_err(), "{line}");
        }
    }
}
