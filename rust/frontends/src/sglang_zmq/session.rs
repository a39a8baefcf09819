//! Sessions: a client opens one, and each of its requests continues from the tokens of an earlier one.
//!
//! A session is a tree of turns, named by their requests. One that streams has a single turn: the last that ended well.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pie_ingress::shown;

/// What a request says of its session: `SGLang`'s `SessionParams`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SessionParams {
    /// The session's name.
    pub id: String,
    /// The turn to continue from; without one the request begins anew, or continues from the last turn of a session that streams.
    pub rid: Option<String>,
    /// Where the request's own tokens begin, after so many of that turn's; counted from their end if it is below 0.
    pub offset: i64,
    /// Turns that continued from there are dropped; without `rid` all turns.
    pub replace: bool,
    /// Continue from the turn's prompt, without its output.
    pub drops_output: bool,
}

/// What a turn takes besides its tokens, in tokens.
const TURN_TOKENS: usize = 64;

/// All open sessions.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    open: HashMap<String, Session>,
    /// Sessions so far; the backend knows each by its number.
    count: u64,
}

#[derive(Debug)]
struct Session {
    number: u64,
    streams: bool,
    patience: Option<Duration>,
    used: Instant,
    turns: HashMap<String, Turn>,
    /// The turn under way of a session that streams.
    next: Option<(String, Turn)>,
    closes: bool,
}

#[derive(Debug, Default)]
struct Turn {
    prompt: Vec<u32>,
    output: Vec<u32>,
    children: Vec<String>,
    /// The backend's id of its request, which has not ended.
    request: Option<u64>,
}

/// A request that continues in a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SessionTurn {
    /// What the backend calls the session.
    pub(crate) number: u64,
    parent: Option<String>,
    replaces: bool,
}

impl Sessions {
    /// Opens a session; false if there is one of that name.
    pub(crate) fn open(
        &mut self,
        id: &str,
        streams: bool,
        patience: Option<Duration>,
        now: Instant,
    ) -> bool {
        if self.open.contains_key(id) {
            return false;
        }
        self.count += 1;
        let session = Session {
            number: self.count,
            streams,
            patience,
            used: now,
            turns: HashMap::new(),
            next: None,
            closes: false,
        };
        self.open.insert(id.to_owned(), session);
        true
    }

    /// Closes a session; one that streams is closed when its turn under way has ended. Returns the number of a session that
    /// is closed now.
    pub(crate) fn close(&mut self, id: &str) -> Option<u64> {
        let session = self.open.get_mut(id)?;
        if session.next.is_some() {
            session.closes = true;
            return None;
        }
        self.open.remove(id).map(|session| session.number)
    }

    /// Closes sessions that were not used for longer than they allow. Returns their numbers.
    pub(crate) fn reap(&mut self, now: Instant) -> Vec<u64> {
        let late = |session: &Session| {
            let idle = now.saturating_duration_since(session.used);
            session.patience.is_some_and(|patience| idle > patience)
        };
        let names = self.open.iter().filter(|(_, session)| late(session));
        let names: Vec<String> = names.map(|(id, _)| id.clone()).collect();
        names.iter().filter_map(|id| self.close(id)).collect()
    }

    /// Whether a session is open, and not another one of its name.
    pub(crate) fn has(&self, id: &str, number: u64) -> bool {
        self.open
            .get(id)
            .is_some_and(|session| session.number == number)
    }

    /// Tokens that the turns of a session hold together; one that holds few counts for some more.
    pub(crate) fn tokens(&self, id: &str) -> u64 {
        let turns = self.open.get(id).map(|session| session.turns.values());
        let tokens = |turn: &Turn| TURN_TOKENS + turn.prompt.len() + turn.output.len();
        turns
            .into_iter()
            .flatten()
            .map(|turn| tokens(turn) as u64)
            .sum()
    }

    /// How many are open.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// The whole prompt of a request whose own tokens are `own`, or why it cannot continue.
    pub(crate) fn begin(
        &mut self,
        params: &SessionParams,
        own: &[u32],
        bos: Option<u32>,
        now: Instant,
    ) -> Result<(Vec<u32>, SessionTurn), String> {
        let id = &params.id;
        let Some(session) = self.open.get_mut(id) else {
            return Err(format!(
                "Invalid request: session id {} does not exist: open it by `/open_session`",
                shown(id)
            ));
        };
        if session.closes {
            return Err(format!(
                "Invalid request: close was requested for session {}",
                shown(id)
            ));
        }
        session.used = now;
        let parent = session.parent(params)?;
        let former = parent.as_deref().and_then(|rid| session.turns.get(rid));
        let prompt = match former {
            None => own.to_vec(),
            Some(turn) => turn.followed_by(params, without_bos(own, bos)),
        };
        let begun = SessionTurn {
            number: session.number,
            parent,
            replaces: params.replace,
        };
        Ok((prompt, begun))
    }

