//! Growth of large vectors.

/// Pushes, growing by a quarter: doubling leaves half of a large vector empty.
pub(crate) fn push<T>(vector: &mut Vec<T>, value: T) {
    if vector.len() == vector.capacity() {
        vector.reserve_exact(vector.capacity() / 4 + 16);
    }
    vector.push(value);
}
