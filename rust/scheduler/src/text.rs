//! The text of tokens, which is the caller's.

/// What a token adds to the text of a sequence, for stop strings.
pub trait TokenBytes: Send + Sync {
    /// The bytes of a token wherever it stands; none for a token that does not show, or that there is not.
    fn bytes(&self, token: u32) -> &[u8];
}

/// Bytes by token.
impl TokenBytes for Vec<Box<[u8]>> {
    fn bytes(&self, token: u32) -> &[u8] {
        self.get(token as usize).map_or(&[], |bytes| bytes)
    }
}
