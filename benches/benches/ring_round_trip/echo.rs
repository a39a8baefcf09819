//! The payload: cheap to make, cheap to check, and different for each request.

use std::mem::MaybeUninit;

const KEY: u8 = 0x5a;

/// Fills `response` from `request`.
pub(crate) fn answer(request: &[u8], response: &mut [u8]) {
    for (out, byte) in response.iter_mut().zip(request) {
        *out = byte ^ KEY;
    }
}

/// [`answer`] for memory that has not been written yet.
pub(crate) fn answer_uninit(request: &[u8], response: &mut [MaybeUninit<u8>]) {
    for (out, byte) in response.iter_mut().zip(request) {
        out.write(byte ^ KEY);
    }
}

/// A request that changes with every call.
pub(crate) struct Request {
    bytes: Vec<u8>,
    number: u8,
}

impl Request {
    pub(crate) fn new(size: usize) -> Self {
        let bytes = (0..size).map(|index| (index % 251) as u8).collect();
        Self { bytes, number: 0 }
    }

    /// Changes both ends, so that no earlier response can pass for the answer.
    pub(crate) fn next(&mut self) -> &[u8] {
        self.number = self.number.wrapping_add(1);
        let last = self.bytes.len() - 1;
        self.bytes[0] = self.number;
        self.bytes[last] = !self.number;
        &self.bytes
    }
}

/// Looks at the length and both ends.
pub(crate) fn check_ends(request: &[u8], response: &[u8]) {
    let ends = |bytes: &[u8]| (bytes.len(), bytes[0], bytes[bytes.len() - 1]);
    let (len, first, last) = ends(request);
    assert_eq!(ends(response), (len, first ^ KEY, last ^ KEY));
}

/// Looks at every byte.
pub(crate) fn check_all(request: &[u8], response: &[u8]) {
    let mut wanted = vec![0; request.len()];
    answer(request, &mut wanted);
    assert!(response == wanted, "the response is not the request's");
}
