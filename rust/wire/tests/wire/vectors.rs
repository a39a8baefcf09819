//! Folders of vectors: `NAME.bin` files and an `index.json` of their values.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use pie_wire::SCHEMA_HASH;
use serde_json::{Value, json};

use crate::message::{Message, aligned};
use crate::{json as mapping, samples, walk};

fn from_crate(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn own_folder() -> PathBuf {
    from_crate("../../tests/data/wire")
}

fn hash_text() -> String {
    format!("{:016x}", u64::from_be_bytes(SCHEMA_HASH))
}

fn read_index(folder: &Path) -> Value {
    let text = fs::read_to_string(folder.join("index.json")).expect("the index is readable");
    serde_json::from_str(&text).expect("the index is JSON")
}

/// Checks every vector of a folder in both directions; returns their names.
fn check_folder(folder: &Path) -> BTreeSet<String> {
    let index = read_index(folder);
    assert_eq!(index["schema_hash"], hash_text().as_str());
    let entries = index["vectors"].as_array().expect("a list of vectors");
    let names: BTreeSet<_> = entries
        .iter()
        .map(|entry| check_vector(folder, entry))
        .collect();
    assert_eq!(names, files(folder), "index and files disagree");
    names
}

fn check_vector(folder: &Path, entry: &Value) -> String {
    let name = entry["name"].as_str().expect("a name").to_owned();
    let bytes = aligned(&fs::read(folder.join(format!("{name}.bin"))).expect("a vector"));
    assert_eq!(entry["bytes"], bytes.len(), "{name}: length");

    let expected = mapping::from_entry(entry);
    let decoded =
        Message::decode(expected.kind(), &bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(decoded, expected, "{name}: decoded values");
    assert_eq!(*expected.encode(), *bytes, "{name}: encoded bytes");
    assert_eq!(
        expected.encoded_len(),
        bytes.len(),
        "{name}: announced length"
    );
    let mapped = mapping::from_entry(&mapping::to_entry(&decoded));
    assert_eq!(mapped, decoded, "{name}: JSON mapping");
    walk::payload(expected.kind(), &bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
    name
}

/// The names of the vector files of a folder.
fn files(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder)
        .expect("the folder is readable")
        .map(|file| file.expect("a file").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .map(|path| path.file_stem().expect("a name").display().to_string())
        .collect()
}

fn check_foreign(relative: &str) {
    let folder = from_crate(relative);
    if folder.join("index.json").exists() {
        assert!(!check_folder(&folder).is_empty());
    } else {
        eprintln!("skipped: there are no vectors at {}", folder.display());
    }
}

#[test]
fn golden_vectors_match() {
    check_foreign("../../../shared/vectors");
}

#[test]
fn captured_vectors_match() {
    check_foreign("../../../shared/vectors/captured");
}

#[test]
fn own_vectors_match() {
    let names = check_folder(&own_folder());
    let expected: BTreeSet<_> = samples::all()
        .into_iter()
        .map(|(name, message)| {
            let bytes = fs::read(own_folder().join(format!("{name}.bin"))).expect("a vector");
            assert_eq!(*message.encode(), *bytes, "{name}: the sample has changed");
            name.to_owned()
        })
        .collect();
    assert_eq!(names, expected);
}

/// Writes the crate's own vectors anew.
///
/// Only needed after a sample was added or changed:
/// `cargo test -p pie-wire regenerate -- --ignored`.
#[test]
#[ignore = "writes files"]
fn regenerate() {
    let folder = own_folder();
    fs::create_dir_all(&folder).expect("the folder can be made");
    for name in files(&folder) {
        fs::remove_file(folder.join(format!("{name}.bin"))).expect("old vectors can be removed");
    }
    let mut vectors = Vec::new();
    for (name, message) in samples::all() {
        let bytes = message.encode();
        fs::write(folder.join(format!("{name}.bin")), &bytes).expect("a vector can be written");
        let mut entry = mapping::to_entry(&message);
        entry["name"] = json!(name);
        entry["bytes"] = json!(bytes.len());
        vectors.push(format!("    {entry}"));
    }
    let text = format!(
        "{{\n  \"schema_hash\": \"{}\",\n  \"vectors\": [\n{}\n  ]\n}}\n",
        hash_text(),
        vectors.join(",\n")
    );
    fs::write(folder.join("index.json"), text).expect("the index can be written");
}
