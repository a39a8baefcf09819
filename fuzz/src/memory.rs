//! How much memory an action takes.

use allocation_counter::AllocationInfo;

/// The result of an action, and what it allocated.
pub(crate) fn measured<T>(action: impl FnOnce() -> T) -> (T, AllocationInfo) {
    let mut result = None;
    let info = allocation_counter::measure(|| result = Some(action()));
    (result.expect("the action was run"), info)
}

/// The result of an action, and the most bytes that it held at once beyond what was held before.
pub(crate) fn peak<T>(action: impl FnOnce() -> T) -> (T, usize) {
    let (result, info) = measured(action);
    (result, info.bytes_max as usize)
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;

    #[test]
    fn the_peak_counts_what_is_freed_again() {
        let ((), info) = super::measured(|| {
            drop(black_box(vec![1_u8; 100]));
            drop(black_box(vec![1_u8; 30]));
        });
        assert_eq!((info.bytes_max, info.bytes_current), (100, 0));
    }
}
