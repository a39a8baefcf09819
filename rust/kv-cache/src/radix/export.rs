//! Export of the tree as DOT and JSON.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::radix::index::RadixIndex;
use crate::radix::node::NodeState;

/// Tokens shown of a node.
const SHOWN: usize = 8;

impl RadixIndex {
    /// The tree for Graphviz: a box for each node with pages, first tokens and locks. Recently used nodes are red; locked ones
    /// have thick borders, those only on the host dashed ones.
    pub fn to_dot(&self) -> String {
        let mut dot = String::from(
            "digraph radix {\n  node [shape=box, style=filled, fontname=monospace];\n",
        );
        let oldest = self
            .live_nodes()
            .map(|at| self.nodes[at as usize].accessed)
            .min();
        let span = (self.now - oldest.unwrap_or(self.now)).max(1) as f64;
        for at in (0..self.nodes.len() as u32).filter(|at| self.nodes[*at as usize].is_root()) {
            let label = format!("{:?}", self.namespace_name(at)).replace(['\\', '"'], "'");
            let _ = writeln!(
                dot,
                "  n{at} [shape=ellipse, fillcolor=white, label=\"{label}\"];"
            );
        }
        for at in self.live_nodes() {
            let node = &self.nodes[at as usize];
            let age = (self.now - node.accessed) as f64 / span;
            let style = if node.on_device() {
                "filled"
            } else {
                "filled,dashed"
            };
            let width = if node.locks > 0 { 3 } else { 1 };
            let _ = writeln!(
                dot,
                "  n{at} [style=\"{style}\", penwidth={width}, fillcolor=\"{:.3} {:.3} 1.0\", label=\"{} pages  {:?}\\nlocks {}  hits {}\"];",
                0.08 * age,
                0.1 + 0.7 * (1.0 - age),
                node.edge.len(),
                self.first_tokens(at),
                node.locks,
                node.hits,
            );
            let _ = writeln!(dot, "  n{} -> n{at};", node.parent);
        }
        dot.push_str("}\n");
        dot
    }

    /// The tree as JSON: totals, and a list of nodes with `id`, `parent` (0: a root), `namespace`, `pages`, `tokens` (the first
    /// few), `locks`, `hits`, `priority`, `age`, `on_device`, `on_host`.
    pub fn to_json(&self) -> String {
        let nodes: Vec<Value> = self.live_nodes().map(|at| self.node_json(at)).collect();
        json!({
            "page_size": self.config.page_size,
            "device_pages": self.device_pages(),
            "host_pages": self.host_pages(),
            "evictable_pages": self.evictable_pages(),
            "protected_pages": self.protected_pages(),
            "memory_bytes": self.memory_bytes(),
            "nodes": nodes,
        })
        .to_string()
    }

    fn node_json(&self, at: u32) -> Value {
        let node = &self.nodes[at as usize];
        let parent = &self.nodes[node.parent as usize];
        let top = self
            .path(at)
            .last()
            .map_or(0, |top| self.nodes[top as usize].parent);
        json!({
            "id": self.id(at).to_bits(),
            "parent": if parent.is_root() { 0 } else { self.id(node.parent).to_bits() },
            "namespace": self.namespace_name(top),
            "pages": node.edge.len(),
            "tokens": self.first_tokens(at),
            "locks": node.locks,
            "hits": node.hits,
            "priority": node.priority,
            "age": self.now - node.accessed,
            "on_device": node.on_device(),
            "on_host": !node.on_device() || self.copies.contains_key(&at),
        })
    }

    fn namespace_name(&self, root: u32) -> Option<&str> {
        self.namespaces
            .namespace(root)
            .and_then(|namespace| namespace.name.as_deref())
    }

    fn first_tokens(&self, at: u32) -> Vec<u32> {
        let edge = &self.nodes[at as usize].edge;
        let mut tokens = Vec::new();
        edge.tokens(self.size, (edge.len() * self.size).min(SHOWN), &mut tokens);
        tokens
    }

    /// All nodes.
    pub(crate) fn live_nodes(&self) -> impl Iterator<Item = u32> + '_ {
        let slots = (0..).zip(&self.nodes);
        slots.filter_map(|(at, node)| {
            matches!(node.state, NodeState::Device | NodeState::Host).then_some(at)
        })
    }
}
