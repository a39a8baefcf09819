//! Contexts by id, in the order of their last use.

use rustc_hash::FxHashMap;

use crate::context::Context;

/// A context in a list from the newest to the oldest.
#[derive(Debug)]
struct Entry {
    id: u64,
    context: Context,
    newer: usize,
    older: usize,
}

/// The end of the list, in both directions.
const NONE: usize = usize::MAX;

#[derive(Debug)]
pub(crate) struct Store {
    /// `None` is free.
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    by_id: FxHashMap<u64, usize>,
    newest: usize,
    oldest: usize,
}

impl Default for Store {
    fn default() -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            by_id: FxHashMap::default(),
            newest: NONE,
            oldest: NONE,
        }
    }
}

impl Store {
    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    /// The memory of the store alone, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Option<Entry>>()
            + self.free.capacity() * size_of::<usize>()
            + self.by_id.capacity() * (size_of::<(u64, usize)>() + 1)
    }

    /// Looks without counting as a use.
    pub(crate) fn get(&self, id: u64) -> Option<&Context> {
        let entry = self.entries[*self.by_id.get(&id)?].as_ref()?;
        Some(&entry.context)
    }

    /// Finds a context and makes it the newest.
    pub(crate) fn touch(&mut self, id: u64) -> Option<&mut Context> {
        let number = *self.by_id.get(&id)?;
        if self.newest != number {
            self.unlink(number);
            self.link(number);
        }
        self.entries[number]
            .as_mut()
            .map(|entry| &mut entry.context)
    }

    /// Adds a context that is not there, as the newest.
    pub(crate) fn insert(&mut self, id: u64, context: Context) {
        let entry = Entry {
            id,
            context,
            newer: NONE,
            older: NONE,
        };
        let number = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[number] = Some(entry);
        self.by_id.insert(id, number);
        self.link(number);
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Context> {
        let number = self.by_id.remove(&id)?;
        self.unlink(number);
        self.free.push(number);
        self.entries[number].take().map(|entry| entry.context)
    }

    /// The context that was not used for longest.
    pub(crate) fn oldest(&self) -> Option<u64> {
        let entry = self.entries.get(self.oldest)?;
        entry.as_ref().map(|entry| entry.id)
    }

    fn entry(&mut self, number: usize) -> Option<&mut Entry> {
        self.entries.get_mut(number)?.as_mut()
    }

    fn unlink(&mut self, number: usize) {
        let Some(&mut Entry { newer, older, .. }) = self.entry(number) else {
            return;
        };
        match self.entry(newer) {
            Some(entry) => entry.older = older,
            None => self.newest = older,
        }
        match self.entry(older) {
            Some(entry) => entry.newer = newer,
            None => self.oldest = newer,
        }
    }

    fn link(&mut self, number: usize) {
        let older = std::mem::replace(&mut self.newest, number);
        match self.entry(older) {
            Some(entry) => entry.newer = number,
            None => self.oldest = number,
        }
        if let Some(entry) = self.entry(number) {
            (entry.newer, entry.older) = (NONE, older);
        }
    }
}

#[cfg(test)]
impl Store {
    /// All contexts, the newest first.
    pub(crate) fn all(&self) -> impl Iterator<Item = (u64, &Context)> {
        let entry = |number: usize| self.entries.get(number)?.as_ref();
        let first = entry(self.newest);
        let all = std::iter::successors(first, move |last| entry(last.older));
        all.map(|entry| (entry.id, &entry.context))
    }
}
