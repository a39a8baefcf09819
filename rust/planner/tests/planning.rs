//! Plans, staged blocks and replies, in one program: what they share is compiled once.

mod common;

mod adapter_graphs;
mod capacity;
mod drafts;
mod extension;
mod extension_params;
mod extremes;
mod frames;
mod graph;
mod hostile;
mod image_errors;
mod image_properties;
mod images;
mod logprobs;
mod mask_modes;
mod masks;
mod outputs;
mod prefixes;
mod properties;
mod reply;
mod requests;
mod states;
mod vectors;
