//! Log-probabilities for Python.

use pie_wire::LogprobShape;

/// Log-probability of a token; those of the most probable tokens, with their ids, best first; those of given tokens.
pub(crate) type Place = (f32, Vec<(f32, u32)>, Vec<f32>);

/// The places that `words` are.
pub(crate) fn places(words: &[u32], shape: LogprobShape) -> impl Iterator<Item = Place> {
    shape.positions(words).map(|place| {
        let top = place.top.into_iter().map(|(token, value)| (value, token));
        (place.token, top.collect(), place.given)
    })
}
