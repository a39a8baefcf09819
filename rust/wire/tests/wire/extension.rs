//! Extensions: round trips, hostile bytes, and Pie's payloads as they were.

use pie_wire::{
    CombinedSampler, EXTENSION_MAGIC, ExtensionError, LogprobOptions, MAX_HANDLES, Params,
    ParamsRef, Penalties, PromptLogprobs, RequestExtension, StepRow, append_extension,
    extension_len, params_len, split_request, split_response, write_extension,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::extension_response::{answer_rows, read, written};
use crate::message::{Message, aligned};
use crate::samples;

type Rows = Vec<(u32, RequestExtension)>;

pub(crate) fn float() -> impl Strategy<Value = f32> {
    -1e6_f32..1e6
}

pub(crate) fn words() -> impl Strategy<Value = Vec<u32>> {
    vec(any::<u32>(), 0..5)
}

prop_compose! {
    fn sampler()(temperature in float(), top_k: u32, top_p in float(), min_p in float(), seed: Option<u64>) -> CombinedSampler {
        CombinedSampler { temperature, top_k, top_p, min_p, seed }
    }
}

prop_compose! {
    fn prompt()(from in 0..u32::MAX, end: u32, next: u32) -> PromptLogprobs {
        PromptLogprobs { from, end, next }
    }
}

prop_compose! {
    fn asked()(scaled: bool, top: u32, token_ids in words(), hidden: u32, prompt in proptest::option::of(prompt())) -> LogprobOptions {
        LogprobOptions { scaled, top, token_ids, hidden, prompt }
    }
}

prop_compose! {
    fn row()(
        sampler in proptest::option::of(sampler()),
        (frequency, presence, repetition, counted_from) in (float(), float(), float(), any::<u32>()),
        history in words(),
        biases in vec((any::<u32>(), float()), 0..4),
        (suppressed, suppressed_until) in (words(), any::<u32>()),
        logprobs in proptest::option::of(asked()),
        processor in vec(any::<u8>(), 0..10),
        mask in words(),
    ) -> RequestExtension {
        RequestExtension {
            sampler,
            penalties: Penalties { frequency, presence, repetition, counted_from },
            history,
            biases,
            suppressed,
            suppressed_until,
            logprobs,
            processor,
            mask,
            shares_mask: false,
        }
    }
}

fn rows() -> impl Strategy<Value = Rows> {
    let numbers = proptest::collection::btree_set(any::<u32>(), 0..5);
    (numbers, vec((row(), any::<bool>()), 5)).prop_map(|(numbers, rows)| {
        let mut is_masked = false;
        let rows = rows.into_iter().map(|(mut row, shares)| {
            row.shares_mask = shares && is_masked;
            if row.shares_mask {
                row.mask.clear();
            }
            is_masked |= !row.mask.is_empty();
            row
        });
        numbers.into_iter().zip(rows).collect()
    })
}

fn listed(rows: &Rows) -> impl Iterator<Item = (u32, &RequestExtension)> + Clone {
    rows.iter().map(|(request, row)| (*request, row))
}

/// The archive with an extension after it, in a buffer without more room.
fn extended(archive: &[u8], rows: &Rows) -> Vec<u8> {
    let mut bytes = archive.to_vec();
    bytes.resize(archive.len() + extension_len(listed(rows)), 0xEE);
    let written = append_extension(listed(rows), &mut bytes, archive.len());
    assert_eq!(written.unwrap(), bytes.len());
    bytes
}

fn requests() -> impl Iterator<Item = Vec<u8>> {
    let samples = samples::all().into_iter().map(|(_, message)| message);
    let samples = samples.filter(|message| message.kind() == "request");
    samples.map(|message| message.encode().to_vec())
}

/// A row with everything, whose bytes are written down in `docs/wire-extension.md`.
fn full() -> RequestExtension {
    RequestExtension {
        sampler: Some(CombinedSampler {
            temperature: 0.5,
            top_k: 20,
            top_p: 0.75,
            min_p: 0.25,
            seed: Some(0x1_0000_0002),
        }),
        penalties: Penalties {
            frequency: 1.0,
            presence: -1.0,
            repetition: 2.0,
            counted_from: 7,
        },
        history: vec![30, 31],
        biases: vec![(9, -4.0)],
        suppressed: vec![2],
        suppressed_until: 11,
        logprobs: Some(LogprobOptions {
            scaled: true,
            top: 5,
            token_ids: vec![40],
            hidden: 3,
            prompt: Some(PromptLogprobs {
                from: 3,
                end: 6,
                next: 44,
            }),
        }),
        processor: b"calle".to_vec(),
        mask: vec![0xFFFF_FFFE],
        shares_mask: false,
    }
}

#[test]
fn the_bytes_are_as_documented() {
    let bytes = extended(&[], &vec![(1, full())]);
    let words: Vec<u32> = bytes
        .as_chunks()
        .0
        .iter()
        .map(|word| u32::from_le_bytes(*word))
        .collect();
    let params = [
        u32::MAX,
        15,
        0x3F00_0000,
        20,
        0x3F40_0000,
        0x3E80_0000,
        2,
        1,
        0x3F80_0000,
        0xBF80_0000,
        0x4000_0000,
        7,
        11,
        5,
        1,
        1,
        1,
        5,
        3,
    ];
    let row = [1, 36, 0, 3, 6, 44, 2, 1];
    let lists = [
        9,
        0xC080_0000,
        2,
        40,
        0x6C6C_6163,
        0x65,
        30,
        31,
        0xFFFF_FFFE,
    ];
    let end = [1, 1, 9, 0x5845_4950, 0x3451_5254];
    assert_eq!(words, [&params[..], &row, &lists, &end].concat());
}

/// Every payload of the Pie protocol is taken as it is, and stays as it is under an extension.
#[test]
fn the_archives_of_pie_stay_as_they_are() {
    for archive in requests() {
        let (whole, none) = split_request(&archive).unwrap();
        assert!(whole == archive && none.is_empty());
        let bytes = extended(&archive, &vec![(0, full())]);
        let (inner, extension) = split_request(&bytes).unwrap();
        assert_eq!(inner, archive);
        assert_eq!(extension.bytes(), bytes.len() - archive.len());
        assert!(
            pie_wire::access_request(&aligned(&bytes)).is_err(),
            "who does not know extensions refuses them"
        );
        pie_wire::access_request(&aligned(inner)).unwrap();
    }
}

/// What the last words of a forward archive would mean if they were the magic number lies after its end.
#[test]
fn no_forward_archive_ends_with_the_magic_number() {
    let forward = |bytes: &Vec<u8>| {
        let frame = pie_wire::decode_request(&aligned(bytes)).unwrap();
        matches!(frame.payload, pie_wire::Payload::Forward(_))
    };
    for mut archive in requests().filter(forward) {
        let end = archive.len() - EXTENSION_MAGIC.len();
        archive[end..].copy_from_slice(&EXTENSION_MAGIC);
        assert!(pie_wire::access_request(&aligned(&archive)).is_err());
    }
}

#[test]
fn what_contradicts_itself_is_refused() {
    let bytes = extended(&[], &vec![(3, full()), (5, full())]);
    let refused = |at: usize, value: u32| {
        let mut bytes = bytes.clone();
        bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_le_bytes());
        split_request(&bytes).map(drop)
    };
    let words = bytes.len() / 4;
    assert!(matches!(
        refused(words - 5, 3),
        Err(ExtensionError::Length { rows: 5, .. })
    ));
    assert!(matches!(
        refused(words - 4, 3),
        Err(ExtensionError::Length { rows: 5, .. })
    ));
    assert!(matches!(
        refused(words - 3, u32::MAX),
        Err(ExtensionError::Length {
            words: u32::MAX,
            ..
        })
    ));
    let claims = |words| ExtensionError::Words {
        claimed: words,
        words: 18,
    };
    // Two records of 19 words, two rows of 8.
    let (record, row) = (19, 38);
    assert_eq!(refused(row + 6, 3), Err(claims(19)));
    assert_eq!(
        refused(14, u32::MAX),
        Err(claims(18 - 2 + 2 * u64::from(u32::MAX)))
    );
    let order = ExtensionError::Order { row: 1, request: 3 };
    assert_eq!(refused(row + 8, 3), Err(order));
    let flags = |table, flags, known| ExtensionError::Flags {
        table,
        row: 0,
        flags,
        known,
    };
    assert_eq!(refused(1, 16), Err(flags("record", 16, 15)));
    assert_eq!(refused(row + 1, 1), Err(flags("row", 1, 52)));
    let shared = |row, before| ExtensionError::SharedMask {
        row,
        words: 1,
        before,
    };
    assert_eq!(refused(row + 1, 0x10 | 0x24), Err(shared(0, 0)));
    assert_eq!(refused(row + 8 + 1, 0x10 | 0x24), Err(shared(1, 1)));
    assert!(matches!(
        refused(record + 1, 3),
        Err(ExtensionError::UnexpectedIds { row: 1, .. })
    ));
    let names = |table, params, limit| ExtensionError::Params {
        table,
        row: 0,
        params,
        limit,
    };
    assert_eq!(
        refused(0, MAX_HANDLES),
        Err(names("record", MAX_HANDLES, MAX_HANDLES))
    );
    assert_eq!(refused(row + 2, 2), Err(names("row", 2, 2)));
    // Without the flag for a record of the frame it is a handle.
    assert_eq!(refused(row + 1, 4), Ok(()));
    let text = refused(1, 32).unwrap_err().to_string();
    assert!(text.contains("0x20") && text.contains("0xf"), "{text}");
    let (archive, none) = split_request(&bytes[..bytes.len() - 1]).unwrap();
    assert!(none.is_empty() && archive.len() == bytes.len() - 1);
}

