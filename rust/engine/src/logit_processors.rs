//! Custom logit processors of `SGLang`: those of its own that are computed here, as token masks, and others, which go to the driver's
//! process.

use std::sync::Arc;
use std::time::Duration;

use pie_scheduler::{GrammarHandle, GrammarMatcher, GrammarStatus, Mask, NewRequest};
use serde_json::{Map, Value, json};

use crate::sampling::RowParams;

mod matcher;

use self::matcher::Matcher;

/// The module of `SGLang`'s own processors.
const MODULE: &str = "sglang.srt.sampling.custom_logit_processor";

/// Characters of a wrong value in an error.
const QUOTED: usize = 60;

/// A custom logit processor of a request, validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogitProcessor {
    kind: Kind,
    /// Of those for the driver: what it reads.
    payload: Vec<u8>,
}

/// What a processor does.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Python in the driver's process.
    Python,
    /// Parameters with which `SGLang`'s own processor does nothing.
    Nothing,
    /// Ends the thinking after so many tokens.
    ThinkingBudget(ThinkingTokens, u64),
    /// These tokens are not sampled.
    Disallowed(Vec<u32>),
    /// No n-gram is repeated within a window.
    NoRepeat {
        /// Tokens of an n-gram.
        size: usize,
        /// Tokens of the window.
        window: usize,
        /// Tokens that may be sampled anyway, in rising order.
        allowed: Vec<u32>,
    },
}

/// The tokens of a model's thinking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ThinkingTokens {
    start: u32,
    end: u32,
    newline: u32,
}

const fn thinking(start: u32, end: u32, newline: u32) -> ThinkingTokens {
    ThinkingTokens {
        start,
        end,
        newline,
    }
}

/// `SGLang`'s thinking budgets by their classes.
const THINKING: [(&str, ThinkingTokens); 3] = [
    (
        "Glm4MoeThinkingBudgetLogitProcessor",
        thinking(151_350, 151_351, 198),
    ),
    (
        "Qwen3ThinkingBudgetLogitProcessor",
        thinking(151_667, 151_668, 198),
    ),
    (
        "DeepSeekR1ThinkingBudgetLogitProcessor",
        thinking(128_798, 128_799, 201),
    ),
];

impl LogitProcessor {
    /// Reads `SGLang`'s `custom_logit_processor`, as its `to_str` writes it, and the JSON of `custom_params`.
    ///
    /// # Errors
    /// What is wrong with it, for the client.
    pub fn new(text: &str, params: Option<&str>, vocab_size: u32) -> Result<Self, String> {
        let pickle = pickle_of(text)?;
        let params: Option<Map<String, Value>> = match params {
            None => None,
            Some(params) => serde_json::from_str(params)
                .map_err(|error| format!("`custom_params` is not a JSON object: {error}"))?,
        };
        let none = Map::new();
        let kind = match own_class(&pickle) {
            None => Kind::Python,
            Some(class) => kind_of(class, params.as_ref().unwrap_or(&none), vocab_size)?,
        };
        let payload = if kind == Kind::Python {
            json!({"callable": text, "params": params})
                .to_string()
                .into_bytes()
        } else {
            Vec::new()
        };
        Ok(Self { kind, payload })
    }

    /// Whether the driver's process runs it.
    #[must_use]
    pub fn is_python(&self) -> bool {
        self.kind == Kind::Python
    }

    /// Sets it in a request whose prompt and grammar are set.
    pub fn apply(mut self, vocab_size: u32, request: &mut NewRequest<RowParams>) {
        if self.kind == Kind::Nothing {
            return;
        }
        if self.is_python() {
            // Its first word is the length of the prompt.
            let mut payload = (request.prompt.len() as u32).to_le_bytes().to_vec();
            payload.append(&mut self.payload);
            let extension = request.sampling.extension.get_or_insert_default();
            Arc::make_mut(extension).processor = payload;
            request.whole_history = true;
        }
        // Each token is sampled from the logits of a step that knows the one before it: also with Python.
        request.grammar = Some(Arc::new(ProcessorHandle {
            inner: request.grammar.take(),
            processor: self,
            prompt: request.prompt.clone().into(),
            vocab_size,
        }));
    }
}

