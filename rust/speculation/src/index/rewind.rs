//! Rewinding: undoes appends in reverse, or rebuilds the index.

use std::mem;

use super::{BOUNDARY, Index, Node, ROOT};
use crate::edge_table::Child;
use crate::undo_log::UndoLog;

impl Index {
    /// Whether a rewind to `length` tokens rebuilds the index: beyond the undo log, or where undoing is more work.
    fn is_rebuilt(&self, length: usize) -> bool {
        let undo = self.undo.as_ref();
        let known = undo.is_some_and(|undo| length + 1 >= undo.floor());
        !known || self.len() > 2 * length
    }

    /// Tokens that a rewind to `length` tokens undoes or appends again.
    pub(crate) fn rewind_work(&self, length: usize) -> usize {
        if self.is_rebuilt(length) {
            length
        } else {
            self.len() - length
        }
    }

    /// Rewinds to `length` tokens.
    pub(crate) fn rewind(&mut self, length: usize) {
        if self.is_rebuilt(length) {
            let text = mem::take(&mut self.text);
            #[cfg(test)]
            let work = self.work;
            *self = Self::new(self.depth, self.undo.is_some());
            #[cfg(test)]
            {
                self.work = work;
            }
            return self.extend(&text[1..=length]);
        }
        while self.len() > length {
            self.undo_last();
        }
    }

    fn undo_last(&mut self) {
        #[cfg(test)]
        {
            self.work += 1;
        }
        let position = self.text.len() - 1;
        let token = self.text[position];
        if token != BOUNDARY {
            self.remove_context(position as u32);
        }
        self.text.pop();
        if token == BOUNDARY {
            let last = self.text.iter().rposition(|&token| token == BOUNDARY);
            self.segment = last.unwrap_or(0);
        }
        self.trace();
        if token != BOUNDARY {
            self.undo_continuation(position as u32, token);
        }
    }

    /// Undoes [`Self::add_context`] for the last position.
    fn remove_context(&mut self, position: u32) {
        for node in &self.path {
            self.nodes[node.id as usize].count -= 1;
        }
        let Some(last) = self.path.pop() else {
            let token = self.before(position, 0);
            return self.remove_edge(ROOT.id, token);
        };
        let (id, depth) = (last.id, last.depth());
        let Node { best, count, .. } = *self.node(id);
        let length = (self.depth + 1).min(position as usize + 1 - self.segment);
        // The node stays if it has contexts besides those below one child.
        let below = if depth == length {
            Child::Leaf(best - 1)
        } else {
            self.remove_edge(id, self.before(position, depth));
            let other = self.edge(id, self.before(best - 1, depth));
            other.unwrap_or(Child::Leaf(best - 1))
        };
        let others = match below {
            Child::Leaf(_) => 1,
            Child::Node(node) => self.node(node.id).count,
        };
        if others < count {
            return;
        }
        if depth < length {
            self.remove_edge(id, self.before(best - 1, depth));
        }
        let parent = self.path.last().copied().unwrap_or(ROOT);
        let branch = self.before(position, parent.depth());
        self.set_edge(parent.id, branch, below);
        debug_assert_eq!(id as usize + 1, self.nodes.len());
        self.nodes.truncate(id as usize);
    }

    /// Undoes [`Self::count_continuation`] for the position that was the last one.
    fn undo_continuation(&mut self, position: u32, token: u32) {
        for number in (0..self.continued()).rev() {
            let node = &mut self.nodes[self.path[number].id as usize];
            if node.best == position || node.second == position {
                let word = self.undo.as_mut().and_then(UndoLog::pop).unwrap_or(0);
                node.restore(position, word);
            } else if self.text[node.best as usize] == token {
                node.best_count -= 1;
            }
        }
    }

    /// Recomputes the path of the last position.
    fn trace(&mut self) {
        self.path.clear();
        let last = self.text.len() - 1;
        let length = (self.depth + 1).min(last + 1 - self.segment);
        if last == self.segment {
            return;
        }
        let mut node = ROOT;
        while node.depth() < length {
            let token = self.text[last - node.depth()];
            let Some(Child::Node(inner)) = self.edge(node.id, token) else {
                break;
            };
            self.path.push(inner);
            node = inner;
        }
    }
}
