//! Plans, staged blocks and replies, in one program: what they share is compiled once.

mod common;

mod drafts;
mod extension;
mod extremes;
mod frames;
mod graph;
mod hostile;
mod images;
mod logprobs;
mod masks;
mod prefixes;
mod properties;
mod reply;
mod requests;
mod states;
mod vectors;
