use std::fmt::Write;

use pie_wire::Sampler;
use proptest::prelude::*;

use super::*;

const VOCAB: u32 = 151_936;
const QWEN3: ThinkingTokens = thinking(151_667, 151_668, 198);

/// What `to_str` of a class of `SGLang` returns.
fn own(class: &str) -> String {
    let mut pickle = b"\x80\x04\x95".to_vec();
    pickle.extend((MODULE.len() as u64 + class.len() as u64 + 9).to_le_bytes());
    for text in [MODULE, class] {
        pickle.extend([0x8c, text.len() as u8]);
        pickle.extend(text.bytes());
        pickle.push(0x94);
    }
    pickle.extend(b"\x93\x94.");
    text_of(&pickle)
}

fn text_of(pickle: &[u8]) -> String {
    let mut hex = String::new();
    for byte in pickle {
        let _ = write!(hex, "{byte:02x}");
    }
    json!({ "callable": hex }).to_string()
}

fn kind(class: &str, params: &str) -> Result<Kind, String> {
    LogitProcessor::new(&own(class), Some(params), VOCAB).map(|processor| processor.kind)
}

#[test]
fn numbers_of_other_types_are_named() {
    for (class, name) in [
        ("Qwen3ThinkingBudgetLogitProcessor", "thinking_budget"),
        ("DeepseekOCRNoRepeatNGramLogitProcessor", "ngram_size"),
        ("DeepseekOCRNoRepeatNGramLogitProcessor", "window_size"),
    ] {
        for value in [r#""3""#, "2.5", "true", "[3]", "{}"] {
            let error = kind(class, &format!(r#"{{"{name}": {value}}}"#)).unwrap_err();
            let begin = format!("`{name}` of `custom_params` is {value}, expected an integer");
            assert!(error.starts_with(&begin), "{error}");
        }
    }
    let long = format!(r#"{{"thinking_budget": "{}"}}"#, "x\n".repeat(1000));
    let error = kind("Qwen3ThinkingBudgetLogitProcessor", &long).unwrap_err();
    assert!(error.len() < 250 && !error.contains('\n'), "{error}");
}

#[test]
fn processors_of_sglang_are_known_by_their_class() {
    let budget = |budget| Ok(Kind::ThinkingBudget(QWEN3, budget));
    let class = "Qwen3ThinkingBudgetLogitProcessor";
    assert_eq!(kind(class, r#"{"thinking_budget": 3}"#), budget(3));
    for params in [
        "{}",
        r#"{"thinking_budget": -1}"#,
        r#"{"thinking_budget": null}"#,
    ] {
        assert_eq!(kind(class, params), Ok(Kind::Nothing));
    }
    assert_eq!(
        kind(class, r#"{"thinking_budget": 18446744073709551615}"#),
        budget(i64::MAX.unsigned_abs())
    );
    let banned = kind(
        "DisallowedTokensLogitsProcessor",
        r#"{"token_ids": [7, 3, 7]}"#,
    );
    assert_eq!(banned, Ok(Kind::Disallowed(vec![3, 7])));
    for params in ["{}", r#"{"token_ids": [151936]}"#, r#"{"token_ids": 5}"#] {
        let error = kind("DisallowedTokensLogitsProcessor", params).unwrap_err();
        assert!(error.contains("needs `token_ids`"), "{error}");
    }
    let small = LogitProcessor::new(&own(class), Some(r#"{"thinking_budget": 3}"#), 300);
    assert!(small.unwrap_err().contains("token 151668"));
    // A class of another module, or with more after it, is Python.
    assert_eq!(kind("Other", "{}"), Ok(Kind::Python));
    let text = own(class).replace("2e\"}", "302e\"}");
    let more = LogitProcessor::new(&text, None, VOCAB).unwrap();
    assert!(more.is_python() && !more.payload.is_empty());
}

#[test]
fn what_is_no_processor_is_refused_by_what_is_wrong() {
    for (text, wrong) in [
        ("x", "is not JSON"),
        ("{}", "no text `callable`"),
        (r#"{"callable": "8"}"#, "no hexadecimal"),
        (r#"{"callable": "zz"}"#, "no hexadecimal"),
        (r#"{"callable": ""}"#, "no hexadecimal"),
    ] {
        let error = LogitProcessor::new(text, None, VOCAB).unwrap_err();
        assert!(error.contains(wrong), "{error}");
    }
    let error = LogitProcessor::new(&text_of(b"x"), Some("[1]"), VOCAB).unwrap_err();
    assert!(
        error.contains("`custom_params` is not a JSON object"),
        "{error}"
    );
}

/// The tokens that a mask allows.
fn allowed(mask: Option<Mask>) -> Option<Vec<u32>> {
    let mask = mask?;
    let has = |token: &u32| mask[*token as usize / 32] >> (token % 32) & 1 == 1;
    Some((0..32 * mask.len() as u32).filter(has).collect())
}

/// `SGLang`'s `ThinkingBudgetLogitProcessor`, line by line: the token that it forces.
fn forced(prompt: &[u32], output: &[u32], budget: usize, tokens: ThinkingTokens) -> Option<u32> {
    let ids = [prompt, output].concat();
    if !ids.contains(&tokens.start) || ids.contains(&tokens.end) {
        return None;
    }
    let start = ids.iter().position(|&id| id == tokens.start).unwrap();
    if ids.len() - start - 1 < budget {
        return None;
    }
    if output.last() != Some(&tokens.newline) {
        return Some(tokens.newline);
    }
    Some(tokens.end)
}

proptest! {
    #[test]
    fn a_budget_forces_what_sglang_forces(
        prompt in prop::collection::vec(0_u32..6, 0..8),
        output in prop::collection::vec(0_u32..6, 0..20),
        budget in 0_usize..12,
    ) {
        let tokens = thinking(1, 2, 3);
        let kind = Kind::ThinkingBudget(tokens, budget as u64);
        let mut matcher = Matcher::new(kind, &prompt, 6);
        for end in 0..=output.len() {
            let expected = forced(&prompt, &output[..end], budget, tokens);
            prop_assert_eq!(allowed(matcher.mask()), expected.map(|token| vec![token]));
            if let Some(&token) = output.get(end) {
                matcher.accept_token(token);
            }
        }
    }

    /// `DeepseekOCRNoRepeatNGramLogitProcessor`, line by line.
    #[test]
    fn n_grams_are_not_repeated(
        sequence in prop::collection::vec(0_u32..5, 0..24),
        size in 1_usize..5,
        window in 1_usize..20,
        allow in prop::option::of(0_u32..5),
    ) {
        let mut banned = [false; 5];
        if sequence.len() >= size {
            let prefix = &sequence[sequence.len() + 1 - size..];
            for at in sequence.len().saturating_sub(window)..=sequence.len() - size {
                let gram = &sequence[at..at + size];
                banned[gram[size - 1] as usize] |= &gram[..size - 1] == prefix;
            }
        }
        if let Some(allow) = allow {
            banned[allow as usize] = false;
        }
        let allowed_ids = allow.into_iter().collect();
        let kind = Kind::NoRepeat { size, window, allowed: allowed_ids };
        let matcher = Matcher::new(kind, &sequence, 5);
        let expected: Vec<u32> = (0..5).filter(|&token| !banned[token as usize]).collect();
        prop_assert_eq!(allowed(matcher.mask()).unwrap_or((0..5).collect()), expected);
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,60}", pickle in prop::collection::vec(any::<u8>(), 0..80)) {
        let _ = LogitProcessor::new(&text, None, VOCAB);
        let _ = LogitProcessor::new(&text_of(&pickle), None, VOCAB);
        let _ = LogitProcessor::new(&text_of(&[b"\x80\x04", &pickle[..]].concat()), None, VOCAB);
    }
}

/// A grammar that allows one token.
#[derive(Debug)]
struct Only(u32);

impl GrammarHandle for Only {
    fn create_matcher(&self, _: u32, jumps: bool) -> GrammarStatus {
        assert!(!jumps, "every token is sampled");
        GrammarStatus::Ready(Box::new(Self(self.0)))
    }

    fn is_compiling(&self) -> bool {
        false
    }
}

impl GrammarMatcher for Only {
    fn accept_token(&mut self, token: u32, _: u32) -> bool {
        token == self.0
    }

    fn next_mask(&mut self, _: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        Ok(Some(Arc::new(vec![1 << self.0])))
    }
}

#[test]
fn a_processor_and_a_grammar_hold_together() {
    let matcher = |kind: Kind, grammar: Option<Arc<dyn GrammarHandle>>| {
        let raw = RowParams::from(Sampler::RawLogits);
        let mut request = NewRequest::new(0, vec![1, 5], raw, 4);
        request.grammar = grammar;
        let payload = b"code".to_vec();
        LogitProcessor { kind, payload }.apply(40, &mut request);
        let GrammarStatus::Ready(matcher) =
            request.grammar.as_ref().unwrap().create_matcher(4, true)
        else {
            panic!("not ready");
        };
        (request, matcher)
    };
    let (request, mut both) = matcher(Kind::Disallowed(vec![3]), Some(Arc::new(Only(4))));
    assert_eq!(
        allowed(both.next_mask(&mut Vec::new()).unwrap()),
        Some(vec![4])
    );
    assert!(both.accept_token(4, 3) && !request.whole_history);
    let (_, mut none) = matcher(Kind::Disallowed(vec![4]), Some(Arc::new(Only(4))));
    let error = none.next_mask(&mut Vec::new()).unwrap_err();
    assert!(error.contains("that the grammar allows"), "{error}");
    let (_, mut none) = matcher(Kind::Disallowed((0..40).collect()), None);
    let error = none.next_mask(&mut Vec::new()).unwrap_err();
    assert!(error.ends_with("forbids every token"), "{error}");
    let (request, mut python) = matcher(Kind::Python, Some(Arc::new(Only(4))));
    assert_eq!(
        allowed(python.next_mask(&mut Vec::new()).unwrap()),
        Some(vec![4])
    );
    let extension = request.sampling.extension.unwrap();
    assert!(request.whole_history);
    assert_eq!(
        extension.processor,
        [&2_u32.to_le_bytes()[..], b"code"].concat()
    );
}
