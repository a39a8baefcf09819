//! Extensions: whatever is accepted is within the payload, and written again gives the same bytes.

use pie_wire::{AnswerRows, RequestExtension, append_extension, split_answer, split_request};

use crate::{memory, wire::exact};

/// Bytes of a request, and of an answer, that end with an extension or do not.
pub(crate) fn check(data: &[u8]) {
    // The magic numbers are hard to guess.
    for magic in [pie_wire::EXTENSION_MAGIC, pie_wire::ANSWER_MAGIC] {
        let bytes = exact::<8>(&[data, &magic].concat());
        request(&bytes);
        answer(&bytes);
    }
}

fn request(bytes: &[u8]) {
    let (split, peak) = memory::peak(|| split_request(bytes));
    assert_eq!(peak, 0, "reading allocates nothing");
    let Ok((archive, extension)) = split else {
        return;
    };
    let rows: Vec<(u32, RequestExtension)> = extension
        .rows()
        .map(|row| (row.request(), row.to_owned()))
        .collect();
    if rows.is_empty() {
        return;
    }
    assert_eq!(archive.len() + extension.bytes(), bytes.len());
    let mut again = vec![0xEE; bytes.len()];
    again[..archive.len()].copy_from_slice(archive);
    let listed = rows.iter().map(|(request, row)| (*request, row));
    let len = append_extension(listed, &mut again, archive.len());
    assert_eq!(len.expect("as long as the original"), bytes.len());
    let (_, copy) = split_request(&again).expect("it was just written");
    let written = extension.rows().zip(copy.rows());
    for (old, new) in written {
        // Numbers that are none differ from themselves.
        assert_eq!(
            format!("{:?}", old.to_owned()),
            format!("{:?}", new.to_owned())
        );
    }
}

fn answer(bytes: &[u8]) {
    let (split, peak) = memory::peak(|| split_answer(bytes));
    assert_eq!(peak, 0, "reading allocates nothing");
    let Ok((reply, extension)) = split else {
        return;
    };
    let mut rows = AnswerRows::default();
    for row in extension.rows() {
        let places = row.shape().places(&row.words().collect::<Vec<_>>()).len();
        let (prompt, tokens) = row.places();
        assert_eq!(places as u64, u64::from(prompt) + u64::from(tokens));
        rows.push(row.request(), row.shape(), (prompt, tokens), row.words());
    }
    if rows.bytes() == 0 {
        return;
    }
    let mut again = vec![0xEE; bytes.len()];
    again[..reply.len()].copy_from_slice(reply);
    let len = rows.append(&mut again, reply.len());
    assert_eq!(len.expect("as long as the original"), bytes.len());
    assert_eq!(again, bytes);
}
