//! Keys by which requests find replicas and shared KV.

/// The namespace in the prefix index, of a LoRA adapter and of a client's `extra_key` and `cache_salt`: KV of different ones is
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
