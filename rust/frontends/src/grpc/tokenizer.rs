//! The files of a tokenizer, for a gateway that does not have them.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Cursor, Write};
use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use sha2::{Digest, Sha256};
use tonic::Status;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::grpc::contract::common::GetTokenizerChunk;
use crate::grpc::settings::ServedModel;

/// Bytes of a message.
const CHUNK: usize = 64 << 10;
/// What a gateway reads, where it is there.
const FILES: [&str; 12] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
];

/// The parts of an archive.
#[derive(Debug)]
pub(crate) struct Bundle(VecDeque<GetTokenizerChunk>);

impl Stream for Bundle {
    type Item = Result<GetTokenizerChunk, Status>;

    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.pop_front().map(Ok))
    }
}

/// Reads the files that there are.
///
/// # Errors
/// `NOT_FOUND` if there is no tokenizer, `INTERNAL` if a file cannot be read.
pub(crate) async fn read(model: &ServedModel) -> Result<Bundle, Status> {
    let folder = if model.tokenizer_path.is_empty() {
        &model.model_path
    } else {
        &model.tokenizer_path
    };
    let path = folder.clone();
    let packed = tokio::task::spawn_blocking(move || pack(Path::new(&path))).await;
    let packed = packed.map_err(|error| Status::internal(error.to_string()))?;
    match packed {
        Ok(Some(archive)) => Ok(split(&archive)),
        Ok(None) => Err(Status::not_found(format!(
            "{folder} has no files of a tokenizer"
        ))),
        Err(error) => Err(Status::internal(format!(
            "the files of the tokenizer in {folder} cannot be read: {error}"
        ))),
    }
}

/// A zip archive of the files, without compression; `None` if there is none.
fn pack(folder: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    let mut found = false;
    for name in FILES {
        let bytes = match fs::read(folder.join(name)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        archive.start_file(name, SimpleFileOptions::default())?;
        archive.write_all(&bytes)?;
        found = true;
    }
    let archive = archive.finish()?;
    Ok(found.then(|| archive.into_inner()))
}

/// The archive in parts; the last one has its digest.
fn split(archive: &[u8]) -> Bundle {
    let digest = hex(&Sha256::digest(archive));
    let parts = archive.chunks(CHUNK).map(|part| GetTokenizerChunk {
        data: part.to_vec(),
        sha256: String::new(),
    });
    let mut parts: VecDeque<GetTokenizerChunk> = parts.collect();
    if let Some(last) = parts.back_mut() {
        last.sha256 = digest;
    }
    Bundle(parts)
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).unwrap_or_default();
    let digits = bytes.iter().flat_map(|byte| [byte >> 4, byte & 15]);
    digits.map(digit).collect()
}
