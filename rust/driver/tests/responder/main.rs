//! A client against the responder, with an engine that samples token 7.

mod adapters;
mod common;
mod copies;
mod counts;
mod images;
mod requests;
