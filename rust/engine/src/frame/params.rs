//! Which parameters of contexts the driver keeps, and under which handles.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Weak};

use pie_wire::{MAX_HANDLES, MAX_KEPT_WORDS, Params, ParamsRef, RequestExtension, params_len};
use rustc_hash::FxHashMap;

/// Handles that one frame frees at most, besides those that make room for what it brings.
pub(super) const MAX_FREED: usize = 4;
/// What takes more bytes is freed when its context has ended, and not only replaced by that of another one. A list of so many
/// bytes has fewer than one other freed for it, and one more for each time as many.
pub(super) const LARGE: usize = 1 << 10;
/// Frames that the driver may not have taken when one fails: that which is laid out, and two that are out.
const UNSURE: usize = 3;
/// Registrations, and bytes of them, after which those of contexts that have ended are looked for, at least.
const LOOK_AFTER: (usize, usize) = (64, 1 << 22);
/// Bytes of all that is kept.
const MAX_KEPT: usize = MAX_KEPT_WORDS * size_of::<u32>();

/// What the driver has under a handle.
#[derive(Debug, Default)]
struct Kept {
    /// What a context asks for. The pointer keeps the address from being used again.
    asked: Weak<RequestExtension>,
    /// Bytes that it takes, until it is freed.
    bytes: usize,
}

/// Gives out handles, and writes down what a frame has to bring for them.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// By the address of what is asked.
    handles: FxHashMap<usize, u32>,
    kept: Vec<Kept>,
    /// Handles for other contexts, of which the driver has little or nothing.
    free: Vec<u32>,
    /// Handles of contexts that have ended, whose large lists the next frames free or replace: the largest last.
    ended: Vec<u32>,
    /// Bytes that the driver keeps at most.
    bytes: usize,
    /// What the last frames have freed or replaced: handles, and their bytes before.
    gone: VecDeque<Vec<(u32, usize)>>,
    /// Handles and bytes when those of ended contexts were last looked for.
    looked: (usize, usize),
    /// What this frame brings.
    records: Vec<(Option<u32>, Arc<RequestExtension>)>,
    nothing: Arc<RequestExtension>,
}

impl Registry {
    /// Begins a frame.
    pub(super) fn begin(&mut self) {
        self.records.clear();
        if self.gone.len() == UNSURE {
            self.gone.pop_front();
        }
        self.gone.push_back(Vec::new());
        for _ in 0..MAX_FREED {
            if self.free_ended().is_none() {
                break;
            }
        }
    }

    /// Has the frame free the largest list of those that have ended. Returns its bytes.
    fn free_ended(&mut self) -> Option<usize> {
        let handle = self.ended.pop()?;
        let before = self.keep(handle, Kept::default());
        self.free.push(handle);
        self.records.push((Some(handle), Arc::clone(&self.nothing)));
        Some(before)
    }

    /// Has the driver keep something under a handle. Returns the bytes of what was there.
    fn keep(&mut self, handle: u32, kept: Kept) -> usize {
        let bytes = kept.bytes;
        let before = mem::replace(&mut self.kept[handle as usize], kept).bytes;
        self.bytes = self.bytes + bytes - before;
        if let Some(gone) = self.gone.back_mut()
            && before > 0
        {
            gone.push((handle, before));
        }
        before
    }

    /// Where the driver finds what a context asks for: the frame brings it, or one before has.
    pub(super) fn place(&mut self, asked: &Arc<RequestExtension>) -> ParamsRef {
        if let Some(&handle) = self.handles.get(&address(asked)) {
            return ParamsRef::Kept(handle);
        }
        let bytes = params_len(asked);
        if self.handles.len() >= 2 * self.looked.0.max(LOOK_AFTER.0)
            || self.bytes + bytes >= 2 * self.looked.1.max(LOOK_AFTER.1)
        {
            self.find_ended();
        }
        let handle = self.free_handle(bytes);
        if let Some(handle) = handle {
            self.handles.insert(address(asked), handle);
            let asked = Arc::downgrade(asked);
            let mut freed = self.keep(handle, Kept { asked, bytes });
            // What is kept grows only where nothing is left of contexts that have ended.
            while freed < bytes
                && let Some(more) = self.free_ended()
            {
                freed += more;
            }
        }
        let number = self.records.len() as u32;
        self.records.push((handle, Arc::clone(asked)));
        handle.map_or(ParamsRef::InFrame(number), ParamsRef::Kept)
    }

    /// A handle for a list of so many bytes, if the driver can keep it.
    fn free_handle(&mut self, bytes: usize) -> Option<u32> {
        // It is freed by being replaced.
        let ended = self.ended.last().copied();
        let going = ended.map_or(0, |handle| self.kept[handle as usize].bytes);
        if self.bytes + bytes > MAX_KEPT + going {
            return None;
        }
        self.ended.pop().or_else(|| self.free.pop()).or_else(|| {
            let next = self.kept.len() as u32;
            (next < MAX_HANDLES).then(|| {
                self.kept.push(Kept::default());
                next
            })
        })
    }

    /// Finds the handles of contexts that have ended.
    fn find_ended(&mut self) {
        let (kept, free, ended) = (&self.kept, &mut self.free, &mut self.ended);
        self.handles.retain(|_, &mut handle| {
            let Kept { asked, bytes } = &kept[handle as usize];
            let lives = asked.strong_count() > 0;
            if !lives {
                let those = if *bytes > LARGE {
                    &mut *ended
                } else {
                    &mut *free
                };
                those.push(handle);
            }
            lives
        });
        ended.sort_unstable_by_key(|&it| kept[it as usize].bytes);
        let going: usize = ended.iter().map(|&it| kept[it as usize].bytes).sum();
        self.looked = (self.handles.len(), self.bytes - going);
    }

    /// A frame may not have reached the driver: whatever is asked is to be sent again.
    pub(super) fn forget(&mut self) {
        self.handles.clear();
        self.looked = (0, 0);
        for (handle, before) in self.gone.drain(..).flatten() {
            let bytes = &mut self.kept[handle as usize].bytes;
            self.bytes += before.saturating_sub(*bytes);
            *bytes = before.max(*bytes);
        }
        // The driver may have something under each of them. The largest goes first.
        let is_large = |handle: &u32| self.kept[*handle as usize].bytes > LARGE;
        (self.ended, self.free) = (0..self.kept.len() as u32).partition(is_large);
        self.ended
            .sort_by_key(|&handle| self.kept[handle as usize].bytes);
    }

    /// What the frame brings.
    pub(super) fn records(&self) -> impl Iterator<Item = Params<'_>> + Clone {
        self.records.iter().map(|(handle, asked)| Params {
            handle: *handle,
            asked,
        })
    }
}

fn address(asked: &Arc<RequestExtension>) -> usize {
    Arc::as_ptr(asked).addr()
}
