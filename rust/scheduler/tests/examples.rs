//! The engine of the examples serves.

#[path = "../examples/engine.rs"]
#[expect(dead_code, reason = "its `main` writes to the terminal")]
mod engine;

use std::error::Error;

/// Two sentences, three pages of 16 tokens, and the beginning of a sentence about one of them.
fn prompt(start: &str) -> String {
    format!("The cat sat on the mat. The dog lay on the rug. {start}")
}

#[test]
fn prompts_share_the_pages_of_a_common_prefix() -> Result<(), Box<dyn Error>> {
    let prompts = ["The cat", "The dog", "A frog"].map(prompt);
    let mut out = Vec::new();
    engine::serve(&prompts, &mut out)?;
    let out = String::from_utf8(out)?;
    for (line, answer) in out.lines().zip([" sat on the mat.", " lay on the rug."]) {
        assert!(line.contains(&format!("{answer:?}")), "{out}");
    }
    assert_eq!(
        out.matches("48 of 55 prompt tokens cached").count(),
        1,
        "{out}"
    );
    assert_eq!(
        out.matches("48 of 54 prompt tokens cached").count(),
        1,
        "{out}"
    );
    assert!(out.ends_with("\n16 pages free\n"), "{out}");
    Ok(())
}

/// 12 requests of 5 pages in 16, which have nothing in common.
#[test]
fn a_small_pool_changes_no_output() -> Result<(), Box<dyn Error>> {
    let prompts: Vec<String> = (10..22)
        .map(|at| format!("{at} {}", prompt(["The cat", "The dog"][at % 2])))
        .collect();
    let mut out = Vec::new();
    engine::serve(&prompts, &mut out)?;
    let out = String::from_utf8(out)?;
    for (answer, count) in [(" sat on the mat.", 6), (" lay on the rug.", 6)] {
        assert_eq!(out.matches(&format!("{answer:?}")).count(), count, "{out}");
    }
    assert!(out.ends_with("\n16 pages free\n"), "{out}");
    Ok(())
}
