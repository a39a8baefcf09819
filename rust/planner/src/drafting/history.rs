//! Token ids of the KV pages, from which the text of a context can be re-read.

use std::ops::Range;

/// Token of a KV slot with unknown content.
const UNKNOWN: u32 = u32::MAX;

/// A pool whose pages can be copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PagePool {
    /// The engine's KV pool.
    Device,
    /// The host KV pool.
    Host,
}

/// Token ids of every page of both pools.
#[derive(Debug)]
pub(crate) struct PageTokens {
    page_size: usize,
    device: Vec<u32>,
    host: Vec<u32>,
}

impl PageTokens {
    /// Pages with unknown content.
    pub(crate) fn new(page_size: u32, device_pages: u32, host_pages: u32) -> Self {
        let page_size = page_size as usize;
        Self {
            page_size,
            device: vec![UNKNOWN; page_size * device_pages as usize],
            host: vec![UNKNOWN; page_size * host_pages as usize],
        }
    }

    /// Records that a request with these pages stores `tokens` from KV index `start` on.
    pub(crate) fn store(&mut self, pages: &[u32], start: usize, mut tokens: &[u32]) {
        let mut at = start;
        while !tokens.is_empty() {
            let (page, offset) = (at / self.page_size, at % self.page_size);
            let count = tokens.len().min(self.page_size - offset);
            let (part, rest) = tokens.split_at(count);
            let slot = pages[page] as usize * self.page_size + offset;
            self.device[slot..slot + count].copy_from_slice(part);
            (tokens, at) = (rest, at + count);
        }
    }

    /// Appends the tokens of KV indices `range`, from the first index after which all are known; returns that index.
    pub(crate) fn load(&self, pages: &[u32], range: Range<usize>, out: &mut Vec<u32>) -> usize {
        let first = out.len();
        let mut at = range.start;
        while at < range.end {
            let (page, offset) = (at / self.page_size, at % self.page_size);
            let count = (range.end - at).min(self.page_size - offset);
            let slot = pages[page] as usize * self.page_size + offset;
            out.extend_from_slice(&self.device[slot..slot + count]);
            at += count;
        }
        let loaded = &out[first..];
        let known = loaded.iter().rposition(|&token| token == UNKNOWN);
        let unknown = known.map_or(0, |last| last + 1);
        out.drain(first..first + unknown);
        range.start + unknown
    }

    /// Records a page copy; pages outside of their pool are ignored.
    pub(crate) fn copy(&mut self, source: (PagePool, u32), target: (PagePool, u32)) {
        let (Some(from), Some(to)) = (self.slots(source), self.slots(target)) else {
            return;
        };
        match (source.0, target.0) {
            (PagePool::Device, PagePool::Device) => self.device.copy_within(from, to.start),
            (PagePool::Host, PagePool::Host) => self.host.copy_within(from, to.start),
            (PagePool::Device, PagePool::Host) => {
                self.host[to].copy_from_slice(&self.device[from]);
            }
            (PagePool::Host, PagePool::Device) => {
                self.device[to].copy_from_slice(&self.host[from]);
            }
        }
    }

    /// Marks the content of a page as unknown.
    pub(crate) fn forget(&mut self, page: (PagePool, u32)) {
        if let Some(slots) = self.slots(page) {
            let pool = match page.0 {
                PagePool::Device => &mut self.device,
                PagePool::Host => &mut self.host,
            };
            pool[slots].fill(UNKNOWN);
        }
    }

    /// The slots of a page in its pool; `None` if that is smaller.
    fn slots(&self, (pool, page): (PagePool, u32)) -> Option<Range<usize>> {
        let slots = match pool {
            PagePool::Device => self.device.len(),
            PagePool::Host => self.host.len(),
        };
        let start = page as usize * self.page_size;
        let range = start..start + self.page_size;
        (range.end <= slots).then_some(range)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use PagePool::{Device, Host};

    #[test]
    fn contexts_are_read_back_across_pages() {
        let mut pages = PageTokens::new(4, 5, 2);
        pages.store(&[3, 1], 0, &[10, 11, 12, 13, 14]);
        pages.store(&[3, 1], 5, &[15]);
        let mut out = vec![7];
        assert_eq!(pages.load(&[3, 1], 2..6, &mut out), 2);
        assert_eq!(out, [7, 12, 13, 14, 15]);
        // Of another context that shares the first page nothing else is known.
        out.clear();
        assert_eq!(pages.load(&[3, 2], 0..6, &mut out), 6);
        assert!(out.is_empty());
        pages.store(&[3, 2], 5, &[25]);
        assert_eq!(pages.load(&[3, 2], 0..6, &mut out), 5);
        assert_eq!(out, [25]);
    }

    #[test]
    fn copies_take_tokens_along() {
        let mut pages = PageTokens::new(2, 4, 3);
        pages.store(&[0, 1], 0, &[1, 2, 3, 4]);
        pages.copy((Device, 0), (Host, 2));
        pages.copy((Device, 1), (Device, 0));
        pages.copy((Host, 2), (Host, 1));
        pages.copy((Host, 1), (Device, 3));
        let mut out = Vec::new();
        assert_eq!(pages.load(&[0, 3], 0..4, &mut out), 0);
        assert_eq!(out, [3, 4, 1, 2]);
        // Of what failed, and of what was not announced, nothing is known.
        pages.forget((Device, 0));
        pages.copy((Host, 7), (Device, 3));
        pages.copy((Device, 3), (Host, 3));
        pages.forget((Host, 3));
        out.clear();
        assert_eq!(pages.load(&[0, 3], 0..4, &mut out), 2);
        assert_eq!(out, [1, 2]);
    }
}
