//! Counter-based uniform numbers: one per sampling slot, a pure function of its key.
//!
//! The mixer is `SplitMix64`'s output function (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
//! OOPSLA 2014), applied once per key word.

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A uniform number in `[0, 1)` with 24 random bits, keyed by three words.
pub(crate) const fn uniform(seed: u64, step: u64, slot: u64) -> f32 {
    let a = mix(seed.wrapping_add(GOLDEN));
    let b = mix(a ^ step.wrapping_mul(GOLDEN).wrapping_add(GOLDEN));
    let c = mix(b ^ slot.wrapping_mul(GOLDEN).wrapping_add(GOLDEN));
    (c >> 40) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::uniform;

    #[test]
    fn stays_in_range_and_spreads_over_it() {
        let mut buckets = [0_u32; 16];
        for step in 0..16_000 {
            let value = uniform(42, step, step % 7);
            assert!((0.0..1.0).contains(&value));
            buckets[(value * 16.0) as usize] += 1;
        }
        // 1000 expected in each, standard deviation 31.
        assert!(
            buckets.iter().all(|&n| (850..1150).contains(&n)),
            "{buckets:?}"
        );
    }

    #[test]
    fn every_word_of_the_key_counts() {
        let base = uniform(2, 3, 4);
        assert_eq!(base.to_bits(), uniform(2, 3, 4).to_bits());
        for other in [
            uniform(3, 3, 4),
            uniform(2, 4, 4),
            uniform(2, 3, 5),
            uniform(2, 4, 3),
        ] {
            assert_ne!(base.to_bits(), other.to_bits());
        }
    }
}
