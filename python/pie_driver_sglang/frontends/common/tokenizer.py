"""The model's tokenizer, incremental detokenization, stop strings, and the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, overload

from pie_driver_sglang.errors import ConfigError, quoted, reason

_CONTEXT_TOKENS: Final = 5
"""Prompt tokens that are context for the first output tokens, as in SGLang."""
_INCOMPLETE: Final = "\ufffd"
"""What a decoder writes for an invalid or incomplete UTF-8 character."""
_SPACE: Final = "▁"
"""SentencePiece's space."""
_DOWNLOAD: Final = "download the model again, with tokenizer.json"
_TURN_ENDS: Final = ("<|eom_id|>",)
"""End-of-turn tokens that SGLang adds to those of the configuration."""

_OTHER_ARGUMENTS: Final = (
    "chat_template",
    "continue_final_message",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenizer_kwargs",
    "truncation",
)
"""Those of transformers' `apply_chat_template` that would be taken for variables."""


class ModelTokenizer:
    """A tokenizer from `tokenizer.json`. Thread-safe.

    Attributes:
        end_tokens: The EOS tokens of the model's configuration.
        file: Path of `tokenizer.json`.
    """

    def __init__(self, folder: Path) -> None:
        """Load the tokenizer of a model's folder.

        Raises:
            ConfigError: It is missing or cannot be read.
        """
        package: Any = import_module("tokenizers")
        self.file = path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"there is no {quoted(path)}", _DOWNLOAD)
        try:
            self._inner = package.Tokenizer.from_file(str(path))
        except Exception as error:  # The package raises plain exceptions.
            raise ConfigError(f"cannot read {quoted(path)}: {error}", _DOWNLOAD) from error
        self._inner.no_truncation()
        self._inner.no_padding()
        self._config = read_json(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config, "default")
        self._tool_template = _chat_template(folder, self._config, "tool_use", "default")
        self.end_tokens = _end_tokens(folder, self)

    @overload
    def encode(self, texts: str) -> list[int]: ...

    @overload
    def encode(self, texts: list[str]) -> list[list[int]]: ...

    def encode(self, texts: str | list[str]) -> list[int] | list[list[int]]:
        """Tokenize a prompt, or several in parallel; without the GIL."""
        listed = [texts] if isinstance(texts, str) else texts
        found = [list(encoding.ids) for encoding in self._inner.encode_batch_fast(listed)]
        return found[0] if isinstance(texts, str) else found

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Tokenize pairs of texts, each as one prompt."""
        return [encoding.ids for encoding in self._inner.encode_batch_fast(list(pairs))]

    def encode_plain(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens, such as a rendered chat."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Detokenize."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=skip_special_tokens)
        return text

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Detokenize each token by itself, special tokens included."""
        found: list[str] = self._inner.decode_batch(
            [[token] for token in tokens], skip_special_tokens=False
        )
        return found

    def stream(self, prompt: Sequence[int], skip_special: bool = True) -> TextStream:
        """Return an incremental detokenizer for the tokens after a prompt."""
        return TextStream(self, prompt, skip_special)

    def token(self, text: str) -> int | None:
        """Return the id of a token; None if there is none of this text."""
        found: int | None = self._inner.token_to_id(text)
        return found

    def vocabulary(self) -> list[bytes]:
        """Return the UTF-8 bytes of each token; empty for special tokens."""
        count: int = self._inner.get_vocab_size(with_added_tokens=True)
        added: Mapping[int, Any] = self._inner.get_added_tokens_decoder()
        alphabet = _byte_alphabet() if self._is_byte_level() else None
        words = (self._inner.id_to_token(number) for number in range(count))
        return [
            _added_bytes(added[number]) if number in added else _token_bytes(word or "", alphabet)
            for number, word in enumerate(words)
        ]

    def special_tokens(self) -> list[tuple[int, str]]:
        """Return ids and texts of the special tokens."""
        added: Mapping[int, Any] = self._inner.get_added_tokens_decoder()
        return [(number, str(token.content)) for number, token in added.items() if token.special]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        generate: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a conversation by the model's chat template; over HTTP SGLang does.

        Args:
            messages: Each with `role` and `content`.
            generate: Append the generation prompt.
            tools: Functions that the model may call, as JSON schemas of OpenAI's API.
            variables: Others of the template, such as `enable_thinking`.

        Raises:
            ConfigError: The model has no template, or its template refuses the conversation.
        """
        template = self._template if tools is None else self._tool_template
        if template is None:
            raise ConfigError(
                "the model has no chat template", "use plain prompts, or a model for conversations"
            )
        for tool in tools or ():
            if not isinstance(tool, Mapping):
                raise ConfigError(
                    f"an entry of `tools` is {quoted(tool)}",
                    "give JSON schemas, as {'type': 'function', 'function': {…}}",
                )
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        special = {name: _token_text(self._config.get(name)) for name in names}
        values = {**variables, "messages": messages, "tools": tools}
        return render(template, **{**special, **values, "add_generation_prompt": generate})

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """Do as :meth:`chat`, by the names of transformers; tokens unless `tokenize` is false.

        Raises:
            ConfigError: As :meth:`chat`, or an argument of transformers is not supported.
        """
        for name in _OTHER_ARGUMENTS:
            if variables.get(name):
                raise ConfigError(
                    f"`apply_chat_template` does not support `{name}`",
                    "remove it, or use the tokenizer of transformers",
                )
        text = self.chat(conversation, add_generation_prompt, tools=tools, **variables)
        return list(self.encode_plain(text)) if tokenize else text

    def for_runtime(self) -> dict[str, Any]:
        """Return the tokenizer's keyword arguments for `_core.Runtime`."""
        return {
            "vocabulary": self.vocabulary(),
            "special_tokens": self.special_tokens(),
            "tokenizer_file": self.file,
        }

    @property
    def turn_ends(self) -> set[int]:
        """The stop tokens of SGLang's server: `end_tokens`, and `<|eom_id|>`."""
        others = (self.token(text) for text in _TURN_ENDS)
        return {*self.end_tokens, *(end for end in others if end is not None)}

    @property
    def begin_token(self) -> int | None:
        """The BOS token of the model's configuration."""
        text = _token_text(self._config.get("bos_token"))
        return self.token(text) if text else None

    @property
    def can_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def _is_byte_level(self) -> bool:
        description = json.loads(self._inner.to_str())
        return '"type": "ByteLevel"' in json.dumps(description.get("decoder"))