/// The pickle in the JSON of `to_str`.
fn pickle_of(text: &str) -> Result<Vec<u8>, String> {
    const WANTED: &str = "send what `CustomLogitProcessor.to_str()` returns";
    let parsed: Value = serde_json::from_str(text)
        .map_err(|error| format!("`custom_logit_processor` is not JSON ({error}): {WANTED}"))?;
    let hex = parsed.get("callable").and_then(Value::as_str);
    let hex =
        hex.ok_or_else(|| format!("`custom_logit_processor` has no text `callable`: {WANTED}"))?;
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let (pairs, rest) = hex.as_bytes().as_chunks::<2>();
    let bytes: Option<Vec<u8>> = pairs
        .iter()
        .map(|&[high, low]| Some((digit(high)? << 4 | digit(low)?) as u8))
        .collect();
    bytes
        .filter(|bytes| rest.is_empty() && !bytes.is_empty())
        .ok_or_else(|| {
            format!("`callable` of `custom_logit_processor` is no hexadecimal text: {WANTED}")
        })
}

/// The class of `SGLang`'s own processors that a pickle names, and nothing else.
fn own_class(pickle: &[u8]) -> Option<&str> {
    // PROTO, FRAME and its length; then SHORT_BINUNICODE module, MEMOIZE, SHORT_BINUNICODE class, MEMOIZE, STACK_GLOBAL.
    let (b"\x80\x04", rest) = pickle.split_at_checked(2)? else {
        return None;
    };
    let rest = match rest.split_first() {
        Some((b'\x95', rest)) => rest.get(8..)?,
        _ => rest,
    };
    let text = |bytes: &'_ [u8]| -> Option<(usize, usize)> {
        let (b'\x8c', length) = (*bytes.first()?, usize::from(*bytes.get(1)?)) else {
            return None;
        };
        let is_kept = *bytes.get(2 + length)? == b'\x94';
        is_kept.then_some((2, 2 + length))
    };
    let (start, end) = text(rest)?;
    if &rest[start..end] != MODULE.as_bytes() {
        return None;
    }
    let rest = &rest[end + 1..];
    let (start, end) = text(rest)?;
    let is_whole = matches!(&rest[end + 1..], b"\x93\x94." | b"\x93.");
    is_whole.then(|| std::str::from_utf8(&rest[start..end]).ok())?
}

/// What a class of `SGLang` does with these parameters.
fn kind_of(class: &str, params: &Map<String, Value>, vocab_size: u32) -> Result<Kind, String> {
    if let Some((_, tokens)) = THINKING.iter().find(|(name, _)| *name == class) {
        return Ok(match integer_of(params, "thinking_budget")? {
            Some(budget @ 0..) => {
                let ThinkingTokens { end, newline, .. } = *tokens;
                let outside = [end, newline]
                    .into_iter()
                    .find(|&token| token >= vocab_size);
                if let Some(token) = outside {
                    return Err(format!(
                        "`{class}` ends the thinking by token {token}, and this model has {vocab_size} tokens: send the processor \
                         of this model"
                    ));
                }
                Kind::ThinkingBudget(*tokens, budget.unsigned_abs())
            }
            _ => Kind::Nothing,
        });
    }
    match class {
        "DisallowedTokensLogitsProcessor" => Ok(Kind::Disallowed(tokens_of(
            params,
            "token_ids",
            vocab_size,
        )?)),
        "DeepseekOCRNoRepeatNGramLogitProcessor" => {
            let [size, window] = ["ngram_size", "window_size"].map(|name| {
                let value = integer_of(params, name)?.unwrap_or(0).max(0);
                Ok::<_, String>(usize::try_from(value).unwrap_or(usize::MAX))
            });
            let (size, window) = (size?, window?);
            if size == 0 || window == 0 {
                return Ok(Kind::Nothing);
            }
            let allowed = match params.get("whitelist_token_ids") {
                None | Some(Value::Null) => Vec::new(),
                Some(_) => tokens_of(params, "whitelist_token_ids", vocab_size)?,
            };
            Ok(Kind::NoRepeat {
                size,
                window,
                allowed,
            })
        }
        _ => Ok(Kind::Python),
    }
}

