//! Extensions: whatever is accepted is within the payload, and written again gives the same bytes.

use pie_wire::{LogprobRows, Params, StepRow, split_request, split_response, write_extension};

use crate::{memory, wire::exact};

/// Bytes of a request, and of an answer, that end with an extension or do not.
pub(crate) fn check(data: &[u8]) {
    // The magic numbers are hard to guess.
    for magic in [
        pie_wire::EXTENSION_MAGIC,
        pie_wire::RESPONSE_EXTENSION_MAGIC,
    ] {
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
    if extension.is_empty() {
        return;
    }
    assert_eq!(archive.len() + extension.bytes(), bytes.len());
    let asked: Vec<_> = extension
        .params()
        .map(|it| (it.handle(), it.to_owned()))
        .collect();
    let params = asked.iter().map(|(handle, asked)| Params {
        handle: *handle,
        asked,
    });
    let owned = extension.to_owned();
    let rows = extension
        .rows()
        .zip(&owned)
        .map(|(row, (request, owned))| StepRow {
            request: *request,
            params: row.params(),
            returns_logprobs: row.returns_logprobs(),
            prompt: row.prompt_logprobs(),
            history: &owned.history,
            mask: &owned.mask,
            shares_mask: owned.shares_mask,
        });
    let mut again = vec![0xEE; bytes.len()];
    again[..archive.len()].copy_from_slice(archive);
    let len = write_extension(params, rows, &mut again, archive.len());
    assert_eq!(len.expect("as long as the original"), bytes.len());
    let (_, copy) = split_request(&again).expect("it was just written");
    // Numbers that are none differ from themselves.
    assert_eq!(format!("{owned:?}"), format!("{:?}", copy.to_owned()));
}

fn answer(bytes: &[u8]) {
    let (split, peak) = memory::peak(|| split_response(bytes));
    assert_eq!(peak, 0, "reading allocates nothing");
    let Ok((reply, extension)) = split else {
        return;
    };
    let mut rows = LogprobRows::default();
    for row in extension.rows() {
        let positions = row
            .shape()
            .positions(&row.words().collect::<Vec<_>>())
            .len();
        let (prompt, tokens) = row.position_counts();
        assert_eq!(positions as u64, u64::from(prompt) + u64::from(tokens));
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