/// Parameters that are kept take their room once: later rows name them.
#[test]
fn kept_parameters_are_named() {
    let asked = full();
    let kept = [Params {
        handle: Some(7),
        asked: &asked,
    }];
    let row = StepRow {
        request: 2,
        params: ParamsRef::Kept(7),
        returns_logprobs: true,
        ..StepRow::default()
    };
    let mut bytes = vec![0; 400];
    let length = write_extension(kept.into_iter(), [row].into_iter(), &mut bytes, 0).unwrap();
    let (_, first) = split_request(&bytes[..length]).unwrap();
    assert_eq!(first.params().next().unwrap().handle(), Some(7));
    let (request, owned) = &first.to_owned()[0];
    assert_eq!((*request, &owned.biases), (2, &asked.biases));
    let named = write_extension([].into_iter(), [row].into_iter(), &mut bytes, 0).unwrap();
    assert_eq!(length - named, params_len(&asked));
    let (_, later) = split_request(&bytes[..named]).unwrap();
    assert_eq!(later.params().count(), 0);
    assert_eq!(later.rows().next().unwrap().params(), ParamsRef::Kept(7));
    // Without a row they are written all the same.
    let alone = write_extension(kept.into_iter(), [].into_iter(), &mut bytes, 0).unwrap();
    let (_, alone) = split_request(&bytes[..alone]).unwrap();
    assert!(!alone.is_empty() && alone.last_request().is_none());
}