/// An integer, which may be left out. `SGLang` ignores values of other types, and with them the processor.
fn integer_of(params: &Map<String, Value>, name: &str) -> Result<Option<i64>, String> {
    match params.get(name) {
        None | Some(Value::Null) => Ok(None),
        // One beyond 63 bits is no limit.
        Some(Value::Number(number)) if number.is_u64() => {
            Ok(Some(number.as_i64().unwrap_or(i64::MAX)))
        }
        Some(Value::Number(number)) if number.is_i64() => Ok(number.as_i64()),
        Some(value) => {
            let text: String = value.to_string().chars().take(QUOTED).collect();
            Err(format!(
                "`{name}` of `custom_params` is {text}, expected an integer: send a number without quotes and fraction, or leave it out"
            ))
        }
    }
}

/// A list of token ids in rising order.
fn tokens_of(params: &Map<String, Value>, name: &str, vocab_size: u32) -> Result<Vec<u32>, String> {
    let token = |value: &Value| {
        let token = value.as_u64().and_then(|token| u32::try_from(token).ok());
        token.filter(|&token| token < vocab_size)
    };
    let found = params.get(name).and_then(Value::as_array);
    let found: Option<Vec<u32>> = found.and_then(|found| found.iter().map(token).collect());
    let mut found = found.ok_or_else(|| {
        format!(
            "`custom_params` needs `{name}`, a list of token ids from 0 to {}",
            vocab_size - 1
        )
    })?;
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// A processor as the scheduler's constraint, around the request's grammar.
#[derive(Debug)]
struct ProcessorHandle {
    inner: Option<Arc<dyn GrammarHandle>>,
    processor: LogitProcessor,
    prompt: Arc<[u32]>,
    vocab_size: u32,
}

impl GrammarHandle for ProcessorHandle {
    fn create_matcher(&self, most: u32, _: bool) -> GrammarStatus {
        // A processor sees the logits of each token.
        let inner = match &self.inner {
            None => None,
            Some(inner) => match inner.create_matcher(most, false) {
                GrammarStatus::Ready(inner) => Some(inner),
                other => return other,
            },
        };
        let own = Matcher::new(self.processor.kind.clone(), &self.prompt, self.vocab_size);
        GrammarStatus::Ready(Box::new(ProcessorMatcher { inner, own }))
    }

    fn is_compiling(&self) -> bool {
        self.inner
            .as_ref()
            .is_some_and(|inner| inner.is_compiling())
    }
}

/// The masks of a processor and of a grammar together.
#[derive(Debug)]
struct ProcessorMatcher {
    inner: Option<Box<dyn GrammarMatcher>>,
    own: Matcher,
}

impl GrammarMatcher for ProcessorMatcher {
    fn accept_token(&mut self, token: u32, most: u32) -> bool {
        self.own.accept_token(token);
        let inner = self.inner.as_mut();
        inner.is_some_and(|inner| inner.accept_token(token, most))
    }

    fn prepare_mask(&mut self, budget: &mut Duration) -> bool {
        let inner = self.inner.as_mut();
        inner.is_none_or(|inner| inner.prepare_mask(budget))
    }

    fn next_mask(&mut self, forced: &mut Vec<u32>) -> Result<Option<Mask>, Arc<str>> {
        let inner = match &mut self.inner {
            Some(inner) => inner.next_mask(forced)?,
            None => None,
        };
        let (mask, which) = match (self.own.mask(), inner) {
            (None, inner) => return Ok(inner),
            (Some(own), None) => (own, "token"),
            (Some(own), Some(inner)) => {
                let both = own.iter().zip(inner.iter()).map(|(a, b)| a & b);
                (Arc::new(both.collect()), "token that the grammar allows")
            }
        };
        // A mask without a token would count as none.
        if mask.iter().all(|&word| word == 0) {
            let reason = format!("the custom logit processor forbids every {which}");
            return Err(reason.into());
        }
        Ok(Some(mask))
    }
}

#[cfg(test)]
mod tests;
