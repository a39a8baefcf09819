//! Sessions: prefixes that stay locked between the requests of a conversation.

use std::collections::BTreeMap;

use pie_kv_cache::radix::NodeId;
use rustc_hash::FxHashMap;

/// Most sessions. Those without a full page would otherwise stay forever, since eviction does not end them.
const MOST: usize = 1 << 16;

/// A session.
#[derive(Debug, Clone, Copy)]
struct SessionEntry {
    /// The locked node at the end of its tokens.
    node: NodeId,
    /// Context id at the driver; `None` while a request uses it.
    context: Option<u64>,
    /// Key in the order of use.
    used: u64,
}

/// Sessions by id, and in the order of use.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    kept: FxHashMap<u64, SessionEntry>,
    order: BTreeMap<u64, u64>,
    uses: u64,
}

impl Sessions {
    /// Keeps a locked node. Returns the previous one of the session, to be unlocked.
    pub(crate) fn keep(&mut self, session: u64, node: NodeId, context: u64) -> Option<NodeId> {
        let former = self.end(session);
        self.uses += 1;
        let used = self.uses;
        self.order.insert(used, session);
        let kept = SessionEntry {
            node,
            context: Some(context),
            used,
        };
        self.kept.insert(session, kept);
        former
    }

    /// Takes the context for a session's next request; one request at a time.
    pub(crate) fn take_context(&mut self, session: u64) -> Option<u64> {
        self.kept.get_mut(&session)?.context.take()
    }

    /// Returns the context of a request that ended without having run.
    pub(crate) fn give_context(&mut self, session: u64, context: u64) {
        if let Some(kept) = self.kept.get_mut(&session) {
            kept.context = Some(context);
        }
    }

    /// Ends a session. Returns its node, to be unlocked.
    pub(crate) fn end(&mut self, session: u64) -> Option<NodeId> {
        let kept = self.kept.remove(&session)?;
        self.order.remove(&kept.used);
        Some(kept.node)
    }

    /// Ends the least recently used session if there are too many. Returns its node, to be unlocked.
    pub(crate) fn release_surplus(&mut self) -> Option<NodeId> {
        (self.kept.len() > MOST)
            .then(|| self.release_oldest())
            .flatten()
    }

    /// Ends the least recently used session. Returns its node, to be unlocked.
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
    fn sessions_are_limited() {
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
