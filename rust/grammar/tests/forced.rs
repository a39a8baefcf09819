//! Text that a grammar forces, with the tokenizer of the embedded model.

use std::path::{Path, PathBuf};

use pie_grammar::{Compiler, Grammar, Matcher, Settings, Vocabulary};
use toktrie_hf_tokenizers::ByteTokenizer;

const SCHEMA: &str = r#"{"type": "object", "properties": {"temperature": {"enum": ["lukewarm", "freezing"]}, "description": {"type": "string", "maxLength": 12}, "is_measured": {"type": "boolean"}}, "required": ["temperature", "description", "is_measured"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}"#;

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/pocket/tokenizer.json")
}

fn words() -> Vec<Vec<u8>> {
    ByteTokenizer::from_file(file()).unwrap().token_bytes()
}

fn start(tokenizer: Option<PathBuf>, grammar: &Grammar) -> Matcher {
    let vocabulary = Vocabulary::new(&words(), &[], &[0]).unwrap();
    let settings = Settings {
        tokenizer,
        ..Settings::default()
    };
    let compiler = Compiler::with_settings(vocabulary, settings).unwrap();
    compiler.compile(grammar).wait().unwrap()
}

fn mask(matcher: &mut Matcher) -> Vec<u32> {
    let mut mask = vec![0; matcher.vocabulary().mask_words()];
    matcher.fill_bitmask(&mut mask).unwrap();
    mask
}

fn allowed(mask: &[u32]) -> Vec<u32> {
    let bits = 0..mask.len() as u32 * 32;
    bits.filter(|bit| mask[*bit as usize / 32] >> (bit % 32) & 1 == 1)
        .collect()
}

#[test]
fn forced_text_is_written_as_the_model_writes_it() {
    let sentence = "The name of the function is parse_arguments, and it returns ";
    let grammar = || Grammar::Regex(format!("{sentence}(True|None)").into());
    let jump_forward_tokens = |mut matcher: Matcher| {
        let (mut tokens, mut scratch) = (Vec::new(), mask(&mut matcher));
        matcher
            .jump_forward_tokens(100, &mut scratch, &mut tokens)
            .unwrap();
        assert_eq!(scratch, mask(&mut matcher));
        tokens
    };
    let tokens = jump_forward_tokens(start(Some(file()), &grammar()));
    let tokenizer = ByteTokenizer::from_file(file()).unwrap();
    for end in ["True", "None"] {
        let text = format!("{sentence}{end}");
        let whole = tokenizer.hf_tokenizer.encode_fast(text.as_str(), false);
        assert!(whole.unwrap().get_ids().starts_with(&tokens));
    }
    let words = words();
    let text: Vec<u8> = tokens
        .iter()
        .flat_map(|&token| words[token as usize].clone())
        .collect();
    // What comes next decides how its last word is written.
    assert!(
        text.len() + 2 >= sentence.len(),
        "{:?}",
        String::from_utf8_lossy(&text)
    );
    // A file that is no tokenizer is as none. Then every way to write the text is left.
    for without in [None, Some(file().with_file_name("config.json"))] {
        assert!(jump_forward_tokens(start(without, &grammar())).is_empty());
    }
}

/// Whatever is sampled, a jump goes where masks alone would have gone, and the text fits.
#[test]
fn jumps_go_where_masks_go() {
    let validator = jsonschema::validator_for(&serde_json::from_str(SCHEMA).unwrap()).unwrap();
    let first = start(Some(file()), &Grammar::JsonSchema(SCHEMA.into()));
    let words = words();
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..20 {
        let (mut jumps, mut samples) = (first.clone(), first.clone());
        let (mut text, mut sampled, mut forced) = (Vec::new(), 0, 0);
        loop {
            let (mut tokens, mut scratch) = (Vec::new(), mask(&mut jumps));
            jumps
                .jump_forward_tokens(random.usize(1..20), &mut scratch, &mut tokens)
                .unwrap();
            for &token in &tokens {
                assert_eq!(allowed(&mask(&mut samples)), [token]);
                samples.accept_token(token).unwrap();
                text.extend_from_slice(&words[token as usize]);
            }
            forced += tokens.len();
            assert_eq!(scratch, mask(&mut samples));
            let choices = allowed(&scratch);
            let token = choices[random.usize(..choices.len())];
            jumps.accept_token(token).unwrap();
            samples.accept_token(token).unwrap();
            if jumps.has_ended() {
                break;
            }
            sampled += 1;
            text.extend_from_slice(&words[token as usize]);
        }
        let value = serde_json::from_slice(&text).unwrap();
        assert!(validator.is_valid(&value), "{value}");
        assert!(forced > sampled, "{forced} were forced, {sampled} sampled");
    }
}
