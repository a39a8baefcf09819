//! The undo log of an index: replaced continuations, for rewinds; about one word per token.
//!
//! Some texts replace a continuation at every level with every token, so the log keeps the newest changes in two halves. For
//! longer rewinds the index is rebuilt, which is at most some [`depth`](crate::Config::max_depth) times the work of undoing.

use crate::growth;

/// Words of each half for any text, however short.
const SLACK: usize = if cfg!(test) { 4 } else { 512 };

#[derive(Clone, Debug, Default)]
pub(crate) struct UndoLog {
    young: Vec<u32>,
    old: Vec<u32>,
    /// Length of the text at the start of each half.
    young_from: usize,
    old_from: usize,
}

impl UndoLog {
    /// The shortest length that the log can restore.
    pub(crate) fn floor(&self) -> usize {
        self.old_from
    }

    /// Starts a new half if the young one is full. Call before a token is appended to a text of `length`.
    pub(crate) fn start_generation(&mut self, length: usize) {
        if self.young.len() > length / 2 + SLACK {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            (self.old_from, self.young_from) = (self.young_from, length);
        }
    }

    pub(crate) fn push(&mut self, word: u32) {
        growth::push(&mut self.young, word);
    }

    /// Pops the last word.
    pub(crate) fn pop(&mut self) -> Option<u32> {
        if self.young.is_empty() {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young_from = self.old_from;
        }
        self.young.pop()
    }

    /// Heap memory in bytes.
    pub(crate) fn bytes(&self) -> usize {
        (self.young.capacity() + self.old.capacity()) * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_words_are_kept_within_bounds() {
        let mut undo = UndoLog::default();
        let each = 18;
        for length in 0..5000_usize {
            undo.start_generation(length);
            (0..each).for_each(|at| undo.push((length * each + at) as u32));
            assert!(
                undo.bytes() <= 6 * length + 40 * SLACK + 400,
                "{} for {length}",
                undo.bytes()
            );
        }
        let floor = undo.floor();
        assert!(floor > 0 && (5000 - floor) * each >= 2500, "{floor}");
        for word in (floor * each..5000 * each).rev() {
            assert_eq!(undo.pop(), Some(word as u32));
        }
        assert_eq!(undo.pop(), None);
    }
}
