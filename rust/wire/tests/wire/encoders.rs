//! Encoders: sizes, refusals and fixed frames.

use pie_wire::{
    ForwardResponse, MAX_ENCODED_LEN, ResponseFrame, ResponsePayload, SCHEMA_HASH, StatusResponse,
    WireError, abort_frame, encode_fast_tokens, encode_response, fast_tokens_len, response_len,
    set_response_build_us, status_frame,
};

use crate::message::Message;
use crate::samples;

#[test]
fn small_buffers_are_refused_by_size() {
    for (name, message) in samples::all() {
        let needed = message.encode().len();
        for size in 0..needed {
            let mut buffer = vec![0; size];
            match message.encode_into(&mut buffer) {
                Err(WireError::BufferTooSmall {
                    needed: told,
                    capacity,
                }) => {
                    assert_eq!((told, capacity), (needed, size), "{name}");
                }
                other => panic!("{name}: {size} of {needed} bytes gave {other:?}"),
            }
        }
    }
}

#[test]
fn refused_responses_leave_the_buffer_alone() {
    let response = ResponseFrame {
        driver_id: 1,
        aborted: false,
        payload: ResponsePayload::Forward(samples::token_outputs(&[1, 2, 3])),
    };
    let mut buffer = [0x5A; 203];
    let error = encode_response(&response, &mut buffer).expect_err("204 bytes are not enough");
    assert_eq!(
        error.to_string(),
        "encoded payload takes 204 bytes, but the buffer holds 203",
    );
    assert!(buffer.iter().all(|&byte| byte == 0x5A));
}

#[test]
fn exact_buffers_suffice_and_the_rest_stays_untouched() {
    for (name, message) in samples::all() {
        let needed = message.encoded_len();
        let mut buffer = vec![0x5A; needed + 9];
        let written = message.encode_into(&mut buffer[..needed]);
        assert_eq!(written.expect(name), needed, "{name}");
        let whole = message.encode_into(&mut buffer);
        assert_eq!(whole.expect(name), needed, "{name}");
        assert!(buffer[needed..].iter().all(|&byte| byte == 0x5A), "{name}");
    }
}

#[test]
fn status_frames_are_what_the_archive_would_be() {
    for (driver_id, status, aborted) in [
        (0, 0, false),
        (7, -1, true),
        (u32::MAX, i32::MIN, false),
        (0x0102_0304, 0x0506_0708, true),
    ] {
        let archive = Message::Response(ResponseFrame {
            driver_id,
            aborted,
            payload: ResponsePayload::Status(StatusResponse { status }),
        })
        .encode();
        assert_eq!(*archive, status_frame(driver_id, status, aborted));
    }
}

#[test]
fn the_abort_frame_is_fixed() {
    const ABORT: [u8; 176] = abort_frame(0);
    let nonzero: Vec<_> = (0..176).filter(|&at| ABORT[at] != 0).collect();
    assert_eq!(nonzero, [4, 8, 12, 13, 14, 15]);
    assert_eq!((ABORT[4], ABORT[8]), (1, 1));
    assert_eq!(ABORT[12..16], [0xFF; 4]);
}

#[test]
fn the_build_time_can_be_set_afterwards() {
    let encoded = |probe_response_build_us| {
        let outputs = ForwardResponse {
            probe_response_build_us,
            ..samples::token_outputs(&[1, 2])
        };
        Message::Response(ResponseFrame {
            driver_id: 0,
            aborted: false,
            payload: ResponsePayload::Forward(outputs),
        })
        .encode()
    };
    let mut bytes = encoded(0);
    set_response_build_us(&mut bytes, 1234);
    assert_eq!(*bytes, *encoded(1234));
}

#[test]
fn lengths_of_plain_decodes() {
    for requests in [0_usize, 1, 2, 256] {
        let outputs = samples::token_outputs(&vec![5; requests]);
        assert_eq!(response_len(&outputs), 180 + 8 * requests);
        assert_eq!(fast_tokens_len(requests), 20 + 4 * requests);
    }
    const { assert!(fast_tokens_len(usize::MAX) == usize::MAX) };
}

#[test]
fn fast_replies_have_the_documented_bytes() {
    let mut buffer = [0; 28];
    let len = encode_fast_tokens(7, &[1, 0x0102_0304], &mut buffer).expect("there is room");
    assert_eq!(len, 28);
    assert_eq!(buffer[..8], *b"PIETFWD1");
    let fields = [7, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 4, 3, 2, 1];
    assert_eq!(buffer[8..], fields);
}

#[test]
fn constants() {
    assert_eq!(u64::from_be_bytes(SCHEMA_HASH), 0x89d0_c2d1_b78c_bb75);
    assert_eq!(MAX_ENCODED_LEN, 0x7FFF_FFFF);
}
