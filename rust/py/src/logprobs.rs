//! Log-probabilities for Python.

use pie_wire::LogprobShape;

/// Log-probability of a token; those of the most probable tokens, with their ids, best first; those of given tokens.
pub(crate) type PositionLogprobs = (f32, Vec<(f32, u32)>, Vec<f32>);

/// The log-probabilities of each position that `words` hold.
pub(crate) fn position_logprobs(
    words: &[u32],
    shape: LogprobShape,
) -> impl Iterator<Item = PositionLogprobs> {
    shape.positions(words).map(|position| {
        let top = position
            .top
            .into_iter()
            .map(|(token, value)| (value, token));
        (position.token, top.collect(), position.given)
    })
}
