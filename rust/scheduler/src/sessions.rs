//! What sessions keep between their requests.

use std::collections::BTreeMap;

use pie_kv_cache::radix::NodeId;
use rustc_hash::FxHashMap;

/// Most sessions that are kept. Those whose tokens fill no page would otherwise stay for ever: no lack of pages makes them go.
const MOST: usize = 1 << 16;

/// A session between two requests.
#[derive(Debug, Clone, Copy)]
struct Kept {
    /// Where its tokens end in the index, locked.
    node: NodeId,
    /// `None` while a request has it.
    context: Option<u64>,
    /// Its place in the order of use.
    used: u64,
}

/// Sessions by id, and in the order of use.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    kept: FxHashMap<u64, Kept>,
    order: BTreeMap<u64, u64>,
    uses: u64,
}

impl Sessions {
    /// Keeps a node that is locked. Returns the one that the session kept before, to be unlocked.
    pub(crate) fn keep(&mut self, session: u64, node: NodeId, context: u64) -> Option<NodeId> {
        let former = self.end(session);
        self.uses += 1;
        let used = self.uses;
        self.order.insert(used, session);
        let kept = Kept {
            node,
            context: Some(context),
            used,
        };
        self.kept.insert(session, kept);
        former
    }

    /// The context that a session's next request goes on with; for one request at a time.
    pub(crate) fn take_context(&mut self, session: u64) -> Option<u64> {
        self.kept.get_mut(&session)?.context.take()
    }

    /// A request ended without having run: the next one goes on with its context.
    pub(crate) fn give_context(&mut self, session: u64, context: u64) {
        if let Some(kept) = self.kept.get_mut(&session) {
            kept.context = Some(context);
        }
    }

    /// Forgets a session. Returns its node, to be unlocked.
    pub(crate) fn end(&mut self, session: u64) -> Option<NodeId> {
        let kept = self.kept.remove(&session)?;
        self.order.remove(&kept.used);
        Some(kept.node)
    }

    /// Forgets the least recently used session where there are too many. Returns its node, to be unlocked.
    pub(crate) fn release_surplus(&mut self) -> Option<NodeId> {
        (self.kept.len() > MOST)
            .then(|| self.release_oldest())
            .flatten()
    }

    /// Forgets the session that was used least recently. Returns its node, to be unlocked.
    pub(crate) fn release_oldest(&mut self) -> Option<NodeId> {
        let (_, session) = self.order.pop_first()?;
        self.kept.remove(&session).map(|kept| kept.node)
    }

    pub(crate) fn clear(&mut self) {
        self.kept.clear();
        self.order.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_never_more_than_the_most() {
        let mut sessions = Sessions::default();
        for session in 0..2 * MOST as u64 {
            assert_eq!(sessions.keep(session, NodeId::default(), session), None);
            let surplus = sessions.release_surplus();
            assert_eq!(surplus.is_some(), session >= MOST as u64);
            assert!(sessions.kept.len() <= MOST && sessions.order.len() <= MOST);
        }
        // The oldest went.
        assert_eq!(sessions.take_context(0), None);
        assert_eq!(sessions.take_context(MOST as u64), Some(MOST as u64));
    }
}
