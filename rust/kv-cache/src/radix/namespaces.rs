//! Namespaces: one root each.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use foldhash::fast::RandomState;
use hashbrown::{Equivalent, HashMap};
use rustc_hash::FxHashMap;

/// A namespace; with bigrams there is one for each first token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) name: Option<Arc<str>>,
    pub(crate) first: Option<u32>,
}

/// A borrowed [`Namespace`] for look-ups.
struct Wanted<'a> {
    name: Option<&'a str>,
    first: Option<u32>,
}

impl Hash for Namespace {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name.as_deref(), self.first).hash(state);
    }
}

impl Hash for Wanted<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.name, self.first).hash(state);
    }
}

impl Equivalent<Namespace> for Wanted<'_> {
    fn equivalent(&self, namespace: &Namespace) -> bool {
        self.name == namespace.name.as_deref() && self.first == namespace.first
    }
}

/// Roots by namespace, without node 0, the root of the unnamed one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Namespaces {
    roots: HashMap<Namespace, u32, RandomState>,
    names: FxHashMap<u32, Namespace>,
}

impl Namespaces {
    /// The root of a namespace, if it exists.
    #[inline]
    pub(crate) fn root(&self, name: Option<&str>, first: Option<u32>) -> Option<u32> {
        if name.is_none() && first.is_none() {
            return Some(0);
        }
        self.roots.get(&Wanted { name, first }).copied()
    }

    pub(crate) fn add(&mut self, root: u32, name: Option<Arc<str>>, first: Option<u32>) {
        let namespace = Namespace { name, first };
        self.roots.insert(namespace.clone(), root);
        self.names.insert(root, namespace);
    }

    pub(crate) fn remove(&mut self, root: u32) {
        if let Some(namespace) = self.names.remove(&root) {
            self.roots.remove(&namespace);
        }
    }

    /// The namespace of a root; none of node 0.
    pub(crate) fn namespace(&self, root: u32) -> Option<&Namespace> {
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
        let names = self
            .names
            .values()
            .filter_map(|namespace| namespace.name.as_ref());
        self.roots.allocation_size()
            + self.names.capacity() * size_of::<(u32, Namespace)>()
            + names
                .map(|name| name.len() + 2 * size_of::<usize>())
                .sum::<usize>()
    }
}
