"""SGLang's settings: made, published, changed, and read as it has resolved them.

`ServerArgs` is passed on for annotations, `load_plugins` as it is: it loads SGLang's own plugins,
before anything else of SGLang is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sglang.kernels.ops.mamba.triton_ops import (
    initialize_mamba_selective_state_update_backend,
)
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_lora, get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import set_random_seed

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.backends.sglang.compat.ranks import TpRank

__all__ = ["ServerArgs", "load_plugins"]


def make_settings(fields: Mapping[str, Any]) -> ServerArgs:
    """`ServerArgs`, resolved and checked as SGLang's own launch does it."""
    args = ServerArgs(**fields)
    selection.settings().resolve(args)
    selection.settings().check_lora(args)
    return args


def publish_settings(args: ServerArgs, rank: TpRank, gpu_id: int) -> None:
    """Makes settings those of the process, once: again would drop changes in later versions."""
    selection.settings().publish(args, rank.number, gpu_id)


def change_settings(args: ServerArgs, **fields: Any) -> None:
    """Changes published settings, which are read-only otherwise."""
    selection.settings().change(args, fields)


def prepare_layers(args: ServerArgs) -> None:
    """What SGLang's scheduler sets before it makes a runner."""
    selection.settings().initialize_kernels(args)
    initialize_mamba_selective_state_update_backend(args)
    set_random_seed(selection.settings().values(args).random_seed)


def lora_targets() -> Iterable[str]:
    """The published `lora_target_modules`; the namespace `lora` must exist."""
    targets: Iterable[str] = get_lora().lora_target_modules
    return targets


@contextmanager
def lora_targets_changed(targets: set[str]) -> Iterator[None]:
    """Within it a LoRA manager is made for these layers; reads of the namespace must see it."""
    with get_lora().override(lora_target_modules=targets):
        yield


@contextmanager
def rank_count(ranks: int) -> Iterator[None]:
    """Within it SGLang divides heads by so many ranks, before it has made its groups."""
    with get_parallel().override(attn_tp_size=ranks):
        yield


class Resolved:
    """What SGLang has made of its settings; each property reads the value in effect."""

    def __init__(self, args: ServerArgs) -> None:
        """Reads nothing yet: fields may change until the model is loaded."""
        self._args = args
        self._values = selection.settings().values(args)

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        name: str = self._values.device
        return name

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self._values.page_size)

    @property
    def attention_backend(self) -> str | None:
        """The backend that is named for both phases."""
        name: str | None = self._values.attention_backend
        return name

    @property
    def decode_attention_backend(self) -> str | None:
        """The backend that is named for decodes only."""
        name: str | None = self._values.decode_attention_backend
        return name

    @property
    def vision_backend(self) -> str | None:
        """The attention backend of a vision encoder; None for SGLang's choice."""
        name: str | None = self._values.mm_attention_backend
        return name

    @property
    def attention_backends(self) -> tuple[str, str]:
        """The backends of prefills and of decodes."""
        return selection.settings().attention_backends(self._args)

    @property
    def kv_cache_dtype(self) -> str:
        """The name of the KV pool's dtype; `auto` for the model's."""
        name: str = self._values.kv_cache_dtype
        return name

    @property
    def load_format(self) -> str:
        """How weights are read."""
        name: str = self._values.load_format
        return name

    @property
    def mem_fraction_static(self) -> float:
        """The share of the device for weights and KV."""
        share: float = self._values.mem_fraction_static
        return share

    @property
    def tp_size(self) -> int:
        """Ranks of the model."""
        return int(self._values.tp_size)

    @property
    def enable_lora(self) -> bool:
        """Whether the model takes adapters."""
        return bool(self._values.enable_lora)

    @property
    def lora_backend(self) -> str:
        """The kernels of adapters."""
        name: str = self._values.lora_backend
        return name

    @property
    def enable_fp32_lm_head(self) -> bool:
        """Whether logits are computed in float32."""
        return bool(self._values.enable_fp32_lm_head)

    @property
    def enable_deterministic_inference(self) -> bool:
        """Whether sums do not depend on the batch."""
        return bool(self._values.enable_deterministic_inference)
