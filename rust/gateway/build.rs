//! Generates the services from the definitions that the package `smg-grpc-client` publishes.
//!
//! `definitions/Cargo.toml` names the package, cargo fetches its sources by the lock next to it, and says where they lie. Nothing of the
//! package is compiled: it would need a `protoc` and a hundred crates for what three files of text say.

use std::env;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

use prost_types::FileDescriptorSet;
use prost_types::field_descriptor_proto::{Label, Type};

/// As `definitions/Cargo.toml` has it.
const PACKAGE: &str = "smg-grpc-client";
const COMMON: &str = ".smg.grpc.common";
/// Fields of messages that are refused when they say anything. Read as bytes they take no more memory than they have: an empty
/// message, two bytes, would take hundreds.
const UNREAD: [(&str, &str); 3] = [
    ("GenerateRequest", "extra_mm_inputs"),
    ("GenerateRequest", "media_refs"),
    ("SamplingParams", "custom_params"),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=definitions/Cargo.lock");
    let folder = find_definitions()?;
    let client = env::var_os("CARGO_FEATURE_CLIENT").is_some();
    let generate = |name: &str, extern_common: bool| -> Result<(), Box<dyn Error>> {
        let mut definitions = protox::compile([name], [&folder])?;
        leave_unread(&mut definitions);
        let mut builder = tonic_prost_build::configure()
            .build_client(client)
            // They are the definitions' own, and not written for rustdoc.
            .disable_comments(["."]);
        if extern_common {
            builder = builder.extern_path(COMMON, "crate::contract::common");
        }
        Ok(builder.compile_fds(definitions)?)
    };
    generate("common.proto", false)?;
    generate("vllm_engine.proto", true)?;
    generate("sglang_scheduler.proto", true)
}

/// Has the fields of [`UNREAD`] read as bytes, as many as there are: on the wire both are the same.
fn leave_unread(definitions: &mut FileDescriptorSet) {
    let messages = definitions
        .file
        .iter_mut()
        .flat_map(|file| &mut file.message_type);
    for message in messages {
        let name = message.name().to_owned();
        for field in &mut message.field {
            if UNREAD.contains(&(&name, field.name())) {
                field.set_type(Type::Bytes);
                field.set_label(Label::Repeated);
                field.type_name = None;
            }
        }
    }
}

/// The folder with the definitions, in the sources that cargo has of the package.
fn find_definitions() -> Result<PathBuf, Box<dyn Error>> {
    let manifest = format!("{}/definitions/Cargo.toml", env::var("CARGO_MANIFEST_DIR")?);
    let mut command = Command::new(env::var("CARGO")?);
    command.args(["metadata", "--format-version=1", "--locked"]);
    command.args([
        "--filter-platform",
        &env::var("HOST")?,
        "--manifest-path",
        &manifest,
    ]);
    let output = command.output()?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        let hint =
            format!("without a network, run `cargo fetch --manifest-path {manifest}` before");
        return Err(
            format!("cargo cannot find the sources of {PACKAGE}: {error}\nhint: {hint}").into(),
        );
    }
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let found = packages.iter().find(|package| package["name"] == PACKAGE);
    let manifest = found.and_then(|package| package["manifest_path"].as_str());
    let manifest = manifest.ok_or_else(|| format!("cargo's metadata has no {PACKAGE}"))?;
    let folder = Path::new(manifest).with_file_name("proto");
    println!("cargo::rerun-if-changed={}", folder.display());
    Ok(folder)
}
