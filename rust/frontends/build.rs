//! Generates the services from the definitions that the package `smg-grpc-client` publishes.
//!
//! `definitions/Cargo.toml` names the package, cargo fetches its sources by the lock next to it, and says where they lie. Nothing of the
//! package is compiled: it would need a `protoc` and a hundred crates for what three files of text say.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use prost_types::FileDescriptorSet;
use prost_types::field_descriptor_proto::{Label, Type};

/// As `definitions/Cargo.toml` has it.
const PACKAGE: &str = "smg-grpc-client";
const COMMON: &str = ".smg.grpc.common";
/// The input of every method of the servers: a handler decodes it where that harms no stream.
const ENCODED: &str = ".Encoded";
/// Fields of messages that are refused when they say anything. Read as bytes they take no more memory than they have: an empty
/// message, two bytes, would take hundreds.
const UNREAD: [(&str, &str); 3] = [
    ("GenerateRequest", "extra_mm_inputs"),
    ("GenerateRequest", "media_refs"),
    ("SamplingParams", "custom_params"),
];

/// Its file, its package, and the module with its messages.
const CONTRACTS: [(&str, &str, &str); 2] = [
    (
        "vllm_engine.proto",
        ".vllm.grpc.engine",
        "crate::grpc::contract::vllm",
    ),
    (
        "sglang_scheduler.proto",
        ".sglang.grpc.scheduler",
        "crate::grpc::contract::sglang",
    ),
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=definitions/Cargo.lock");
    let folder = find_definitions()?;
    let client = env::var_os("CARGO_FEATURE_CLIENT").is_some();
    let read = |name: &str| -> Result<FileDescriptorSet, Box<dyn Error>> {
        let mut definitions = protox::compile([name], [&folder])?;
        leave_unread(&mut definitions);
        Ok(definitions)
    };
    builder().compile_fds(read("common.proto")?)?;
    for (name, package, module) in CONTRACTS {
        let mut definitions = read(name)?;
        let builder = builder().extern_path(COMMON, "crate::grpc::contract::common");
        if client {
            generate_client(definitions.clone(), builder.clone(), package, module)?;
        }
        leave_encoded(&mut definitions);
        builder
            .build_client(false)
            .extern_path(ENCODED, "crate::grpc::encoded::Encoded")
            .compile_fds(definitions)?;
    }
    Ok(())
}

fn builder() -> tonic_prost_build::Builder {
    // The comments are the definitions' own, and not written for rustdoc.
    tonic_prost_build::configure().disable_comments(["."])
}

/// The client of a contract, whose methods take messages as they are defined. The messages are those of its server.
fn generate_client(
    definitions: FileDescriptorSet,
    builder: tonic_prost_build::Builder,
    package: &str,
    module: &str,
) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&env::var("OUT_DIR")?).join("client");
    fs::create_dir_all(&folder)?;
    let builder = builder.build_server(false).extern_path(package, module);
    Ok(builder.out_dir(folder).compile_fds(definitions)?)
}

/// Has every method take its message as [`ENCODED`].
fn leave_encoded(definitions: &mut FileDescriptorSet) {
    let services = definitions
        .file
        .iter_mut()
        .flat_map(|file| &mut file.service);
    for method in services.flat_map(|service| &mut service.method) {
        method.input_type = Some(ENCODED.to_owned());
    }
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
