//! Text for the drafter: words of a Zipf distribution, and phrases that were said before.

/// Tokens of the vocabulary.
const VOCAB: f64 = 30_000.0;
/// Share of tokens at which something said before is begun again.
const REPEATS: u64 = 8;

/// Pseudo-random numbers (xorshift).
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % below
    }
}

/// So many tokens, the same for the same seed.
#[must_use]
pub fn text(length: usize, seed: u64) -> Vec<u32> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut text: Vec<u32> = Vec::with_capacity(length + 64);
    while text.len() < length {
        if text.len() > 64 && random.next(REPEATS) == 0 {
            // Half of what is repeated lies close.
            let reach = if random.next(2) == 0 {
                1000
            } else {
                text.len()
            };
            let start = text.len() - 1 - random.next((reach.min(text.len()) - 1) as u64) as usize;
            let count = 2 + random.next(30) as usize;
            for at in start..start + count {
                text.push(text[at]);
            }
        } else {
            let uniform = random.next(1 << 32) as f64 / (1_u64 << 32) as f64;
            text.push(VOCAB.powf(uniform) as u32 - 1);
        }
    }
    text.truncate(length);
    text
}
