//! The span of a request in the `time_stats` that `SGLang`'s front end sends: a pickled `ReqTimeStatsBase`, whose `trace_ctx` has the
//! headers by which W3C's Trace Context passes spans on.

use pie_engine::TraceParent;

/// The header's name as the pickle has it, up to the value: the end of a short text, the opcode that memoizes it, and the opcode of
/// a text of 55 bytes. No text of a client can have these bytes: they are not UTF-8.
const BEFORE: &[u8] = b"traceparent\x94\x8c\x37";
/// Bytes of the value.
const VALUE: usize = 0x37;

/// The span, if the front end records one.
pub(crate) fn parent(pickle: &[u8]) -> Option<TraceParent> {
    let mut found = pickle.windows(BEFORE.len());
    let start = found.position(|bytes| bytes == BEFORE)? + BEFORE.len();
    let parent = TraceParent::parse(pickle.get(start..start + VALUE)?);
    parent.filter(|parent| parent.is_sampled)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn pickled(parent: &str) -> Vec<u8> {
        let length = [parent.len() as u8];
        [
            &b"}\x94\x8c\x0btraceparent\x94\x8c"[..],
            &length,
            parent.as_bytes(),
            b"\x94s",
        ]
        .concat()
    }

    #[test]
    fn the_span_is_found_in_its_place_alone() {
        let found = parent(&pickled(PARENT)).unwrap();
        assert_eq!(found, TraceParent::parse(PARENT.as_bytes()).unwrap());
        assert_eq!(parent(&pickled(&PARENT.replace("-01", "-00"))), None);
        assert_eq!(parent(&pickled(&PARENT.replace('f', "g"))), None);
        assert_eq!(parent(&pickled(&PARENT[1..])), None);
        let whole = pickled(PARENT);
        for end in 0..whole.len() - 2 {
            assert_eq!(parent(&whole[..end]), None, "{end}");
        }
        // A name that a client chose.
        let name = format!("\u{8c}\u{b}traceparent\u{94}\u{8c}7{PARENT}");
        assert_eq!(parent(name.as_bytes()), None);
    }
}
