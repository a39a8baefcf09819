//! Messages that their handlers decode.

use prost::bytes::{Buf, BufMut, Bytes};
use prost::encoding::{DecodeContext, WireType, skip_field};
use prost::{DecodeError, Message};
use tonic::{Response, Status};

/// What a call answers.
pub(crate) type Reply<T> = Result<Response<T>, Status>;

/// Bytes of a message above which it is decoded on a thread that sends no tokens.
const LARGE: usize = 64 << 10;

/// The bytes of a message. tonic decodes messages on the thread that sends every stream's tokens, where one of 64 MiB would stop
/// all of them: servers have this in the place of the message, which costs tonic nothing to decode.
#[derive(Clone, Debug, Default)]
pub struct Encoded(Bytes);

impl Encoded {
    /// Whether it takes a while to decode.
    pub(crate) fn is_large(&self) -> bool {
        self.0.len() > LARGE
    }

    /// Decodes the message, which the caller knows by its method.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for other bytes than those of such a message.
    pub(crate) async fn decode<M: Message + Default + 'static>(self) -> Result<M, Status> {
        if !self.is_large() {
            return decode(&self.0);
        }
        let decoded = tokio::task::spawn_blocking(move || decode(&self.0)).await;
        decoded.map_err(|error| Status::internal(error.to_string()))?
    }
}

/// Decodes a message.
///
/// # Errors
/// `INVALID_ARGUMENT` for other bytes than those of such a message.
pub(crate) fn decode<M: Message + Default>(bytes: &[u8]) -> Result<M, Status> {
    M::decode(bytes)
        .map_err(|error| Status::invalid_argument(format!("the message cannot be read: {error}")))
}

impl Message for Encoded {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        buffer.put_slice(&self.0);
    }

    fn merge(&mut self, mut buffer: impl Buf) -> Result<(), DecodeError> {
        // tonic's buffer is shared: nothing is copied.
        self.0 = buffer.copy_to_bytes(buffer.remaining());
        Ok(())
    }

    /// Only a message that holds this one would ask for it: there is none.
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        skip_field(wire_type, tag, buffer, context)
    }

    fn encoded_len(&self) -> usize {
        self.0.len()
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, ThreadId};

    use super::*;

    /// A message that knows which thread has decoded it.
    #[derive(Debug, Default)]
    struct Decoded(Option<ThreadId>);

    impl Message for Decoded {
        fn encode_raw(&self, _: &mut impl BufMut) {}

        fn merge(&mut self, _: impl Buf) -> Result<(), DecodeError> {
            self.0 = Some(thread::current().id());
            Ok(())
        }

        fn merge_field(
            &mut self,
            _: u32,
            _: WireType,
            _: &mut impl Buf,
            _: DecodeContext,
        ) -> Result<(), DecodeError> {
            unreachable!()
        }

        fn encoded_len(&self) -> usize {
            0
        }

        fn clear(&mut self) {}
    }

    #[test]
    fn a_large_message_is_decoded_on_another_thread_than_the_one_that_sends_tokens() {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.unwrap();
        for (bytes, is_here) in [(0, true), (LARGE, true), (LARGE + 1, false)] {
            let mut encoded = Encoded::default();
            encoded.merge(&vec![0; bytes][..]).unwrap();
            let decoded: Decoded = runtime.block_on(encoded.decode()).unwrap();
            assert_eq!(
                decoded.0 == Some(thread::current().id()),
                is_here,
                "{bytes}"
            );
        }
    }

    #[test]
    fn what_is_no_such_message_is_refused() {
        let mut encoded = Encoded::default();
        // A field of 255 bytes, of which none comes.
        encoded.merge(&[0x0a, 0xff, 0x01][..]).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let decoding = encoded.decode::<crate::grpc::contract::vllm::GenerateRequest>();
        let status = runtime.unwrap().block_on(decoding).unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument);
    }
}
