//! Registry of request parameters: which ones the driver keeps, and under which handles.

use std::collections::VecDeque;
use std::mem;
use std::sync::{Arc, Weak};

use pie_wire::{MAX_HANDLES, MAX_KEPT_WORDS, Params, ParamsRef, RequestExtension, params_len};
use rustc_hash::FxHashMap;

/// Handles of finished requests that a frame frees without need.
pub(super) const MAX_FREED: usize = 4;
/// Parameters larger than this many bytes are freed when their request has finished; smaller ones are only overwritten. To make room
/// for `n` bytes, at most `n / LARGE + 1` handles are freed.
pub(super) const LARGE: usize = 1 << 10;
/// Frames that the driver may not have received when one fails: one that is built, and two in flight.
const MAX_UNCONFIRMED: usize = 3;
/// Least handles and bytes registered before finished requests are searched for.
const MIN_SWEEP: (usize, usize) = (64, 1 << 22);
/// Most bytes that the driver keeps.
const MAX_KEPT: usize = MAX_KEPT_WORDS * size_of::<u32>();

/// What the driver keeps under a handle.
#[derive(Debug, Default)]
struct Kept {
    /// The parameters; the weak pointer keeps their address from being reused.
    params: Weak<RequestExtension>,
    /// Their bytes, until the handle is freed.
    bytes: usize,
}

/// Assigns handles to parameters, and collects the records that a frame must carry for them.
#[derive(Debug, Default)]
pub(super) struct ParamRegistry {
    /// Handles by the address of the parameters.
    handles: FxHashMap<usize, u32>,
    kept: Vec<Kept>,
    /// Unused handles, under which the driver keeps little or nothing.
    free: Vec<u32>,
    /// Handles of finished requests whose large parameters the next frames free or overwrite; the largest is last.
    stale: Vec<u32>,
    /// Upper bound on the bytes that the driver keeps.
    bytes: usize,
    /// Handles that the last frames freed or overwrote, with the bytes they had.
    freed: VecDeque<Vec<(u32, usize)>>,
    /// Handles and bytes after the last sweep for finished requests.
    swept: (usize, usize),
    /// Records of this frame.
    records: Vec<(Option<u32>, Arc<RequestExtension>)>,
    empty: Arc<RequestExtension>,
}

impl ParamRegistry {
    pub(super) fn begin_frame(&mut self) {
        self.records.clear();
        if self.freed.len() == MAX_UNCONFIRMED {
            self.freed.pop_front();
        }
        self.freed.push_back(Vec::new());
        for _ in 0..MAX_FREED {
            if self.free_stale().is_none() {
                break;
            }
        }
    }

    /// Frees the largest stale parameters with this frame. Returns their bytes.
    fn free_stale(&mut self) -> Option<usize> {
        let handle = self.stale.pop()?;
        let before = self.keep(handle, Kept::default());
        self.free.push(handle);
        self.records.push((Some(handle), Arc::clone(&self.empty)));
        Some(before)
    }

    /// Overwrites a handle. Returns the bytes it had.
    fn keep(&mut self, handle: u32, kept: Kept) -> usize {
        let bytes = kept.bytes;
        let before = mem::replace(&mut self.kept[handle as usize], kept).bytes;
        self.bytes = self.bytes + bytes - before;
        if let Some(freed) = self.freed.back_mut()
            && before > 0
        {
            freed.push((handle, before));
        }
        before
    }

    /// A reference to parameters that this frame or an earlier one carries.
    pub(super) fn register(&mut self, params: &Arc<RequestExtension>) -> ParamsRef {
        if let Some(&handle) = self.handles.get(&address(params)) {
            return ParamsRef::Kept(handle);
        }
        let bytes = params_len(params);
        if self.handles.len() >= 2 * self.swept.0.max(MIN_SWEEP.0)
            || self.bytes + bytes >= 2 * self.swept.1.max(MIN_SWEEP.1)
        {
            self.sweep();
        }
        let handle = self.free_handle(bytes);
        if let Some(handle) = handle {
            self.handles.insert(address(params), handle);
            let params = Arc::downgrade(params);
            let mut freed = self.keep(handle, Kept { params, bytes });
            // The driver's memory grows only once nothing stale is left.
            while freed < bytes
                && let Some(more) = self.free_stale()
            {
                freed += more;
            }
        }
        let number = self.records.len() as u32;
        self.records.push((handle, Arc::clone(params)));
        handle.map_or(ParamsRef::InFrame(number), ParamsRef::Kept)
    }

    /// A handle for parameters of so many bytes, if the driver can keep them.
    fn free_handle(&mut self, bytes: usize) -> Option<u32> {
        // Overwriting a stale handle frees it.
        let stale = self.stale.last().copied();
        let reclaimed = stale.map_or(0, |handle| self.kept[handle as usize].bytes);
        if self.bytes + bytes > MAX_KEPT + reclaimed {
            return None;
        }
        self.stale.pop().or_else(|| self.free.pop()).or_else(|| {
            let next = self.kept.len() as u32;
            (next < MAX_HANDLES).then(|| {
                self.kept.push(Kept::default());
                next
            })
        })
    }

    /// Finds the handles of finished requests.
    fn sweep(&mut self) {
        let (kept, free, stale) = (&self.kept, &mut self.free, &mut self.stale);
        self.handles.retain(|_, &mut handle| {
            let Kept { params, bytes } = &kept[handle as usize];
            let is_alive = params.strong_count() > 0;
            if !is_alive {
                let list = if *bytes > LARGE {
                    &mut *stale
                } else {
                    &mut *free
                };
                list.push(handle);
            }
            is_alive
        });
        stale.sort_unstable_by_key(|&it| kept[it as usize].bytes);
        let reclaimed: usize = stale.iter().map(|&it| kept[it as usize].bytes).sum();
        self.swept = (self.handles.len(), self.bytes - reclaimed);
    }

    /// Sends all parameters again: the driver may not have received the last frames.
    pub(super) fn reset(&mut self) {
        self.handles.clear();
        self.swept = (0, 0);
        for (handle, before) in self.freed.drain(..).flatten() {
            let bytes = &mut self.kept[handle as usize].bytes;
            self.bytes += before.saturating_sub(*bytes);
            *bytes = before.max(*bytes);
        }
        // The driver may still keep something under each handle.
        let is_large = |handle: &u32| self.kept[*handle as usize].bytes > LARGE;
        (self.stale, self.free) = (0..self.kept.len() as u32).partition(is_large);
        self.stale
            .sort_by_key(|&handle| self.kept[handle as usize].bytes);
    }

    /// The records of this frame.
    pub(super) fn records(&self) -> impl Iterator<Item = Params<'_>> + Clone {
        self.records.iter().map(|(handle, params)| Params {
            handle: *handle,
            asked: params,
        })
    }
}

fn address(params: &Arc<RequestExtension>) -> usize {
    Arc::as_ptr(params).addr()
}
