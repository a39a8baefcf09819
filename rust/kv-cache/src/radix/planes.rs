//! Tokens in planes: the lower 16 bits of all tokens, then their upper bits.
//!
//! Loops are compiled for several vector widths; the widest of the processor is chosen at run time.
#![expect(
    clippy::inline_always,
    reason = "only what is inlined is compiled for the width that was chosen"
)]

use fearless_simd::prelude::*;
use fearless_simd::{Level, dispatch, u8x32, u16x16, u32x8};

/// Tokens per comparison.
const WINDOW: usize = 32;
/// The empty high plane.
const NOTHING: &[()] = &[(); usize::MAX];

/// Storage of the bits above the lowest 16; the largest token of a buffer decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum High {
    /// Not at all.
    None,
    /// 8 bits.
    Byte,
    /// 16 bits.
    Half,
}

impl High {
    /// The width that these tokens need.
    pub(crate) fn of(tokens: &[u32]) -> Self {
        match dispatch!(Level::new(), _ => union(tokens)) >> 16 {
            0 => Self::None,
            1..=0xFF => Self::Byte,
            _ => Self::Half,
        }
    }

    /// Words of the low and the high plane.
    pub(crate) fn words(self, tokens: usize) -> (usize, usize) {
        let high = match self {
            Self::None => 0,
            Self::Byte => tokens.div_ceil(4),
            Self::Half => tokens.div_ceil(2),
        };
        (tokens.div_ceil(2), high)
    }

    /// Writes tokens to their planes.
    pub(crate) fn write(self, tokens: &[u32], planes: &mut [u32]) {
        self.write_by(Level::new(), tokens, planes);
    }

    fn write_by(self, level: Level, tokens: &[u32], planes: &mut [u32]) {
        let (low, high) = planes.split_at_mut(self.words(tokens.len()).0);
        let low: &mut [u16] = bytemuck::cast_slice_mut(low);
        dispatch!(level, _ => put::<u16, 0>(low, tokens));
        match self {
            Self::None => {}
            Self::Byte => {
                let high: &mut [u8] = bytemuck::cast_slice_mut(high);
                dispatch!(level, _ => put::<u8, 16>(high, tokens));
            }
            Self::Half => {
                let high: &mut [u16] = bytemuck::cast_slice_mut(high);
                dispatch!(level, _ => put::<u16, 16>(high, tokens));
            }
        }
    }
}

/// Tokens in planes.
pub(crate) struct Planes<'a> {
    low: &'a [u16],
    high: HighPlane<'a>,
}