/// A row that shares a mask has the very words of the row before it, whatever lies between.
#[test]
fn a_mask_is_sent_once() {
    let row = |mask: &[u32], shares_mask| RequestExtension {
        mask: mask.to_vec(),
        shares_mask,
        ..RequestExtension::default()
    };
    let rows = vec![
        (0, row(&[5, 6], false)),
        (1, row(&[], true)),
        (2, row(&[], false)),
        (4, row(&[], true)),
        (5, row(&[7], false)),
        (6, row(&[], true)),
    ];
    let bytes = extended(&[], &rows);
    let (_, extension) = split_request(&bytes).unwrap();
    let masks: Vec<_> = extension.rows().map(|row| row.mask).collect();
    let words: Vec<Vec<u32>> = masks.iter().map(|mask| mask.iter().collect()).collect();
    assert_eq!(words, [&[5, 6][..], &[5, 6], &[], &[5, 6], &[7], &[7]]);
    assert_eq!(masks[0].address(), masks[3].address());
    assert_ne!(masks[0].address(), masks[5].address());
    let mut rows = extension.rows();
    let late = rows.of(4).unwrap();
    assert_eq!(late.mask.len(), 2, "rows that were passed over count, too");
    let alone = extended(&[], &vec![(0, row(&[1], false)), (3, row(&[], true))]);
    let mut broken = alone.clone();
    // The first row's flags, after two records: it would share what is not there.
    broken[4 * (2 * 19 + 1)] = 16;
    let error = split_request(&broken).unwrap_err();
    assert!(matches!(
        error,
        ExtensionError::SharedMask {
            row: 0,
            words: 1,
            before: 0
        }
    ));
}

