//! What is worth a log line.

use pie_planner::Plan;
use pie_ring::Publish;

/// Emptied requests of one kind and frame that get a line each. The log shows as many before it limits the kind's rate.
const EACH: usize = 4;

/// One line for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Short stable name; what the line's rate is limited by.
    pub kind: &'static str,
    /// What happened, with the values.
    pub text: String,
}

impl Note {
    pub(crate) fn new(kind: &'static str, text: impl Into<String>) -> Self {
        Self {
            kind,
            text: text.into(),
        }
    }

    /// What is worth a line about emptied requests, which are in their order: a line for each, or one line for all of a
    /// kind if there are many. A frame may have as many bad requests as it has room for, and the next one waits.
    pub(crate) fn of_faults(plan: &Plan) -> Vec<Self> {
        let faults = plan.faults();
        let mut kinds: Vec<(&'static str, usize)> = Vec::new();
        for (_, fault) in faults {
            match kinds.iter_mut().find(|(kind, _)| *kind == fault.kind()) {
                Some((_, count)) => *count += 1,
                None => kinds.push((fault.kind(), 1)),
            }
        }
        let mut notes = Vec::new();
        for (kind, count) in kinds {
            let mut same = faults.iter().filter(|(_, fault)| fault.kind() == kind);
            if count > EACH {
                let others = count - 1;
                notes.extend(same.next().map(|(index, fault)| {
                    let name = name(plan, *index);
                    let text = format!("{name} emptied, and {others} more alike: {fault}");
                    Self::new(kind, text)
                }));
                continue;
            }
            notes.extend(same.map(|(index, fault)| {
                Self::new(kind, format!("{} emptied: {fault}", name(plan, *index)))
            }));
        }
        notes
    }

    /// What is worth a line about a publication: nothing when the client got its answer.
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

/// A request by its place in the batch and its context.
fn name(plan: &Plan, index: usize) -> String {
    let context = plan.context_id(index);
    context.map_or_else(
        || format!("request {index}"),
        |id| format!("request {index} of context {id}"),
    )
}
