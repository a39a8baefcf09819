//! What the driver announces on its pipe.

use std::io::{self, BufRead, BufReader, PipeReader};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::EngineError;
use crate::group::region;

/// What the driver can do. A frame is one batch of requests; fields that are not listed are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Capabilities {
    /// KV pages, ids 0 to one less.
    pub total_pages: u32,
    /// Tokens of a KV page.
    pub kv_page_size: u32,
    /// Pages of host memory for swapping; 0 for none.
    #[serde(default)]
    pub swap_pool_size: u32,
    /// Input and draft tokens of a frame.
    pub max_forward_tokens: u32,
    /// Requests of a frame.
    pub max_forward_requests: u32,
    /// Page ids of a frame; shared pages count each time.
    pub max_page_refs: u32,
    /// Positions of a context.
    pub max_model_len: u32,
    /// Output vocabulary in tokens.
    pub vocab_size: u32,
    /// Numbers of a pooled row of an embedding model; 0 for a model that generates.
    #[serde(default)]
    pub embedding_size: u32,
    /// Whether pooled rows have norm 1.
    #[serde(default)]
    pub embedding_normalized: bool,
    /// Numbers of a hidden state; 0 for a driver that does not say.
    #[serde(default)]
    pub hidden_size: u32,
    /// Numbers of an embedding of `input_embeds`; 0 where none are taken.
    #[serde(default)]
    pub embed_size: u32,
    /// Architecture; selects the chat template.
    pub arch_name: String,
    /// Type of the activations.
    #[serde(default)]
    pub activation_dtype: String,
    /// Folder of the tokenizer.
    #[serde(default)]
    pub snapshot_dir: String,
    /// Slots for recurrent state; 0 for models with attention only.
    #[serde(default)]
    pub rs_cache_slots: u32,
    /// Whether the driver can draft tokens.
    #[serde(default)]
    pub system_speculation_supported: bool,
    /// Whether its operator switched drafting on.
    #[serde(default)]
    pub enable_system_speculation: bool,
}

/// Collects the lines of a handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    group: u32,
    caps: Option<Capabilities>,
}

impl Handshake {
    pub(crate) const fn new(group: u32) -> Self {
        Self { group, caps: None }
    }

    /// Reads one line; the capabilities once the sentinel has come.
    pub(crate) fn line(&mut self, line: &str) -> Result<Option<Capabilities>, EngineError> {
        let wrong = |problem: String| EngineError::Handshake {
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
        if let Some(name) = caps.empty_capacity() {
            return Err(wrong(format!("{name} is 0, at least 1 is needed")));
        }
        self.caps = Some(caps);
        Ok(None)
    }
}

impl Capabilities {
    /// A capacity without which nothing can be served.
    fn empty_capacity(&self) -> Option<&'static str> {
        let needed = [
            ("total_pages", self.total_pages),
            ("kv_page_size", self.kv_page_size),
            ("max_forward_tokens", self.max_forward_tokens),
            ("max_forward_requests", self.max_forward_requests),
            ("max_page_refs", self.max_page_refs),
        ];
        let empty = needed.into_iter().find(|&(_, capacity)| capacity == 0);
        empty.map(|(name, _)| name)
    }
}

/// The pipe's lines, read by a thread of their own; it ends when the pipe is closed.
pub(crate) fn lines(pipe: PipeReader) -> io::Result<Receiver<String>> {
    let (sender, receiver) = mpsc::channel();
    let reader = thread::Builder::new().name("pie-handshake".to_owned());
    reader.spawn(move || {
        let lines = BufReader::new(pipe).lines().map_while(Result::ok);
        for line in lines.filter(|line| !line.trim().is_empty()) {
            if sender.send(line).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: &str = r#"{"group_id":3,"shmem_name":"/pie_shmem_g3","more":1,"caps":{"total_pages":9,"kv_page_size":16,"max_forward_tokens":100,"max_forward_requests":4,"max_page_refs":50,"max_model_len":64,"vocab_size":7,"arch_name":"qwen3","swap_pool_size":5,"max_logit_rows":4294967295}}"#;

    #[test]
    fn the_sentinel_completes_the_group_line() {
        let mut handshake = Handshake::new(3);
        assert_eq!(handshake.line(GROUP).unwrap(), None);
        let caps = handshake.line(r#"{"ready":false}"#).unwrap().unwrap();
        assert_eq!((caps.total_pages, caps.kv_page_size), (9, 16));
        assert_eq!((caps.max_page_refs, caps.swap_pool_size), (50, 5));
        assert!(!caps.enable_system_speculation);
    }

    #[test]
    fn other_lines_are_refused() {
        let foreign = GROUP.replace("\"group_id\":3", "\"group_id\":4");
        let renamed = GROUP.replace("_g3", "_g4");
        let without = GROUP.replace("\"max_page_refs\":50,", "");
        let negative = GROUP.replace("\"max_page_refs\":50,", "\"max_page_refs\":-1,");
        let early = r#"{"ready":true}"#;
        for line in [
            "ready", "[]", early, &foreign, &renamed, &without, &negative,
        ] {
            assert!(Handshake::new(3).line(line).is_err(), "{line}");
        }
        let zero = GROUP.replace("\"total_pages\":9", "\"total_pages\":0");
        let error = Handshake::new(3).line(&zero).unwrap_err().to_string();
        assert!(error.contains("total_pages is 0"), "{error}");
    }
}
