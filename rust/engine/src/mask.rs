//! Token masks of the wire format: bits, or run lengths (BRLE).

use std::borrow::Cow;

use pie_wire::Brle;

/// The run lengths of all tokens but `forbidden`, which is sorted.
pub(crate) fn except(forbidden: &[u32]) -> Brle {
    // Runs of zeros and ones alternate, zeros first.
    let mut buffer = vec![0];
    let mut end = 0;
    for &token in forbidden {
        match buffer.last_mut() {
            // Consecutive tokens share a run.
            Some(run) if token == end => *run += 1,
            _ => buffer.extend([token - end, 1]),
        }
        end = token.saturating_add(1);
    }
    buffer.push(u32::MAX - end);
    Brle {
        buffer,
        total_size: u32::MAX.into(),
    }
}

/// Writes the bits of all tokens but `forbidden`; of all tokens, if none is left.
pub(crate) fn write_bits_except(bits: &mut Vec<u32>, forbidden: &[u32], vocab_size: u32) {
    let words = vocab_size.div_ceil(32) as usize;
    let fill = |bits: &mut Vec<u32>| {
        bits.clear();
        bits.resize(words, u32::MAX);
        if let (Some(last), rest @ 1..) = (bits.last_mut(), vocab_size % 32) {
            *last = (1 << rest) - 1;
        }
    };
    fill(bits);
    if !remove(bits, forbidden) {
        fill(bits);
    }
}

/// Writes `mask` without the forbidden tokens to `bits`, as `words` words; the whole mask, if none is left.
pub(crate) fn write_bits(bits: &mut Vec<u32>, mask: &[u32], forbidden: &[u32], words: usize) {
    bits.clear();
    bits.extend_from_slice(mask);
    if !remove(bits, forbidden) {
        bits.copy_from_slice(mask);
    }
    bits.resize(words, 0);
}

/// The run lengths of `mask` without the forbidden tokens; of the whole mask, if none is left.
pub(crate) fn only(mask: &[u32], forbidden: &[u32]) -> Brle {
    runs(&without(mask, forbidden))
}

/// `mask` without the forbidden tokens; unchanged where it has none of them, or no others.
fn without<'a>(mask: &'a [u32], forbidden: &[u32]) -> Cow<'a, [u32]> {
    if !forbidden.iter().any(|&token| bit(mask, token as usize)) {
        return Cow::Borrowed(mask);
    }
    let mut left = mask.to_vec();
    if remove(&mut left, forbidden) {
        Cow::Owned(left)
    } else {
        Cow::Borrowed(mask)
    }
}

/// Removes tokens from a mask. Returns whether others are left.
fn remove(mask: &mut [u32], tokens: &[u32]) -> bool {
    for &token in tokens {
        if let Some(word) = mask.get_mut(token as usize / 32) {
            *word &= !(1 << (token % 32));
        }
    }
    mask.iter().any(|&word| word != 0)
}

fn bit(mask: &[u32], at: usize) -> bool {
    mask.get(at / 32)
        .is_some_and(|word| word >> (at % 32) & 1 == 1)
}

/// The run lengths of a bitmask, zeros first.
fn runs(mask: &[u32]) -> Brle {
    let mut buffer = Vec::new();
    let (mut value, mut run) = (0, 0_u32);
    for &word in mask {
        let mut left = 32;
        let mut word = word;
        while left > 0 {
            let same = if value == 0 {
                word.trailing_zeros()
            } else {
                word.trailing_ones()
            };
            let same = same.min(left);
            run += same;
            left -= same;
            if left > 0 {
                buffer.push(run);
                (value, run) = (1 - value, 0);
                word >>= same;
            }
        }
    }
    buffer.push(run);
    Brle {
        buffer,
        total_size: 32 * mask.len() as u64,
    }
}

#[cfg(test)]
mod tests {
    use pie_scheduler::is_shorter_as_bits;
    use pie_wire::brle;
    use proptest::prelude::*;

    use super::*;

    fn tokens(mask: &Brle) -> Vec<u64> {
        brle::true_ranges(&mask.buffer, 400).flatten().collect()
    }

    proptest! {
        #[test]
        fn bits_are_the_tokens_of_the_runs(
            words in prop::collection::vec(any::<u32>(), 1..9),
            forbidden in prop::collection::vec(0..300_u32, 0..4),
            more in 0..3_usize,
        ) {
            let wanted = tokens(&only(&words, &forbidden));
            let length = words.len() + more;
            if is_shorter_as_bits(&words, length) {
                // A reused buffer that is longer than this mask.
                let mut found = vec![u32::MAX; 20];
                write_bits(&mut found, &words, &forbidden, length);
                prop_assert_eq!(found.len(), length);
                prop_assert_eq!(tokens(&runs(&found)), wanted);
            } else {
                prop_assert!(runs(&words).buffer.len() <= length + 1);
            }
        }

        #[test]
        fn runs_are_the_bits_in_their_shortest_form(
            words in prop::collection::vec(prop_oneof![Just(0), Just(u32::MAX), any::<u32>()], 0..9),
        ) {
            let bits = (0..32 * words.len()).map(|at| bit(&words, at));
            let (found, wanted) = (runs(&words), brle::encode(bits));
            prop_assert_eq!(tokens(&found), tokens(&wanted));
            prop_assert!(found.buffer.len() <= wanted.buffer.len().max(1));
            prop_assert_eq!(found.total_size, 32 * words.len() as u64);
        }

        #[test]
        fn forbidden_tokens_are_left_out_unless_no_other_is_left(
            words in prop::collection::vec(prop_oneof![Just(0), 0_u32..8, any::<u32>()], 1..9),
            forbidden in prop::collection::vec(0_u32..300, 0..6),
        ) {
            let all: Vec<u64> = (0..32 * words.len() as u64).filter(|&at| bit(&words, at as usize)).collect();
            let left = all.iter().copied().filter(|&token| !forbidden.contains(&(token as u32)));
            let left: Vec<u64> = left.collect();
            let wanted = if left.is_empty() { all } else { left };
            prop_assert_eq!(tokens(&only(&words, &forbidden)), wanted);
        }

        #[test]
        fn a_mask_is_copied_only_to_leave_tokens_out(
            words in prop::collection::vec(prop_oneof![Just(0), 0_u32..8, any::<u32>()], 1..9),
            forbidden in prop::collection::vec(0_u32..300, 0..6),
        ) {
            let found = without(&words, &forbidden);
            prop_assert_eq!(matches!(found, Cow::Owned(_)), *found != words);
        }

        #[test]
        fn all_tokens_but_the_forbidden_ones_are_allowed(forbidden in prop::collection::btree_set(0_u32..399, 0..9)) {
            let forbidden: Vec<u32> = forbidden.into_iter().collect();
            let wanted: Vec<u64> = (0..400).filter(|&token| !forbidden.contains(&(token as u32))).collect();
            prop_assert_eq!(&tokens(&except(&forbidden)), &wanted);
            let mut bits = vec![7];
            write_bits_except(&mut bits, &forbidden, 400);
            prop_assert_eq!(tokens(&runs(&bits)), wanted);
        }
    }
}
