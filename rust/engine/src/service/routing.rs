//! Keys by which requests find replicas and shared KV.

/// The namespace in the prefix index, of a `LoRA` adapter and of a client's `extra_key` and `cache_salt`: KV of different ones is
/// never shared. Injective.
pub(super) fn namespace(adapter: Option<u64>, name: Option<Box<str>>) -> Option<Box<str>> {
    match (adapter, name) {
        (Some(id), name) => Some(match name {
            Some(name) => format!("\0adapter {id}:{name}").into(),
            None => format!("\0adapter {id}").into(),
        }),
        (None, Some(name)) if name.starts_with('\0') => Some(format!("\0{name}").into()),
        (None, name) => name,
    }
}

/// A hash that is equal in all processes, for routers in front of several services.
pub(super) fn hash(key: &str) -> u64 {
    // FNV-1a.
    key.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The replica of a session or routing key, by rendezvous hashing: if one fails, only its keys move to others.
pub(super) fn replica_of(key: u64, alive: impl Iterator<Item = usize>) -> Option<usize> {
    alive.max_by_key(|&replica| mix(key ^ mix(replica as u64 + 1)))
}

/// The finalizer of `SplitMix64`.
const fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_spread_and_only_those_of_a_failed_replica_move() {
        let all = |key| replica_of(key, 0..4).unwrap();
        let mut counts = [0; 4];
        for key in 0..4000 {
            counts[all(key)] += 1;
            let rest = replica_of(key, [0, 1, 3].into_iter()).unwrap();
            assert!(rest == all(key) || all(key) == 2, "{key}");
        }
        assert!(
            counts.iter().all(|count| (900..1100).contains(count)),
            "{counts:?}"
        );
        assert_eq!(replica_of(7, std::iter::empty()), None);
    }
}
