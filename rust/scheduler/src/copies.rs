//! Page copies between device and host.

use pie_kv_cache::radix::PageCopy;

/// Page copies before a step, in the order of the fields; a list may be sent as several copy frames.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Copies {
    /// From the device to the host.
    pub to_host: Vec<PageCopy>,
    /// From the host to the device.
    pub to_device: Vec<PageCopy>,
}

impl Copies {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.to_host.is_empty() && self.to_device.is_empty()
    }

    /// Number of pages.
    pub fn len(&self) -> usize {
        self.to_host.len() + self.to_device.len()
    }

    pub(crate) fn clear(&mut self) {
        self.to_host.clear();
        self.to_device.clear();
    }

    /// Prepends earlier copies.
    pub(crate) fn prepend(&mut self, former: &Self) {
        self.to_host.splice(..0, former.to_host.iter().copied());
        self.to_device.splice(..0, former.to_device.iter().copied());
    }
}