    /// A request that has begun is under way. Returns the requests whose turns it replaces; they are to be ended.
    pub(crate) fn start(
        &mut self,
        id: &str,
        rid: &str,
        begun: SessionTurn,
        (prompt, request): (Vec<u32>, u64),
    ) -> Vec<u64> {
        let Some(session) = self.open.get_mut(id) else {
            return Vec::new();
        };
        let turn = Turn {
            prompt,
            request: Some(request),
            ..Turn::default()
        };
        if session.streams {
            session.next = Some((rid.to_owned(), turn));
            return Vec::new();
        }
        let replaced = if begun.replaces {
            session.replace(begun.parent.as_deref())
        } else {
            Vec::new()
        };
        let parent = begun.parent.and_then(|rid| session.turns.get_mut(&rid));
        if let Some(parent) = parent {
            parent.children.push(rid.to_owned());
        }
        session.turns.insert(rid.to_owned(), turn);
        replaced
    }

    /// A request has new tokens.
    pub(crate) fn take(&mut self, id: &str, rid: &str, request: u64, tokens: &[u32]) {
        if let Some(turn) = self.turn(id, rid, request) {
            turn.output.extend_from_slice(tokens);
        }
    }

    /// A request has ended; `well` if it was neither aborted nor failed. Returns the number of a session that was to be closed
    /// after it.
    pub(crate) fn end(&mut self, id: &str, rid: &str, request: u64, well: bool) -> Option<u64> {
        self.turn(id, rid, request)?.request = None;
        let session = self.open.get_mut(id)?;
        if let Some((rid, turn)) = session.next.take() {
            if well {
                session.turns.clear();
                session.turns.insert(rid, turn);
            }
            if session.closes {
                return self.close(id);
            }
        }
        None
    }

    /// The turn of a request that has not ended; another one may have taken its name.
    fn turn(&mut self, id: &str, rid: &str, request: u64) -> Option<&mut Turn> {
        let session = self.open.get_mut(id)?;
        let turn = match &mut session.next {
            Some((name, turn)) => (name == rid).then_some(turn),
            None => session.turns.get_mut(rid),
        };
        turn.filter(|turn| turn.request == Some(request))
    }
}

impl Session {
    /// The turn that a request continues from.
    fn parent(&self, params: &SessionParams) -> Result<Option<String>, String> {
        if self.streams {
            return self.last_turn(params);
        }
        let Some(rid) = &params.rid else {
            return Ok(None);
        };
        match self.turns.get(rid) {
            None => Err(format!(
                "Invalid request session id: the session {} has no request {}",
                shown(&params.id),
                shown(rid)
            )),
            Some(turn) if turn.request.is_some() && !params.replace => {
                Err("Session request is appending to a request that hasn't finished.".to_owned())
            }
            Some(_) => Ok(Some(rid.clone())),
        }
    }

    /// What a session that streams continues from.
    fn last_turn(&self, params: &SessionParams) -> Result<Option<String>, String> {
        let refused = [
            (params.replace, "replace"),
            (params.drops_output, "drop_previous_output"),
            (params.offset != 0, "offset"),
        ];
        if self.next.is_some() {
            return Err("Streaming session already has an active request.".to_owned());
        }
        match refused.into_iter().find(|&(asked, _)| asked) {
            Some((_, name)) => Err(format!("Streaming sessions do not support {name}.")),
            None => Ok(self.turns.keys().next().cloned()),
        }
    }

    /// Drops what continued from a turn, or all turns. Returns the requests that are to be ended.
    fn replace(&mut self, parent: Option<&str>) -> Vec<u64> {
        let Some(parent) = parent else {
            return self
                .turns
                .drain()
                .filter_map(|(_, turn)| turn.request)
                .collect();
        };
        let mut ended = Vec::new();
        let Some(turn) = self.turns.get_mut(parent) else {
            return ended;
        };
        // It stays, as far as it has come.
        ended.extend(turn.request.take());
        let mut dropped = std::mem::take(&mut turn.children);
        while let Some(rid) = dropped.pop() {
            if let Some(turn) = self.turns.remove(&rid) {
                ended.extend(turn.request);
                dropped.extend(turn.children);
            }
        }
        ended
    }
}

impl Turn {
    /// Its tokens, and then those of the next request.
    fn followed_by(&self, params: &SessionParams, own: &[u32]) -> Vec<u32> {
        let mut tokens = self.prompt.clone();
        if !params.drops_output {
            tokens.extend_from_slice(&self.output);
        }
        if params.offset != 0 {
            let kept = match usize::try_from(params.offset) {
                Ok(kept) => kept,
                Err(_) => tokens
                    .len()
                    .saturating_sub(params.offset.unsigned_abs() as usize),
            };
            tokens.truncate(kept);
        }
        tokens.extend_from_slice(own);
        tokens
    }
}

/// A turn that continues does not begin a text.
fn without_bos(tokens: &[u32], bos: Option<u32>) -> &[u32] {
    match tokens.split_first() {
        Some((first, rest)) if bos == Some(*first) => rest,
        _ => tokens,
    }
}

#[cfg(test)]
mod tests;
