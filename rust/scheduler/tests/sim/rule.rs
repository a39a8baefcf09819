//! The simulated model: its next token is a pure function of all tokens so far.

/// Tokens of the model.
pub const VOCAB: u32 = 40;

fn mix(value: u64) -> u64 {
    // The finalizer of SplitMix64.
    let value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}

/// What a model knows after some tokens. `kv` depends on all of them in their order, as a real one does; `sum` on the KV of
/// each, so that a wrong page anywhere changes what comes next.
#[derive(Debug, Clone, Copy)]
pub struct Mind {
    kv: u64,
    sum: u64,
}

impl Mind {
    /// Before the first token, in a namespace.
    pub fn new(salt: u64) -> Self {
        Self {
            kv: mix(salt ^ 0x5EED),
            sum: 0,
        }
    }

    /// Reads a token. Returns its KV.
    pub fn read(&mut self, token: u32) -> u64 {
        self.recall(mix(
            self.kv ^ (u64::from(token) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        ));
        self.kv
    }

    /// Continues after a token whose KV is stored.
    pub fn recall(&mut self, kv: u64) {
        self.kv = kv;
        self.sum = self.sum.wrapping_add(mix(kv ^ 0xA77E));
    }

    /// Words of log-probabilities that it has of a token that may come next.
    pub fn score(self, token: u32, words: u32) -> impl Iterator<Item = u32> {
        let key = mix(self.sum ^ u64::from(token) << 24);
        (0..u64::from(words)).map(move |word| mix(key ^ word) as u32)
    }

    /// The next token of a sample, which is none of the forbidden ones.
    pub fn next(self, sample: u32, forbidden: &[u32]) -> u32 {
        let sampled = (mix(self.sum ^ u64::from(sample) << 32) % u64::from(VOCAB)) as u32;
        (0..VOCAB)
            .map(|step| (sampled + step) % VOCAB)
            .find(|token| !forbidden.contains(token))
            .expect("not all are forbidden")
    }
}

/// Bytes by token, of three letters, so that texts repeat.
pub fn text() -> Vec<Box<[u8]>> {
    (0..VOCAB)
        .map(|token| {
            let letter = |at| b'a' + (mix(u64::from(token * 7 + at)) % 3) as u8;
            (0..token % 4).map(letter).collect()
        })
        .collect()
}