#[test]
fn a_buffer_that_is_too_small_is_refused_before_it_is_written() {
    let rows = vec![(0, full())];
    let needed = extension_len(listed(&rows));
    let mut buffer = vec![7; needed + 7];
    let error = append_extension(listed(&rows), &mut buffer, 8).unwrap_err();
    assert!(
        error.to_string().contains(&(needed + 8).to_string()),
        "{error}"
    );
    assert!(buffer.iter().all(|&byte| byte == 7));
}

proptest! {
    #[test]
    fn extensions_survive_a_round_trip(rows in rows(), archive in 0..7_usize) {
        let archive = requests().nth(archive).unwrap_or_default();
        let bytes = extended(&archive, &rows);
        let (inner, extension) = split_request(&bytes).unwrap();
        prop_assert_eq!(inner, &archive);
        prop_assert_eq!(&extension.to_owned(), &rows);
        prop_assert_eq!(extension.last_request(), rows.last().map(|row| row.0));
        // By request, as a reader that goes from one to the next asks.
        let mut next = extension.rows();
        for request in 0..40 {
            let expected = rows.iter().find(|row| row.0 == request).map(|row| row.1.history.clone());
            let found = next.of(request as usize).map(|row| row.history.iter().collect());
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn any_end_is_read_or_refused(mut bytes in vec(any::<u8>(), 0..400), params in 0..3_u32, rows in 0..6_u32, words in 0..90_u32) {
        bytes.extend(params.to_le_bytes());
        bytes.extend(rows.to_le_bytes());
        bytes.extend(words.to_le_bytes());
        for magic in [EXTENSION_MAGIC, pie_wire::RESPONSE_EXTENSION_MAGIC] {
            let bytes = [&bytes[..], &magic].concat();
            if let Ok((archive, extension)) = split_request(&bytes) {
                extension.to_owned();
                prop_assert!(archive.len() + extension.bytes() == bytes.len() || extension.is_empty());
            }
            if let Ok((_, extension)) = split_response(&bytes) {
                let rows = read(&extension);
                prop_assert!(rows.is_sorted_by_key(|row| row.request));
            }
        }
    }

    #[test]
    fn answers_survive_a_round_trip(rows in answer_rows(), tokens in vec(any::<u32>(), 0..5)) {
        let reply = Message::Fast { driver_id: 3, tokens }.encode();
        let written = written(&rows);
        let mut bytes = reply.to_vec();
        bytes.resize(reply.len() + written.bytes(), 0);
        prop_assert_eq!(written.append(&mut bytes, reply.len()).unwrap(), bytes.len());
        let (inner, extension) = split_response(&bytes).unwrap();
        prop_assert_eq!(inner, &reply[..]);
        prop_assert_eq!(read(&extension), rows);
    }
}
