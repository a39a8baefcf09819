"""The capabilities that a driver announces to the Pie runtime."""

from __future__ import annotations

from typing import Final

import msgspec

from pie_driver_sglang.errors import StartError, quoted

#: Value of a limit that does not apply.
UNLIMITED: Final = 2**32 - 1

_MUST_BE_POSITIVE: Final = frozenset(
    {
        "total_pages",
        "kv_page_size",
        "max_forward_tokens",
        "max_forward_requests",
        "max_page_refs",
    }
)


class Capabilities(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The capabilities of a driver. Counts are u32; a batch is the content of one frame.

    Attributes:
        total_pages: KV pages that the runtime may use, ids 0 to total_pages - 1.
        kv_page_size: Tokens in one KV page.
        swap_pool_size: Pages of host memory for swapping; 0 for no swap.
        max_forward_tokens: Input and draft tokens in one batch.
        max_forward_requests: Requests in one batch.
        max_page_refs: Page ids in one batch, shared pages counted each time.
        max_logit_rows: Rows of logits in one batch.
        max_prob_rows: Rows of probabilities in one batch.
        max_custom_mask_bytes: Bytes of packed attention masks in one batch.
        max_sampler_rows: Sampler slots in one batch.
        max_logprob_labels: Labels whose log-probability one batch may request.
        arch_name: Architecture; selects the chat template.
        vocab_size: Output vocabulary in tokens.
        embedding_size: Dimension of an embedding model's output; 0 for generative models.
        embedding_normalized: Embeddings have norm 1.
        hidden_size: Dimension of a hidden state; 0 if requests cannot have them returned.
        embed_size: Dimension of `input_embeds`; 0 if they are not supported.
        max_model_len: Maximum tokens of one context.
        activation_dtype: Type of the activations.
        snapshot_dir: Directory from which the runtime loads the tokenizer.
        shmem_name: Name of the region; `Handshake.announce` fills it in.
        rs_cache_required: The model has recurrent state.
        rs_cache_slots: Slots for recurrent state; 0 for attention-only models.
        rs_cache_slot_bytes: Size of one such slot in bytes (u64).
        rs_cache_spec_rollback: The driver repairs recurrent state after rejected drafts.
        system_speculation_supported: The driver can draft tokens.
        enable_system_speculation: The operator switched drafting on.

    Raises:
        StartError: A value has the wrong type or does not fit.
    """

    total_pages: int
    kv_page_size: int
    swap_pool_size: int
    max_forward_tokens: int
    max_forward_requests: int
    max_page_refs: int
    max_logit_rows: int
    max_prob_rows: int
    max_custom_mask_bytes: int
    max_sampler_rows: int
    max_logprob_labels: int
    arch_name: str
    vocab_size: int
    max_model_len: int
    activation_dtype: str
    embedding_size: int = 0
    embedding_normalized: bool = False
    hidden_size: int = 0
    embed_size: int = 0
    snapshot_dir: str = ""
    shmem_name: str = ""
    rs_cache_required: bool = False
    rs_cache_slots: int = 0
    rs_cache_slot_bytes: int = 0
    rs_cache_spec_rollback: bool = False
    system_speculation_supported: bool = False
    enable_system_speculation: bool = False

    def __post_init__(self) -> None:
        """Check every field's type and range."""
        for field in msgspec.structs.fields(self):
            _check_field(field.name, field.type, getattr(self, field.name))


def _check_field(name: str, expected: type, value: object) -> None:
    if type(value) is not expected:
        raise _misfit(name, value, f"of type {expected.__name__}")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _misfit(name, value, "valid UTF-8") from None
    elif type(value) is int:
        low = 1 if name in _MUST_BE_POSITIVE else 0
        high = 2**64 - 1 if name == "rs_cache_slot_bytes" else UNLIMITED
        if not low <= value <= high:
            raise _misfit(name, value, f"from {low} to {high}")


def _misfit(name: str, value: object, expected: str) -> StartError:
    hint = "report this as a bug of the driver"
    if name in _MUST_BE_POSITIVE and value == 0:
        hint = "give the model more memory, e.g. with a larger `mem_fraction_static`"
    elif name == "snapshot_dir":
        hint = "move the snapshot to a directory whose name is valid UTF-8"
    return StartError(f"capability `{name}` is {quoted(value)}, which is not {expected}", hint)
