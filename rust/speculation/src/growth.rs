//! How the large vectors of an index grow.

/// Pushes with growth by a quarter: doubling would leave half of a large vector empty.
pub(crate) fn push<T>(vector: &mut Vec<T>, value: T) {
    if vector.len() == vector.capacity() {
        vector.reserve_exact(vector.capacity() / 4 + 16);
    }
    vector.push(value);
}