class TokenizerManager(NamedTuple):
    """What SGLang's examples reach as `engine.tokenizer_manager`.

    Attributes:
        tokenizer: The model's tokenizer; None without one.
    """

    tokenizer: ModelTokenizer | None


class TextStream:
    """Incremental detokenization: the text of tokens as they arrive.

    As in vLLM and SGLang: the last tokens are decoded with and without the new ones, and the
    difference is the new text. An incomplete UTF-8 character is held back. `DecodeStream` of
    tokenizers cannot flush such a character at the end, and raises where a text changes.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, prompt: Sequence[int], skip_special: bool
    ) -> None:
        """Begin after a prompt."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._tokens = list(prompt[-_CONTEXT_TOKENS:])
        self._shown = len(self._tokens)

    def push(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Return the text that is complete with these tokens.

        Args:
            tokens: The next ones.
            is_last: Also return an incomplete character.
        """
        self._tokens.extend(tokens)
        before = self._tokenizer.decode(self._tokens[: self._shown], self._skip_special)
        now = self._tokenizer.decode(self._tokens, self._skip_special)
        if not is_last and now.endswith(_INCOMPLETE):
            return ""
        del self._tokens[: self._shown]
        self._shown = len(self._tokens)
        return now[len(before) :]


class StopFilter:
    """Withholds text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """Search for any of `stops`; with `keep`, the matched one stays in the text."""
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""

    def push(self, text: str) -> str:
        """Return the text that can be emitted."""
        text = self._held + text
        held = max((overlap(text, stop) for stop in self._stops), default=0)
        shown = len(text) - held
        self._held = text[shown:]
        return text[:shown]

    def finish(self, matched: str | None) -> str:
        """Return the rest, truncated at the stop string that `matched`."""
        text, self._held = self._held, ""
        start = text.find(matched) if matched in self._stops else -1
        if start < 0 or matched is None:
            return text
        return text[: start + len(matched) if self._keep else start]


def overlap(text: str, stop: str) -> int:
    """The length of the end of `text` from a match of `stop`, or of a prefix of `stop`, on."""
    start = text.find(stop)
    if start >= 0:
        return len(text) - start
    longest = min(len(stop) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def render(template: str, /, **values: Any) -> str:
    """Render a chat template, in a sandbox, since it comes with the model.

    Raises:
        ConfigError: The template is invalid, or raises.
    """
    jinja: Any = import_module("jinja2")
    sandbox: Any = import_module("jinja2.sandbox")

    def refuse(message: str) -> None:
        raise jinja.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **shape: Any) -> str:
        # By the arguments that transformers' filter has: indent, separators, sort_keys.
        return json.dumps(value, ensure_ascii=ensure_ascii, **shape)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    try:
        text: str = environment.from_string(template).render(values)
    except (jinja.TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
        raise ConfigError(
            f"the model's chat template refuses the conversation: {reason(error)}",
            "check the roles and their order",
        ) from error
    return text


def _now(shape: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(shape)


def _chat_template(folder: Path, config: Mapping[str, Any], *names: str) -> str | None:
    """The template in `chat_template.jinja`, or the first of these names in the configuration."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except OSError:
        pass
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found}
        found = next((named[name] for name in names if name in named), None)
    return found if isinstance(found, str) else None


def _token_text(value: Any) -> str:
    return value.get("content", "") if isinstance(value, Mapping) else value or ""


def _end_tokens(folder: Path, tokenizer: ModelTokenizer) -> frozenset[int]:
    """The EOS tokens of the model's configurations and of the tokenizer, as in SGLang."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        ends |= configured_ends(read_json(folder / name))
    config = read_json(folder / "tokenizer_config.json")
    named = tokenizer.token(_token_text(config.get("eos_token")))
    return frozenset(ends if named is None else {*ends, named})


def configured_ends(config: Mapping[str, Any]) -> set[int]:
    """Return the `eos_token_id`s of a configuration."""
    listed = config.get("eos_token_id")
    tokens = listed if isinstance(listed, list) else [listed]
    return {token for token in tokens if isinstance(token, int)}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of a snapshot; an empty one if the file is missing.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {quoted(path)}: {reason(error)}", _DOWNLOAD) from error
    return value if isinstance(value, dict) else {}


def _added_bytes(token: Any) -> bytes:
    return b"" if token.special else str(token.content).encode()


def _token_bytes(word: str, alphabet: Mapping[str, int] | None) -> bytes:
    if alphabet is not None:
        return bytes(alphabet[letter] for letter in word if letter in alphabet)
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes.fromhex(word[3:5])
    return word.replace(_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: printable bytes are themselves, others are shifted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    return alphabet | {chr(256 + number): byte for number, byte in enumerate(others)}
