//! Log lines of the driver.

use pie_planner::Plan;
use pie_ring::Publish;

/// Maximum rejected requests of one kind and frame with a line each; as many as the log's rate limit admits.
const EACH: usize = 4;

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// Short stable name, the key of the rate limit.
    pub kind: &'static str,
    /// The text.
    pub text: String,
}

impl LogLine {
    pub(crate) fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// Lines about rejected requests: one each, or one for all of a kind if there are many, since the next frame waits.
    pub(crate) fn of_request_errors(plan: &Plan) -> Vec<Self> {
        let errors = plan.request_errors();
        let mut kinds: Vec<(&'static str, usize)> = Vec::new();
        for (_, error) in errors {
            match kinds.iter_mut().find(|(kind, _)| *kind == error.kind()) {
                Some((_, count)) => *count += 1,
                None => kinds.push((error.kind(), 1)),
            }
        }
        let mut log_lines = Vec::new();
        for (kind, count) in kinds {
            let mut same = errors.iter().filter(|(_, error)| error.kind() == kind);
            if count > EACH {
                let others = count - 1;
                log_lines.extend(same.next().map(|(index, error)| {
                    let name = name(plan, *index);
                    let text = format!("{name} rejected, and {others} more like it: {error}");
                    Self::new(kind, text)
                }));
                continue;
            }
            log_lines.extend(same.map(|(index, error)| {
                Self::new(kind, format!("{} rejected: {error}", name(plan, *index)))
            }));
        }
        log_lines
    }

    /// A line about a response that was not delivered.
    pub(crate) fn of_publication<E: ToString>(published: Result<Publish, E>) -> Option<Self> {
        match published {
            Ok(Publish::Delivered) => None,
            Ok(Publish::Stale) => {
                let text = "the client gave up on a request before its answer was ready";
                Some(Self::new("stale", text))
            }
            Err(error) => Some(Self::new("ring", error.to_string())),
        }
    }
}

/// A request by its index in the batch and its context.
fn name(plan: &Plan, index: usize) -> String {
    let context = plan.context_id(index);
    context.map_or_else(
        || format!("request {index}"),
        |id| format!("request {index} of context {id}"),
    )
}