enum HighPlane<'a> {
    None,
    Byte(&'a [u8]),
    Half(&'a [u16]),
}

impl<'a> Planes<'a> {
    /// `count` tokens from `start` on, of a buffer's planes.
    #[inline]
    pub(crate) fn new(
        low: &'a [u32],
        above: &'a [u32],
        high: u32,
        start: usize,
        count: usize,
    ) -> Self {
        let half = |plane| -> &[u16] { &bytemuck::cast_slice(plane)[start..][..count] };
        let high = match high {
            0 => HighPlane::None,
            1 => HighPlane::Byte(&bytemuck::cast_slice(above)[start..][..count]),
            _ => HighPlane::Half(half(above)),
        };
        Self {
            low: half(low),
            high,
        }
    }

    /// Leading tokens that equal `tokens`, which are as many.
    #[inline]
    pub(crate) fn common(&self, tokens: &[u32]) -> usize {
        self.common_by(Level::new(), tokens)
    }

    #[inline]
    fn common_by(&self, level: Level, tokens: &[u32]) -> usize {
        let low = self.low;
        match self.high {
            HighPlane::None => {
                dispatch!(level, simd => common(simd, tokens, low, &NOTHING[..low.len()]))
            }
            HighPlane::Byte(high) => dispatch!(level, simd => common(simd, tokens, low, high)),
            HighPlane::Half(high) => dispatch!(level, simd => common(simd, tokens, low, high)),
        }
    }

    /// Appends all of them to `tokens`.
    pub(crate) fn append_to(&self, tokens: &mut Vec<u32>) {
        let low = self.low;
        match self.high {
            HighPlane::None => tokens.extend(low.iter().copied().map(u32::from)),
            HighPlane::Byte(high) => tokens.extend(low.iter().zip(high).map(join)),
            HighPlane::Half(high) => tokens.extend(low.iter().zip(high).map(join)),
        }
    }
}

/// A part of a token in a plane.
trait Part: Copy {
    /// Truncates bits to this part.
    fn cut(bits: u32) -> Self;

    /// This part as the upper half of a token.
    fn above(self) -> u32;

    /// Widens parts to 16 bits.
    fn halves<S: Simd>(simd: S, parts: &[Self; WINDOW]) -> [u16x16<S>; 2];
}

impl Part for () {
    #[inline(always)]
    fn cut(_: u32) {}

    #[inline(always)]
    fn above(self) -> u32 {
        0
    }

    #[inline(always)]
    fn halves<S: Simd>(simd: S, _: &[Self; WINDOW]) -> [u16x16<S>; 2] {
        [u16x16::splat(simd, 0); 2]
    }
}

impl Part for u8 {
    #[inline(always)]
    fn cut(bits: u32) -> Self {
        bits as Self
    }

    #[inline(always)]
    fn above(self) -> u32 {
        u32::from(self) << 16
    }

    #[inline(always)]
    fn halves<S: Simd>(simd: S, parts: &[Self; WINDOW]) -> [u16x16<S>; 2] {
        u8x32::from_slice(simd, parts).widen().into()
    }
}

impl Part for u16 {
    #[inline(always)]
    fn cut(bits: u32) -> Self {
        bits as Self
    }

    #[inline(always)]
    fn above(self) -> u32 {
        u32::from(self) << 16
    }

    #[inline(always)]
    fn halves<S: Simd>(simd: S, parts: &[Self; WINDOW]) -> [u16x16<S>; 2] {
        let (first, second) = parts.split_at(WINDOW / 2);
        [
            u16x16::from_slice(simd, first),
            u16x16::from_slice(simd, second),
        ]
    }
}

/// Joins the parts of a token.
#[inline(always)]
fn join<T: Part>((low, high): (&u16, &T)) -> u32 {
    u32::from(*low) | high.above()
}

/// The union of all bits.
#[inline(always)]
fn union(tokens: &[u32]) -> u32 {
    let mut union = 0;
    for token in tokens {
        union |= token;
    }
    union
}

/// Writes a part of each token to a plane.
#[inline(always)]
fn put<T: Part, const SHIFT: u32>(plane: &mut [T], tokens: &[u32]) {
    for (part, token) in plane.iter_mut().zip(tokens) {
        *part = T::cut(token >> SHIFT);
    }
}

/// Leading tokens that equal their planes. All slices have the same length.
#[inline(always)]
fn common<S: Simd, T: Part>(simd: S, tokens: &[u32], low: &[u16], high: &[T]) -> usize {
    let mut matched = 0;
    let windows = tokens.as_chunks().0.iter();
    let planes = low.as_chunks().0.iter().zip(high.as_chunks().0);
    for (tokens, (low, high)) in windows.zip(planes) {
        if differ(simd, tokens, low, high) {
            break;
        }
        matched += WINDOW;
    }
    // The rest is compared as the last window, which overlaps the previous one: no loop with an unpredictable end.
    if tokens.len() - matched < WINDOW
        && let (Some(last), Some(low), Some(high)) =
            (tokens.last_chunk(), low.last_chunk(), high.last_chunk())
        && !differ(simd, last, low, high)
    {
        return tokens.len();
    }
    for (token, parts) in tokens[matched..]
        .iter()
        .zip(low[matched..].iter().zip(&high[matched..]))
    {
        if *token != join(parts) {
            break;
        }
        matched += 1;
    }
    matched
}

/// Whether any token differs from the planes.
#[inline(always)]
fn differ<S: Simd, T: Part>(
    simd: S,
    tokens: &[u32; WINDOW],
    low: &[u16; WINDOW],
    high: &[T; WINDOW],
) -> bool {
    let [low_first, low_second] = u16::halves(simd, low);
    let [high_first, high_second] = T::halves(simd, high);
    let (a, b) = low_first.interleave(high_first);
    let (c, d) = low_second.interleave(high_second);
    let stored = [a, b, c, d];
    let none = u32x8::splat(simd, 0);
    let mut difference = none;
    for (part, tokens) in tokens.as_chunks::<8>().0.iter().enumerate() {
        difference |= u32x8::from_slice(simd, tokens) ^ stored[part].bitcast::<u32x8<S>>();
    }
    !difference.simd_eq(none).all_true()
}

#[cfg(test)]
mod tests {
    use fearless_simd::Level;
    use proptest::prelude::*;

    use super::{High, Planes};

    /// The vector levels of this processor; the first is the baseline.
    fn levels() -> Vec<Level> {
        let all = [Level::baseline(), Level::new()];
        #[cfg(target_arch = "x86_64")]
        let all = {
            use fearless_simd::Simd;
            let narrower = [
                Level::new().as_sse4_2().map(Simd::level),
                Level::new().as_avx2().map(Simd::level),
            ];
            all.into_iter().chain(narrower.into_iter().flatten())
        };
        all.into_iter().collect()
    }

    fn token() -> impl Strategy<Value = u32> {
        prop_oneof![Just(u32::from(u16::MAX)), Just((1 << 24) - 1), any::<u32>()]
    }

    proptest! {
        #[test]
        fn all_widths_agree(
            text in prop::collection::vec(token(), 1..300),
            bits in prop::sample::select(vec![16, 24, 32]),
            index in any::<prop::sample::Index>(),
            bit in 0_u32..32,
            start in 0_usize..40,
        ) {
            let text: Vec<u32> = text.iter().map(|token| token & (u32::MAX >> (32 - bits))).collect();
            let high = High::of(&text);
            let (low, above) = high.words(text.len());
            let start = start.min(text.len() - 1);
            let rest = &text[start..];
            let mut other = rest.to_vec();
            let index = index.index(rest.len());
            other[index] ^= 1_u32 << bit;
            for level in levels() {
                let mut words = vec![0; low + above];
                high.write_by(level, &text, &mut words);
                let (low, above) = words.split_at(low);
                let planes = Planes::new(low, above, high as u32, start, rest.len());
                let mut read = Vec::new();
                planes.append_to(&mut read);
                prop_assert_eq!(&read[..], rest);
                prop_assert_eq!(planes.common_by(level, rest), rest.len());
                prop_assert_eq!(planes.common_by(level, &other), index, "{:?}", level);
            }
        }
    }
}
