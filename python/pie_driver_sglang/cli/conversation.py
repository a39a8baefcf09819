"""A chat with a model: messages, branches, and files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.errors import ConfigError, quoted, reason

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
    from pie_driver_sglang.frontends.offline.engine import Engine


class Conversation:
    """Chat messages, and saved branches of them.

    Every request repeats the earlier messages, whose KV is in the prefix cache.

    Attributes:
        messages: Each with `role` and `content`.
        meta: `meta_info` of the last answer.
    """

    def __init__(
        self, engine: Engine, tokenizer: ModelTokenizer, sampling: Mapping[str, Any]
    ) -> None:
        """No messages yet."""
        self.messages: list[dict[str, str]] = []
        self.meta: dict[str, Any] = {}
        self._engine = engine
        self._tokenizer = tokenizer
        self._sampling = dict(sampling)
        self._branches: list[list[dict[str, str]]] = []

    def ask(self, text: str) -> Iterator[str]:
        """Stream the answer; closing the iterator stops it, and keeps what was generated."""
        asked = [*self.messages, {"role": "user", "content": text}]
        stream = self._engine.generate(
            input_ids=self._tokens(asked), sampling_params=self._sampling, stream=True
        )
        shown = ""
        try:
            for found in stream:
                self.meta = found["meta_info"]
                new, shown = found["text"][len(shown) :], found["text"]
                if new:
                    yield new
        finally:
            stream.close()
            self.messages = [*asked, {"role": "assistant", "content": shown}]

    def reset(self) -> None:
        """Drop all messages but the system message."""
        self.messages = [message for message in self.messages[:1] if message["role"] == "system"]
        self.meta = {}

    @property
    def system(self) -> str:
        """The system message; empty for none."""
        first = self.messages[0] if self.messages else {}
        return first.get("content", "") if first.get("role") == "system" else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self.system else self.messages
        self.messages = [{"role": "system", "content": text}, *rest] if text else rest

    def fork(self) -> int:
        """Save the conversation as a branch, and return its number."""
        self._branches.append(list(self.messages))
        return len(self._branches)

    def go_back(self, number: int) -> None:
        """Return to a branch.

        Raises:
            ConfigError: No branch has that number.
        """
        if not 1 <= number <= len(self._branches):
            raise ConfigError(
                f"there is no branch {number}, there are {len(self._branches)}",
                "keep one with `/fork`",
            )
        self.messages = list(self._branches[number - 1])

    def save(self, path: Path) -> None:
        """Write the messages to a file, as JSON.

        Raises:
            ConfigError: It cannot be written.
        """
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=2)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"cannot write {quoted(str(path))}: {reason(error)}", "name another file"
            ) from error

    def load(self, path: Path) -> None:
        """Load a file of `save`.

        Raises:
            ConfigError: It cannot be read, or holds something else.
        """
        hint = "name a file that `/save` wrote"
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {quoted(str(path))}: {reason(error)}", hint) from error
        messages = found.get("messages") if isinstance(found, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ConfigError(f"{quoted(str(path))} holds no conversation", hint)
        self.messages = messages

    def _tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self._tokenizer.can_chat:
            return self._tokenizer.encode_plain(self._tokenizer.chat(messages))
        # Without a template the model continues the text.
        return self._tokenizer.encode(["".join(message["content"] for message in messages)])[0]


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )
