//! KV cache bookkeeping: which pages are free, and which hold the KV of which tokens.
//!
//! | module | what it is |
//! |---|---|
//! | [`pages`] | the page pool: free pages, reference counts, copy-on-write |
//! | [`radix`] | the prefix index: a radix tree from tokens to pages, with eviction and a host tier |
//!
//! Both deal in page ids. Neither owns memory, copies KV, or knows the other.

pub mod pages;
pub mod radix;

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
pub struct Readme;
