//! Which parameters of contexts the driver keeps, and under which handles.

use std::sync::{Arc, Weak};

use pie_wire::{MAX_HANDLES, MAX_KEPT_WORDS, Params, ParamsRef, RequestExtension, params_len};
use rustc_hash::FxHashMap;

/// Handles that one frame frees at most.
pub(super) const MAX_FREED: usize = 4;
/// What takes more bytes is freed when its context has ended, and not only replaced by that of another one.
const LARGE: usize = 1 << 10;
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
    /// Handles of contexts that have ended, whose large lists the next frames free.
    ended: Vec<u32>,
    /// Bytes that the driver keeps at most.
    bytes: usize,
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
        for _ in 0..MAX_FREED {
            let Some(handle) = self.ended.pop() else {
                break;
            };
            self.bytes -= std::mem::take(&mut self.kept[handle as usize]).bytes;
            self.free.push(handle);
            self.records.push((Some(handle), Arc::clone(&self.nothing)));
        }
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
        let handle = (self.bytes + bytes <= MAX_KEPT)
            .then(|| self.free_handle())
            .flatten();
        if let Some(handle) = handle {
            self.handles.insert(address(asked), handle);
            let asked = Arc::downgrade(asked);
            let before = std::mem::replace(&mut self.kept[handle as usize], Kept { asked, bytes });
            self.bytes = self.bytes + bytes - before.bytes;
        }
        let number = self.records.len() as u32;
        self.records.push((handle, Arc::clone(asked)));
        handle.map_or(ParamsRef::InFrame(number), ParamsRef::Kept)
    }

    fn free_handle(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| {
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
        let going: usize = ended.iter().map(|&it| kept[it as usize].bytes).sum();
        self.looked = (self.handles.len(), self.bytes - going);
    }

    /// A frame may not have reached the driver: whatever is asked is to be sent again.
    pub(super) fn forget(&mut self) {
        self.handles.clear();
        self.looked = (0, 0);
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
