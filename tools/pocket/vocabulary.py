"""The tokenizer: byte-level BPE with Qwen3's special tokens at the end of the vocabulary."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = [END_OF_TEXT, "<|im_start|>", END_OF_TURN]
MARKUP_TOKENS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
ADDED_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS
MAX_LENGTH = 2048

# Qwen's splitting rule: words, single digits, runs of punctuation, line ends, white space.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`; added tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(ADDED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_added(token) for token in CONTROL_TOKENS])
    tokenizer.add_tokens([_added(token) for token in MARKUP_TOKENS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the text yields {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the tokenizer its chat template and the names of its control tokens."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text("utf-8")
    return fast


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False, special=token in CONTROL_TOKENS)
