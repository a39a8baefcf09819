//! What allocates, and what does not.

use allocation_counter::measure;
use pie_kv_cache::radix::{Config, EvictResult, InsertParams, Key, RadixIndex};

fn tokens(count: u32, first: u32) -> Vec<u32> {
    (0..count).map(|at| at * 7919 % 150_000 + first).collect()
}

/// An index with a long sequence that two others leave in the middle.
fn filled(page_size: u32) -> (RadixIndex, Vec<u32>) {
    let config = Config {
        page_size,
        ..Config::default()
    };
    let mut index = RadixIndex::new(config).expect("a valid config");
    let text = tokens(2048, 0);
    for (number, cut) in (0..).zip([2048, 512, 1024]) {
        let mut key = text[..cut].to_vec();
        key.extend(tokens(64, 200_000 + number));
        let pages: Vec<u32> = (0..key.len() as u32 / page_size).collect();
        index
            .insert(Key::new(&key), &pages, InsertParams::default())
            .expect("whole pages");
    }
    (index, text)
}

#[test]
fn a_hit_and_a_miss_allocate_nothing() {
    for page_size in [1, 16] {
        let (mut index, text) = filled(page_size);
        let mut pages = Vec::new();
        let mut hit = |now| {
            let found = index.match_and_lock(Key::new(&text), now, &mut pages);
            assert_eq!(found.device_pages * page_size as usize, 2048);
            index.unlock(found.node).expect("it is locked");
            assert_eq!(
                index
                    .match_prefix(Key::new(&[9; 64]), now, &mut pages)
                    .device_pages,
                0
            );
        };
        hit(1);
        assert_eq!(measure(|| hit(2)).count_total, 0);
    }
}

#[test]
fn a_split_copies_no_tokens() {
    let (mut index, text) = filled(1);
    let mut pages = Vec::with_capacity(4096);
    let before = index.memory_bytes();
    let found = index.match_prefix(Key::new(&text[..1500]), 1, &mut pages);
    assert_eq!(found.device_pages, 1500);
    // Less than a tenth of what 1,500 tokens and page ids take.
    assert!(index.memory_bytes() - before < 1500 * 7 / 10);
}

#[test]
fn evicted_nodes_free_memory() {
    let (mut index, _) = filled(16);
    let mut evicted = EvictResult::default();
    let full = index.memory_bytes();
    let pages = index.evict(70, &mut evicted);
    // Three bytes for a token; the shared start keeps a buffer of its own size.
    assert!(full - index.memory_bytes() > pages * 16 * 3);
    index.evict(usize::MAX, &mut evicted);
    assert!(index.is_empty());
}

#[test]
fn memory_bytes_are_exact() {
    let mut made = None;
    let held = measure(|| {
        let mut index = RadixIndex::new(Config::default()).expect("a valid config");
        for number in 0..2000 {
            let key = tokens(100, number * 100);
            let pages: Vec<u32> = (number * 100..number * 100 + 100).collect();
            index
                .insert(Key::new(&key), &pages, InsertParams::default())
                .expect("whole pages");
        }
        made = Some(index);
    });
    let counted = made.expect("it was made").memory_bytes() as f64;
    let ratio = counted / held.bytes_current as f64;
    assert!(
        (0.97..1.03).contains(&ratio),
        "{counted} of {}",
        held.bytes_current
    );
}
