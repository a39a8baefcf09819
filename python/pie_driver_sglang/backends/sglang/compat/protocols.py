"""What differs between the supported versions of SGLang, as typed protocols.

Modules implement them: those of `v0517` and `v0523`. `selection` returns that of the installed
version. Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


class SettingsCompat(Protocol):
    """`ServerArgs`: resolved, published, changed and read."""

    def resolve(self, args: ServerArgs) -> None:
        """Resolves settings that have just been made; a second call does nothing."""

    def check_lora(self, args: ServerArgs) -> None:
        """Checks and normalizes what they say of adapters, as SGLang's launch does it."""

    def publish(self, args: ServerArgs, rank: int, gpu_id: int, replica: int | None = None) -> None:
        """Makes settings those of this process, a scheduler's."""

    def change(self, args: ServerArgs, fields: Mapping[str, Any]) -> None:
        """Changes published settings."""

    def values(self, args: ServerArgs) -> ServerArgs:
        """An object whose attributes are the values in effect, by the names of the fields."""

    def attention_backends(self, args: ServerArgs) -> tuple[str, str]:
        """The attention backends of prefills and of decodes."""

    def initialize_kernels(self, args: ServerArgs) -> None:
        """Chooses the kernels of MoE and quantized layers, as SGLang's scheduler does it."""


class RanksCompat(Protocol):
    """Where a runner's rank comes from. Imports SGLang where a function needs it."""

    def runner_arguments(self, rank: int, size: int, gpu_id: int) -> dict[str, Any]:
        """The arguments of `ModelRunner` that name the rank."""

    def make_groups(self, args: ServerArgs, model_config: ModelConfig) -> None:
        """Makes SGLang's process groups, where a runner does not do so itself."""

    def rank_and_size(self, runner: ModelRunner) -> tuple[int, int]:
        """The rank of a runner, and the number of ranks."""


class LayersCompat(Protocol):
    """Layers of models, as far as they differ."""

    def fuses_shared_experts(self, topk_config: Any) -> bool:
        """Whether a router chooses experts that every token takes, too."""

    def adds_last_residual_again(self, model: Any) -> bool:
        """Whether a model's final norm adds what the output of its layers contains already."""


class PassesCompat(Protocol):
    """Passes, as far as they differ."""

    def read_block_table(self, runner: ModelRunner) -> None:
        """Has backends that are made from now on read the runner's present block table."""

    def plan_kv(self, runner: ModelRunner, batch: ForwardBatch) -> None:
        """Gives a batch what attention backends read its KV indices from, besides its rows."""


class LoraCompat(Protocol):
    """The LoRA manager."""

    def bind_by_memory(self, manager: LoRAManager, rows: int) -> None:
        """Keeps the adapters of decodes of up to so many rows where captured graphs read them."""
