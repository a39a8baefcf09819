"""The runtime's part: KV pages, contexts and continuous batching."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, Protocol, Self

from pie_driver_sglang.errors import ConfigError

WAITING: Final = "waiting"
RUNNING: Final = "running"
AT_END: Final = "end of text"
AT_LIMIT: Final = "token limit"


@dataclass(frozen=True)
class Limits:
    """What the driver announced; the names are those of the handshake."""

    total_pages: int
    kv_page_size: int
    max_forward_tokens: int
    max_forward_requests: int
    max_page_refs: int
    max_model_len: int
    arch_name: str

    @classmethod
    def of(cls, capabilities: Mapping[str, Any]) -> Self:
        """Picks the fields out of the handshake's capabilities."""
        return cls(**{item.name: capabilities[item.name] for item in fields(cls)})


@dataclass(frozen=True)
class Sampling:
    """A sampler: how it is shown, and the method of `_core.Sampler` that makes it."""

    label: str
    method: str
    arguments: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pass:
    """One context's share of a batch."""

    context_id: int
    tokens: Sequence[int]
    positions: Sequence[int]
    pages: Sequence[int]
    last_page_len: int
    sampling: Sampling


class BatchRunner(Protocol):
    """Runs a batch: the spawned driver, or a test's own."""

    def forward(self, passes: Sequence[Pass]) -> list[int]:
        """Returns the token of each pass."""
        ...


@dataclass
class Context:
    """One prompt and what follows it.

    Attributes:
        number: From 1; also the context id on the wire.
        prompt: The prompt's text.
        prompt_tokens: The prompt's tokens.
        sampling: How its tokens are chosen.
        limit: Most tokens to generate.
        arrival: The step at which it arrives.
        detokenise: Turns the next token into text; empty while a character is incomplete.
        tokens: What was generated.
        text: The text of it.
        state: `WAITING`, `RUNNING`, `AT_END` or `AT_LIMIT`.
        pages: Its KV pages, in order.
        stored: Tokens in them.
    """

    number: int
    prompt: str
    prompt_tokens: Sequence[int]
    sampling: Sampling
    limit: int
    arrival: int
    detokenise: Callable[[int], str]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    state: str = WAITING
    pages: list[int] = field(default_factory=list)
    stored: int = 0

    @property
    def pending(self) -> Sequence[int]:
        """The tokens of the next pass: the prompt, then the last token."""
        return self.tokens[-1:] or self.prompt_tokens

    @property
    def done(self) -> bool:
        """Whether nothing more will be generated."""
        return self.state in (AT_END, AT_LIMIT)

    def take(self, token: int, end_tokens: frozenset[int]) -> None:
        """Appends a generated token."""
        self.tokens.append(token)
        if token in end_tokens:
            self.state = AT_END
            return
        self.text += self.detokenise(token)
        if len(self.tokens) >= self.limit:
            self.state = AT_LIMIT


class PagePool:
    """The free pages: last in, first out, from the highest id, as the Pie runtime keeps them."""

    def __init__(self, total_pages: int) -> None:
        """Frees the pages 0 to `total_pages` - 1."""
        self._free = list(range(total_pages))

    def __len__(self) -> int:
        """Returns how many pages are free."""
        return len(self._free)

    def take(self) -> int:
        """Returns a free page."""
        return self._free.pop()

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages; the last of them is the next to be taken."""
        self._free.extend(pages)


class Runtime:
    """Steps through all contexts: each batch holds every running context and the new ones.

    A new context's prompt is in the batch that decodes the others. It is admitted once the pages
    that it may need at most are certain, so no context ever waits in its middle.

    Attributes:
        contexts: All contexts, in the order of their arrival.
        steps: Batches so far.
        rows: Passes in all of them.
    """

    def __init__(
        self,
        driver: BatchRunner,
        limits: Limits,
        contexts: Sequence[Context],
        end_tokens: frozenset[int],
    ) -> None:
        """Checks that every context fits, and shortens those that would outgrow the model.

        Raises:
            ConfigError: A prompt is empty or too long.
        """
        self.contexts = contexts
        self.steps = 0
        self.rows = 0
        self._driver = driver
        self._limits = limits
        self._end_tokens = end_tokens
        self._pool = PagePool(limits.total_pages)
        self._unpromised = min(limits.total_pages, limits.max_page_refs)
        self._running: list[Context] = []
        self._waiting = list(contexts)
        for context in contexts:
            self._fit(context)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return sum(len(context.tokens) for context in self.contexts)

    @property
    def free_pages(self) -> int:
        """Pages that no context uses."""
        return len(self._pool)

    def step(self) -> bool:
        """Runs one batch.

        Returns:
            Whether there was anything left to do.
        """
        self._admit()
        if not self._running:
            return False
        batch = self._running
        tokens = self._driver.forward([self._pass(context) for context in batch])
        for context, token in zip(batch, tokens, strict=True):
            context.stored += len(context.pending)
            context.take(token, self._end_tokens)
            if context.done:
                self._release(context)
        self._running = [context for context in batch if not context.done]
        self.steps += 1
        self.rows += len(batch)
        return True

    def _fit(self, context: Context) -> None:
        length = len(context.prompt_tokens)
        # The last token needs no page: it is never fed back.
        room = min(self._unpromised * self._limits.kv_page_size, self._limits.max_model_len)
        longest = min(room, self._limits.max_forward_tokens)
        if length == 0:
            raise ConfigError(f"prompt {context.number} is empty", "pass a text to --prompt")
        if length > longest:
            raise ConfigError(
                f"prompt {context.number} has {length} tokens, this model takes up to {longest}",
                "shorten it, or pass a model with a longer context to --model",
            )
        context.limit = min(context.limit, room - length + 1)

    def _admit(self) -> None:
        """Starts the contexts that have arrived, in order, as far as they fit."""
        while self._waiting and self._may_start(self._waiting[0]):
            context = self._waiting.pop(0)
            context.state = RUNNING
            self._unpromised -= self._most_pages(context)
            self._running.append(context)

    def _may_start(self, context: Context) -> bool:
        if not self._running:
            return True
        tokens = sum(len(running.pending) for running in self._running)
        return (
            context.arrival <= self.steps
            and len(self._running) < self._limits.max_forward_requests
            and tokens + len(context.prompt_tokens) <= self._limits.max_forward_tokens
            and self._most_pages(context) <= self._unpromised
        )

    def _most_pages(self, context: Context) -> int:
        return self._pages_for(len(context.prompt_tokens) + context.limit - 1)

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.kv_page_size)

    def _pass(self, context: Context) -> Pass:
        end = context.stored + len(context.pending)
        while len(context.pages) < self._pages_for(end):
            context.pages.append(self._pool.take())
        return Pass(
            context_id=context.number,
            tokens=tuple(context.pending),
            positions=range(context.stored, end),
            pages=tuple(context.pages),
            last_page_len=(end - 1) % self._limits.kv_page_size + 1,
            sampling=context.sampling,
        )

    def _release(self, context: Context) -> None:
        self._unpromised += self._most_pages(context)
        self._pool.give_back(context.pages)
        context.pages = []
