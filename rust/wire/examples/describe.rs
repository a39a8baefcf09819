//! Prints what a request holds: `describe [FILE]`, a payload as it travels, or a small batch of its own.

use std::error::Error;
use std::io::{self, Write, stdout};
use std::{env, fs};

use pie_wire::{
    ArchivedForwardRequest, ArchivedFrame, ArchivedPayload, ForwardRequest, Frame, NativeSlice,
    Payload, Sampler, access_request, brle, encode_request, request_len,
};
use rkyv::util::AlignedVec;

/// Two requests, a prompt of three tokens and a decode with a logit mask.
fn sample() -> Frame {
    let greedy = Sampler::TopP {
        temperature: 0.0,
        p: 1.0,
    };
    Frame {
        driver_id: 0,
        payload: Payload::Forward(ForwardRequest {
            token_ids: vec![11, 12, 13, 99],
            position_ids: vec![0, 1, 2, 40],
            qo_indptr: vec![0, 3, 4],
            kv_page_indices: vec![5, 7, 8, 9],
            kv_page_indptr: vec![0, 1, 4],
            kv_last_page_lens: vec![3, 9],
            logit_masks: vec![brle::encode((0..1000).map(|token| token % 100 > 97))],
            logit_mask_indptr: vec![0, 0, 1],
            sampling_indices: vec![2, 0],
            sampling_indptr: vec![0, 1, 2],
            samplers: vec![greedy.clone(), greedy],
            sampler_indptr: vec![0, 1, 2],
            ..ForwardRequest::default()
        }),
    }
}

fn describe(frame: &ArchivedFrame, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "driver {}", frame.driver_id)?;
    match &frame.payload {
        ArchivedPayload::Forward(batch) => describe_batch(batch, out),
        ArchivedPayload::Copy(copy) => {
            let (dir, resource) = (copy.dir.to_native(), copy.resource.to_native());
            writeln!(out, "copy {dir:?} of {} {resource:?}", copy.srcs.len())
        }
        ArchivedPayload::Adapter(adapter) => {
            let op = adapter.op.to_native();
            writeln!(out, "{op:?} adapter {}", adapter.adapter_id)
        }
        ArchivedPayload::Health => writeln!(out, "health check"),
    }
}

/// The arrays of a batch. Their ranges are not to be trusted: validation covers only the encoding.
fn describe_batch(batch: &ArchivedForwardRequest, out: &mut impl Write) -> io::Result<()> {
    let offsets = batch.qo_indptr.native();
    writeln!(out, "batch of {} requests", offsets.len().saturating_sub(1))?;
    for (number, pair) in offsets.windows(2).enumerate() {
        let range = pair[0] as usize..pair[1] as usize;
        match batch.token_ids.native().get(range) {
            Some(tokens) => writeln!(out, "  request {number}: tokens {tokens:?}")?,
            None => writeln!(out, "  request {number}: offsets {pair:?} are out of range")?,
        }
    }
    for sampler in batch.samplers.iter() {
        writeln!(out, "  {:?}", sampler.view())?;
    }
    for mask in batch.logit_masks.iter() {
        let ranges = brle::true_ranges(mask.runs(), u64::from(u32::MAX));
        let allowed: u64 = ranges.map(|range| range.end - range.start).sum();
        writeln!(out, "  logit mask: {allowed} tokens allowed")?;
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut bytes = AlignedVec::<8>::new();
    if let Some(path) = env::args().nth(1) {
        bytes.extend_from_slice(&fs::read(path)?);
    } else {
        let frame = sample();
        bytes.resize(request_len(&frame)?, 0);
        encode_request(&frame, &mut bytes)?;
    }
    let mut out = stdout().lock();
    writeln!(out, "{} bytes", bytes.len())?;
    Ok(describe(access_request(&bytes)?, &mut out)?)
}
