//! What is refused, and what is drawn.

use pie_kv_cache::radix::{
    Config, EvictResult, InsertParams, Key, MAX_PAGE_SIZE, NodeId, Policy, RadixError, RadixIndex,
};

fn index(page_size: u32) -> RadixIndex {
    let config = Config {
        page_size,
        ..Config::default()
    };
    RadixIndex::new(config).expect("a valid config")
}

#[test]
fn an_index_can_be_sent_and_shared() {
    fn check<T: Send + Sync>() {}
    check::<RadixIndex>();
}

#[test]
fn settings_out_of_range_are_named() {
    for page_size in [0, MAX_PAGE_SIZE + 1] {
        let config = Config {
            page_size,
            ..Config::default()
        };
        let error = RadixIndex::new(config).expect_err("it is out of range");
        assert_eq!(error, RadixError::PageSize { page_size });
        assert_eq!(
            error.to_string(),
            format!("page size {page_size} is not within 1..=1024")
        );
    }
    assert_eq!("slru".parse(), Ok(Policy::Slru));
    let error = "arc".parse::<Policy>().expect_err("it is unknown");
    assert!(error.to_string().contains("`arc`"), "{error}");
}

#[test]
fn a_refused_call_changes_nothing() {
    let mut index = index(2);
    let inserted = index.insert(Key::new(&[1, 2, 3, 4, 5]), &[7, 8], InsertParams::default());
    let node = inserted.expect("two pages").node;
    let before = index.to_json();
    let count = |pages, wanted| Err(RadixError::PageCount { pages, wanted });
    let insert = |index: &mut RadixIndex, node, tokens: &[u32], pages: &[u32]| {
        index
            .insert_after(node, Key::new(tokens), pages, InsertParams::default())
            .map(|_| ())
    };
    assert_eq!(
        insert(&mut index, NodeId::ROOT, &[1, 2, 3], &[9, 10]),
        count(2, 1)
    );
    assert_eq!(insert(&mut index, node, &[1, 2], &[9]), count(1, 2));
    assert_eq!(index.unlock(node), Err(RadixError::NotLocked { index: 1 }));
    assert_eq!(index.load(node, &[1], &mut Vec::new()), count(1, 0));
    assert_eq!(index.backup(node, &[1], &mut Vec::new()), count(1, 2));
    let root = index.backup(NodeId::ROOT, &[], &mut Vec::new());
    assert_eq!(root, Err(RadixError::NotOnDevice { index: 0 }));
    assert_eq!(index.to_json(), before);
}

#[test]
fn an_evicted_node_is_never_another_one() {
    let mut index = index(1);
    let add = |index: &mut RadixIndex, token| {
        let inserted = index.insert(Key::new(&[token]), &[token], InsertParams::default());
        inserted.expect("a page").node
    };
    let first = add(&mut index, 1);
    index.evict(1, &mut EvictResult::default());
    let second = add(&mut index, 2);
    assert_ne!(first, second);
    assert!(matches!(
        index.lock(first),
        Err(RadixError::UnknownNode { .. })
    ));
    assert_eq!(NodeId::from_bits(second.to_bits()), second);
    index.reset(&mut EvictResult::default());
    let third = add(&mut index, 3);
    assert!(index.info(second).is_err());
    assert_eq!(index.lock(third), Ok(1));
}

#[test]
fn exports_show_sizes_locks_and_tiers() {
    let mut index = index(1);
    let key = Key::new(&[1, 2, 3, 4]).within("lora \"a\"");
    index
        .insert(key, &[5, 6, 7, 8], InsertParams::default())
        .expect("four pages");
    let mut pages = Vec::new();
    let found = index.match_and_lock(
        Key {
            tokens: &[1, 2, 9],
            ..key
        },
        9,
        &mut pages,
    );
    index.evict_to_host(1, &[100, 101], &mut EvictResult::default());
    let picture: serde_json::Value = serde_json::from_str(&index.to_json()).expect("valid JSON");
    assert_eq!(
        (&picture["device_pages"], &picture["host_pages"]),
        (&2.into(), &2.into())
    );
    let nodes = picture["nodes"].as_array().expect("a list");
    let upper = nodes
        .iter()
        .find(|node| node["id"] == found.node.to_bits())
        .expect("it is there");
    assert_eq!(upper["namespace"], "lora \"a\"");
    assert_eq!(
        (&upper["locks"], &upper["tokens"]),
        (&1.into(), &vec![1, 2].into())
    );
    let lower = nodes
        .iter()
        .find(|node| node["parent"] == found.node.to_bits())
        .expect("it is there");
    assert_eq!(
        (&lower["on_device"], &lower["on_host"]),
        (&false.into(), &true.into())
    );
    let dot = index.to_dot();
    assert_eq!(dot.matches(" -> ").count(), 2);
    assert!(
        dot.contains("dashed") && dot.contains("penwidth=3"),
        "{dot}"
    );
}

#[test]
fn merged_nodes_keep_the_later_time_and_the_higher_counts() {
    let mut index = index(1);
    let insert = |index: &mut RadixIndex, tokens: &[u32], now, priority| {
        let how = InsertParams {
            now,
            priority,
            ..InsertParams::default()
        };
        index
            .insert(Key::new(tokens), tokens, how)
            .expect("whole pages")
            .node
    };
    let lower = insert(&mut index, &[1, 2, 3, 4], 10, 5);
    let upper = insert(&mut index, &[1, 2], 20, 3);
    insert(&mut index, &[1, 2], 30, 8);
    assert_eq!((index.len(), index.merge(), index.len()), (2, 1, 1));
    let info = index.info(lower).expect("its id stays");
    assert_eq!((info.pages, info.hits, info.priority), (4, 3, 8));
    assert_eq!((info.last_access, info.created), (30, 11));
    assert!(index.info(upper).is_err());
    index.check_invariants();
}
