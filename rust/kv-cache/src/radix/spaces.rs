//! Namespaces: each has a root of its own.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::{Equivalent, HashMap};
use rustc_hash::FxHashMap;

/// A namespace; with pairs of tokens there is one for each first token, too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Space {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) first: Option<u32>,
}

/// A [`Space`] that is looked for.
struct Wanted<'a> {
    name: Option<&'a str>,
    first: Option<u32>,
}

impl Hash for Space {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name.as_deref(), self.first).hash(state);
    }
}

impl Hash for Wanted<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name, self.first).hash(state);
    }
}

impl Equivalent<Space> for Wanted<'_> {
    fn equivalent(&self, space: &Space) -> bool {
        self.name == space.name.as_deref() && self.first == space.first
    }
}

/// Roots by namespace, all but the root of tokens without a namespace: that is node 0.
#[derive(Debug, Clone, Default)]
pub(crate) struct Spaces {
    roots: HashMap<Space, u32, RandomState>,
    names: FxHashMap<u32, Space>,
}

impl Spaces {
    /// The root of a namespace that has one.
    #[inline]
    pub(crate) fn root(&self, name: Option<&str>, first: Option<u32>) -> Option<u32> {
        if name.is_none() && first.is_none() {
            return Some(0);
        }
        self.roots.get(&Wanted { name, first }).copied()
    }

    pub(crate) fn add(&mut self, root: u32, name: Option<Arc<str>>, first: Option<u32>) {
        let space = Space { name, first };
        self.roots.insert(space.clone(), root);
        self.names.insert(root, space);
    }

    pub(crate) fn remove(&mut self, root: u32) {
        if let Some(space) = self.names.remove(&root) {
            self.roots.remove(&space);
        }
    }

    /// The namespace of a root; node 0 has none.
    pub(crate) fn space(&self, root: u32) -> Option<&Space> {
        self.names.get(&root)
    }

    #[cfg(any(test, feature = "check"))]
    pub(crate) fn len(&self) -> usize {
        self.roots.len()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn bytes(&self) -> usize {
        let names = self.names.values().filter_map(|space| space.name.as_ref());
        self.roots.allocation_size()
            + self.names.capacity() * size_of::<(u32, Space)>()
            + names
                .map(|name| name.len() + 2 * size_of::<usize>())
                .sum::<usize>()
    }
}
