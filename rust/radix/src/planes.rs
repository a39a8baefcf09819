//! Tokens of a buffer in planes: the lower 16 bits of all of them, then their upper bits.

/// Tokens that are compared at once, or twice as many. A page often has as many, so that nothing is left over.
const LANES: usize = 16;

/// How the bits of a token above the lowest 16 are stored; the largest token of a buffer decides.
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
    /// What these tokens need.
    pub(crate) fn of(tokens: &[u32]) -> Self {
        let (chunks, rest) = tokens.as_chunks::<LANES>();
        let mut union = [0; LANES];
        for chunk in chunks {
            for lane in 0..LANES {
                union[lane] |= chunk[lane];
            }
        }
        let union = union
            .iter()
            .chain(rest)
            .fold(0, |union, token| union | token);
        match union >> 16 {
            0 => Self::None,
            1..=0xFF => Self::Byte,
            _ => Self::Half,
        }
    }

    /// Words of the planes of so many tokens: the lower and the upper ones.
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
        let (low, high) = planes.split_at_mut(self.words(tokens.len()).0);
        put(low, tokens, |token| token as u16);
        match self {
            Self::None => {}
            Self::Byte => put(high, tokens, |token| (token >> 16) as u8),
            Self::Half => put(high, tokens, |token| (token >> 16) as u16),
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

    /// How many leading tokens equal these, which are as many.
    #[inline]
    pub(crate) fn common(&self, tokens: &[u32]) -> usize {
        match self.high {
            HighPlane::None => common_low(tokens, self.low),
            HighPlane::Byte(high) => common(tokens, self.low, high),
            HighPlane::Half(high) => common(tokens, self.low, high),
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

/// A token of its parts.
#[inline]
fn join<T: Copy + Into<u32>>((low, high): (&u16, &T)) -> u32 {
    u32::from(*low) | (*high).into() << 16
}

/// Writes a part of each token to a plane.
fn put<T: bytemuck::Pod>(words: &mut [u32], tokens: &[u32], part: impl Fn(u32) -> T) {
    let plane: &mut [T] = bytemuck::cast_slice_mut(words);
    let (chunks, rest) = tokens.as_chunks::<LANES>();
    let (places, left) = plane[..tokens.len()].as_chunks_mut::<LANES>();
    for (places, chunk) in places.iter_mut().zip(chunks) {
        *places = chunk.map(&part);
    }
    for (place, &token) in left.iter_mut().zip(rest) {
        *place = part(token);
    }
}

/// Leading tokens that equal their planes. All slices are of one length.
fn common<T: Copy + Into<u32>>(tokens: &[u32], low: &[u16], high: &[T]) -> usize {
    let mut agreed = chunks::<{ 2 * LANES }, T>(tokens, low, high);
    agreed += chunks::<LANES, T>(&tokens[agreed..], &low[agreed..], &high[agreed..]);
    let parts = low[agreed..].iter().zip(&high[agreed..]);
    let rest = tokens[agreed..].iter().zip(parts);
    agreed
        + rest
            .take_while(|(token, parts)| **token == join(*parts))
            .count()
}

/// Tokens of the leading chunks that equal their planes.
#[inline]
fn chunks<const N: usize, T: Copy + Into<u32>>(tokens: &[u32], low: &[u16], high: &[T]) -> usize {
    let chunks = tokens.as_chunks::<N>().0.iter();
    let planes = low.as_chunks::<N>().0.iter().zip(high.as_chunks::<N>().0);
    let mut agreed = 0;
    for (tokens, (low, high)) in chunks.zip(planes) {
        let difference = (0..N).fold(0, |difference, lane| {
            difference | (tokens[lane] ^ join((&low[lane], &high[lane])))
        });
        if difference != 0 {
            break;
        }
        agreed += N;
    }
    agreed
}

/// The same where all tokens of the plane are below 2¹⁶.
fn common_low(tokens: &[u32], low: &[u16]) -> usize {
    let chunks = tokens.as_chunks::<LANES>().0.iter();
    let mut agreed = 0;
    for (tokens, low) in chunks.zip(low.as_chunks::<LANES>().0) {
        let difference = (0..LANES).fold(0, |difference, lane| {
            difference | (tokens[lane] ^ u32::from(low[lane]))
        });
        if difference != 0 {
            break;
        }
        agreed += LANES;
    }
    let rest = tokens[agreed..].iter().zip(&low[agreed..]);
    agreed
        + rest
            .take_while(|(token, low)| **token == u32::from(**low))
            .count()
}
