//! libFuzzer's entry: the environment variable `TARGET` names the target.

#![no_main]

use std::sync::LazyLock;

static TARGET: LazyLock<fn(&[u8])> = LazyLock::new(|| {
    let name = std::env::var("TARGET").unwrap_or_default();
    let known = pie_fuzz::TARGETS.iter().find(|(target, _)| *target == name);
    known
        .unwrap_or_else(|| {
            panic!(
                "TARGET must be one of {:?}",
                pie_fuzz::TARGETS.map(|(name, _)| name)
            )
        })
        .1
});

libfuzzer_sys::fuzz_target!(|data: &[u8]| TARGET(data));
