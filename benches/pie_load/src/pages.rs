//! KV pages, as the Pie runtime keeps them.

use crate::error::LoadError;

/// The free pages: last in, first out, from the highest id.
pub(crate) struct PagePool {
    free: Vec<u32>,
    total: u32,
}

impl PagePool {
    /// Frees the pages `0..total`.
    pub(crate) fn new(total: u32) -> Self {
        Self {
            free: (0..total).collect(),
            total,
        }
    }

    /// Free pages.
    #[cfg(test)]
    pub(crate) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// A free page.
    pub(crate) fn take(&mut self) -> Result<u32, LoadError> {
        self.free.pop().ok_or(LoadError::NoPage(self.total))
    }

    /// Frees pages; the last of them is the next to be taken.
    pub(crate) fn release(&mut self, pages: &mut Vec<u32>) {
        self.free.append(pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_in_first_out_from_the_highest() {
        let mut pool = PagePool::new(4);
        let mut taken: Vec<u32> = (0..3).map(|_| pool.take().unwrap()).collect();
        assert_eq!((&taken[..], pool.free()), (&[3, 2, 1][..], 1));
        pool.release(&mut taken);
        assert_eq!((taken.len(), pool.free()), (0, 4));
        assert_eq!(pool.take().unwrap(), 1);
        for _ in 0..3 {
            pool.take().unwrap();
        }
        assert!(matches!(pool.take(), Err(LoadError::NoPage(4))));
    }
}
