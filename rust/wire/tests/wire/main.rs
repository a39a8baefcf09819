//! Tests of the public surface: vectors, round trips, hostile bytes, memory.

mod allocation;
mod encoders;
mod extension;
mod extension_response;
mod hostile;
mod json;
mod message;
mod random;
mod rules;
mod samples;
mod vectors;
mod walk;
