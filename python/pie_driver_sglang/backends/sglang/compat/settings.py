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
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_lora, get_parallel, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import set_random_seed

__all__ = ["ServerArgs", "load_plugins"]

_SOURCE = "pie_driver_sglang"
"""Who changes a setting, for SGLang's log."""


def make_settings(fields: Mapping[str, Any]) -> ServerArgs:
    """`ServerArgs`, checked as SGLang's own launch does it; later versions check in hooks."""
    args = ServerArgs(**fields)
    args.check_lora_server_args()
    return args


def publish_settings(args: ServerArgs) -> None:
    """Makes settings those of the process; later versions drop changes when it is called again."""
    publish(args, role="scheduler")


def change_settings(args: ServerArgs, **fields: Any) -> None:
    """Changes resolved fields, which are read-only otherwise; later versions seal `ServerArgs`."""
    args.override(_SOURCE, **fields)


def prepare_layers(args: ServerArgs) -> None:
    """What SGLang's scheduler sets before it makes a runner; later versions take no argument."""
    initialize_moe_config(args)
    initialize_fp8_gemm_config(args)
    initialize_fp4_gemm_config(args)
    initialize_bf16_gemm_config(args)
    initialize_mamba_selective_state_update_backend(args)
    set_random_seed(args.random_seed)


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
    """What SGLang has made of its settings.

    Each property reads one resolved field. A version whose `ServerArgs` keeps what was passed in,
    and resolves elsewhere, gives defaults here without an error.
    """

    def __init__(self, args: ServerArgs) -> None:
        """Reads nothing yet: fields may change until the model is loaded."""
        self._args = args

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        name: str = self._args.device
        return name

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return int(self._args.page_size)

    @property
    def attention_backend(self) -> str | None:
        """The backend that is named for both phases."""
        name: str | None = self._args.attention_backend
        return name

    @property
    def decode_attention_backend(self) -> str | None:
        """The backend that is named for decodes only."""
        name: str | None = self._args.decode_attention_backend
        return name

    @property
    def vision_backend(self) -> str | None:
        """The attention backend of a vision encoder; None for SGLang's choice."""
        name: str | None = self._args.mm_attention_backend
        return name

    @property
    def attention_backends(self) -> tuple[str, str]:
        """The backends of prefills and of decodes."""
        prefill, decode = self._args.get_attention_backends()
        return prefill, decode

    @property
    def kv_cache_dtype(self) -> str:
        """The name of the KV pool's dtype; `auto` for the model's."""
        name: str = self._args.kv_cache_dtype
        return name

    @property
    def load_format(self) -> str:
        """How weights are read."""
        name: str = self._args.load_format
        return name

    @property
    def mem_fraction_static(self) -> float:
        """The share of the device for weights and KV."""
        share: float = self._args.mem_fraction_static
        return share

    @property
    def tp_size(self) -> int:
        """Ranks of the model."""
        return int(self._args.tp_size)

    @property
    def enable_lora(self) -> bool:
        """Whether the model takes adapters."""
        return bool(self._args.enable_lora)

    @property
    def lora_backend(self) -> str:
        """The kernels of adapters."""
        name: str = self._args.lora_backend
        return name

    @property
    def enable_fp32_lm_head(self) -> bool:
        """Whether logits are computed in float32."""
        return bool(self._args.enable_fp32_lm_head)

    @property
    def enable_deterministic_inference(self) -> bool:
        """Whether sums do not depend on the batch."""
        return bool(self._args.enable_deterministic_inference)
