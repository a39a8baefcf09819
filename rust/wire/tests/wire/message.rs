//! A payload of any form, as the tests pass it around.

use pie_wire::{
    Frame, Reply, ResponseFrame, WireError, decode_reply, decode_request, decode_response,
    encode_fast_tokens, encode_request, encode_response, fast_tokens_len, request_len,
};
use rkyv::util::AlignedVec;

/// A buffer that satisfies the alignment of requests and responses.
pub(crate) type Bytes = AlignedVec<8>;

/// An owned payload.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "tests hold few of them")]
pub(crate) enum Message {
    Request(Frame),
    Response(ResponseFrame),
    Fast { driver_id: u32, tokens: Vec<u32> },
}

impl Message {
    /// The name of the form in an index.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Request(_) => "request",
            Self::Response(_) => "response",
            Self::Fast { .. } => "fast",
        }
    }

    /// Encodes with a buffer larger than needed.
    pub(crate) fn encode(&self) -> Bytes {
        let mut bytes = Bytes::new();
        bytes.resize(self.encoded_len() + 64, 0xEE);
        let len = self.encode_into(&mut bytes).expect("the buffer is large");
        bytes.resize(len, 0);
        bytes
    }

    pub(crate) fn encode_into(&self, buffer: &mut [u8]) -> Result<usize, WireError> {
        match self {
            Self::Request(frame) => encode_request(frame, buffer),
            Self::Response(frame) => encode_response(frame, buffer),
            Self::Fast { driver_id, tokens } => encode_fast_tokens(*driver_id, tokens, buffer),
        }
    }

    /// The length that the library announces.
    pub(crate) fn encoded_len(&self) -> usize {
        match self {
            Self::Request(frame) => request_len(frame).expect("the frame is small"),
            Self::Response(frame) => match &frame.payload {
                pie_wire::ResponsePayload::Forward(forward) => pie_wire::response_len(forward),
                pie_wire::ResponsePayload::Status(_) => pie_wire::RESPONSE_ROOT_LEN,
            },
            Self::Fast { tokens, .. } => fast_tokens_len(tokens.len()),
        }
    }

    /// Decodes a payload of the given kind.
    pub(crate) fn decode(kind: &str, bytes: &[u8]) -> Result<Self, WireError> {
        match kind {
            "request" => decode_request(bytes).map(Self::Request),
            "response" => decode_response(bytes).map(Self::Response),
            "fast" => match decode_reply(bytes)? {
                Reply::Tokens(reply) => Ok(Self::Fast {
                    driver_id: reply.driver_id(),
                    tokens: reply.iter().collect(),
                }),
                Reply::Frame(_) => panic!("an archive was read as a fast reply"),
            },
            other => panic!("unknown kind {other:?}"),
        }
    }
}

/// Copies bytes to an aligned buffer.
pub(crate) fn aligned(bytes: &[u8]) -> Bytes {
    let mut copy = Bytes::new();
    copy.extend_from_slice(bytes);
    copy
}
