"""The handshake: two lines of JSON on an inherited pipe, with the driver's capabilities.

The fields, their limits and the order of the lines are those of the Pie driver protocol.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import Final

import msgspec

from pie_driver_sglang.errors import ConfigError, StartError, quoted

#: Value of a limit that the driver does not have.
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
    """What the driver can do. Counts are u32; a batch is what one request frame holds.

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
        max_logprob_labels: Labels whose log-probability one batch may ask for.
        arch_name: Architecture; selects the chat template.
        vocab_size: Output vocabulary in tokens.
        max_model_len: Positions of one context.
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


class _GroupLine(msgspec.Struct, frozen=True):
    """The first line: which region serves which group."""

    group_id: int
    shmem_name: str
    caps: Capabilities


class Handshake:
    """The write end of the runtime's pipe.

    The runtime takes the end of the pipe for the end of the driver, so no child process may keep
    it open: the descriptor becomes close-on-exec at once.
    """

    def __init__(self, fd: int) -> None:
        """Take over the descriptor.

        Raises:
            ConfigError: `fd` is not open, or not open for writing.
        """
        hint = "the Pie runtime passes this descriptor; by hand, add `3>handshake.json`"
        try:
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            os.set_inheritable(fd, False)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--handshake-fd {fd} is not an open descriptor", hint) from error
        if mode == os.O_RDONLY:
            raise ConfigError(f"--handshake-fd {fd} is not open for writing", hint)
        self._fd: int | None = fd

    def announce(self, group_id: int, shmem_name: str, caps: Capabilities) -> None:
        """Announce the driver to the runtime, and close the pipe.

        Call it when the region exists and every kernel is warm: the first request may follow at
        once.

        Args:
            group_id: The group of the configuration.
            shmem_name: The region, `/pie_shmem_g<group_id>`.
            caps: What the driver can do.

        Raises:
            StartError: The runtime is gone, the pipe is closed, or the name does not belong to the
                group.
        """
        if self._fd is None:
            raise StartError("the handshake is already over", "report this as a bug of the driver")
        if shmem_name != f"/pie_shmem_g{group_id}":
            raise StartError(
                f"region {quoted(shmem_name)} is not the region of group {group_id}",
                f"name it /pie_shmem_g{group_id}",
            )
        named = msgspec.structs.replace(caps, shmem_name=shmem_name)
        lines = msgspec.json.encode(_GroupLine(group_id, shmem_name, named))
        try:
            _write_all(self._fd, lines + b'\n{"ready":true,"num_groups":1}\n')
        except OSError as error:
            raise StartError(
                f"the handshake could not be written: {error.strerror or error}",
                "the Pie runtime that started this driver is gone or gave up; see its own log",
            ) from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the pipe; without `announce` the runtime takes this for a failed start."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    """Write everything in one call if the pipe takes it, in several if it is full."""
    os.set_blocking(fd, True)
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
