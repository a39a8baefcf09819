//! Arbitrary bytes are refused or readable, never a panic.

use pie_wire::{
    REQUEST_ROOT_LEN, RESPONSE_ROOT_LEN, WireError, access_request, access_response, decode_reply,
    fast_tokens_len,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::message::{Bytes, Message, aligned};
use crate::{random, samples, walk};

/// Reads the bytes by every decoder.
fn read_all(bytes: &[u8]) {
    for kind in ["request", "response"] {
        if walk::payload(kind, bytes).is_ok() && !bytes.starts_with(b"PIETFWD1") {
            Message::decode(kind, bytes).expect("a valid archive can be owned");
        }
    }
}

/// Overwrites the word at an index, counted cyclically from the end.
fn set_word(bytes: &mut Bytes, from_end: usize, word: u32) {
    let words = bytes.len() / 4;
    if words > 0 {
        let at = bytes.len() - 4 * (1 + from_end % words);
        bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
}

#[test]
fn every_bit_flip_of_the_samples() {
    for (_, message) in samples::all() {
        let mut bytes = message.encode();
        for bit in 0..8 * bytes.len() {
            bytes[bit / 8] ^= 1 << (bit % 8);
            read_all(&bytes);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

#[test]
fn every_truncation_of_the_samples() {
    for (_, message) in samples::all() {
        let bytes = message.encode();
        for len in 0..bytes.len() {
            read_all(&bytes[..len]);
            read_all(&bytes[len..]);
        }
    }
}

proptest! {
    #[test]
    fn random_bytes(bytes in vec(any::<u8>(), 0..700)) {
        read_all(&aligned(&bytes));
    }

    #[test]
    fn sparse_roots(words in vec((0_usize..120, -400_i32..24), 0..40), len in 176_usize..700) {
        let mut bytes = Bytes::new();
        bytes.resize(len, 0);
        for (from_end, word) in words {
            set_word(&mut bytes, from_end, word.cast_unsigned());
        }
        read_all(&bytes);
    }

    #[test]
    fn overwritten_words(
        message in random::message(),
        words in vec((any::<usize>(), prop_oneof![any::<u32>(), 0_u32..64]), 1..6),
    ) {
        let mut bytes = message.encode();
        for (from_end, word) in words {
            set_word(&mut bytes, from_end, word);
            read_all(&bytes);
        }
    }

    #[test]
    fn fast_headers(header in any::<[u32; 3]>(), tokens in 0_u32..6, tail in 0_usize..40) {
        let mut bytes = b"PIETFWD1".to_vec();
        let counted = [header[0], tokens, tokens];
        for fields in [header, counted] {
            bytes.truncate(8);
            bytes.extend(fields.iter().flat_map(|field| field.to_le_bytes()));
            bytes.resize(20 + tail, 0x55);
            let exact = bytes.len() == fast_tokens_len(fields[1] as usize);
            prop_assert_eq!(decode_reply(&bytes).is_ok(), exact && fields[1] == fields[2]);
        }
    }
}

#[test]
fn short_payloads_name_both_lengths() {
    let bytes = Bytes::new();
    let error = access_request(&bytes).expect_err("there is no root");
    assert!(matches!(
        error,
        WireError::TooShort {
            len: 0,
            min: REQUEST_ROOT_LEN,
            ..
        }
    ));
    assert_eq!(
        error.to_string(),
        "request payload has 0 bytes, but its root alone takes 296"
    );
    let error = access_response(&bytes).expect_err("there is no root");
    assert!(matches!(
        error,
        WireError::TooShort {
            len: 0,
            min: RESPONSE_ROOT_LEN,
            ..
        }
    ));
}

#[test]
fn misaligned_payloads_are_refused() {
    for (_, message) in samples::all() {
        let (kind, align) = match message.kind() {
            "request" => (message.kind(), 8),
            "response" => (message.kind(), 4),
            _ => continue,
        };
        let bytes = message.encode();
        for shift in 1..=8 {
            let mut moved = aligned(&vec![0; shift]);
            moved.extend_from_slice(&bytes);
            let result = walk::payload(kind, &moved[shift..]);
            if shift % align == 0 {
                result.expect("the payload is aligned");
            } else {
                let error = result.expect_err("the payload is misaligned");
                assert!(
                    matches!(error, WireError::Misaligned { align: needed, .. } if needed == align)
                );
            }
        }
    }
}

#[test]
fn fast_replies_name_what_is_wrong() {
    let refuse = |bytes: &[u8]| decode_reply(bytes).expect_err("a broken reply").to_string();
    let mut reply = b"PIETFWD1".to_vec();
    assert_eq!(
        refuse(&reply),
        "fast token reply has 8 bytes, but its header alone takes 20"
    );
    reply.extend([7_u32, 2, 3].iter().flat_map(|field| field.to_le_bytes()));
    assert_eq!(
        refuse(&reply),
        "fast token reply has 3 tokens for 2 requests; it must be one each"
    );
    reply[16] = 2;
    assert_eq!(
        refuse(&reply),
        "fast token reply has 20 bytes, but its header announces 2 tokens, which take 28"
    );
    reply.resize(28, 0);
    decode_reply(&reply).expect("the reply is complete");
}
