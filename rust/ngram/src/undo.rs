//! The continuations that later ones replaced, for rewinding, within one word per token of the text.
//!
//! Some texts replace one at every level with every token. The log has two halves, so that the newest changes are always
//! there; beyond them an index is made anew, which is at most some [`depth`](crate::Config::max_depth) times as much work
//! as undoing the change would be.

/// Words of either half that any text may have.
const ROOM: usize = if cfg!(test) { 4 } else { 512 };

#[derive(Clone, Debug, Default)]
pub(crate) struct Undo {
    young: Vec<u32>,
    old: Vec<u32>,
    /// Length of the text at which either half starts.
    young_from: usize,
    old_from: usize,
}

impl Undo {
    /// The shortest text that can be gone back to.
    pub(crate) fn floor(&self) -> usize {
        self.old_from
    }

    /// Starts a new half, if it is time, with the token that makes the text longer than `length`.
    pub(crate) fn turn(&mut self, length: usize) {
        if self.young.len() > length / 2 + ROOM {
            std::mem::swap(&mut self.young, &mut self.old);
            self.young.clear();
            (self.old_from, self.young_from) = (self.young_from, length);
        }
    }

    pub(crate) fn push(&mut self, word: u32) {
        super::index::push(&mut self.young, word);
    }

    /// The word that was pushed last.
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
        let mut undo = Undo::default();
        let each = 18;
        for length in 0..5000_usize {
            undo.turn(length);
            (0..each).for_each(|at| undo.push((length * each + at) as u32));
            assert!(
                undo.bytes() <= 6 * length + 40 * ROOM + 400,
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
