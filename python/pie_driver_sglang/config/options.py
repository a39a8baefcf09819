"""Every option of `[model.driver.options]`, defined once.

A field of `DriverOptions` is an option: its name, type and default are the field's, and its
`About` says what it means and which values it takes. `option_checks.py` checks by these
definitions, `tools/generate_server_args.py` finds the options that SGLang has a field for, and
`tools/generate_options.py` writes `docs/options.md`. The names and defaults of the Pie driver
protocol are kept.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple

import msgspec

#: The driver's own decode attention backend on a GPU.
PAGED_DECODE: Final = "pie"
FUSED_LORA: Final = "pie"

#: Maximum requests per batch without `cuda_graph_max_bs`.
DEFAULT_MAX_FORWARD_REQUESTS: Final = 256


class Group(StrEnum):
    """The sections of the documentation, in order."""

    MODEL = "Model"
    MEMORY = "Memory"
    SPEED = "Speed"
    DRAFTS = "Drafts"
    ADAPTERS = "Adapters"
    LOGS = "Logs and traces"


class About(NamedTuple):
    """Documentation and limits of an option."""

    group: Group
    text: str
    """One or two sentences for a user, in Markdown."""
    limits: tuple[float, float] | None = None
    """Minimum and maximum of a number."""
    default: str = ""
    """The default in words, where it depends on the device or the model."""
    sglang: str = ""
    """The field of SGLang's `ServerArgs` that takes the value; empty where none does."""
    choices: tuple[str, ...] = ()
    """The allowed values, unless it is a setting of SGLang."""
    since: str = "0.1"
    """The first version of the driver with it."""


class DriverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The checked `[driver.options]`: each field with an `About` is an option."""

    context_length: Annotated[
        int | None,
        About(
            Group.MODEL,
            "Maximum context length in tokens. A value above the model's own is rejected, unless "
            "`SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1` is set.",
            limits=(1, 2**31 - 1),
            default="the model's",
            sglang="context_length",
        ),
    ] = None
    trust_remote_code: Annotated[
        bool,
        About(
            Group.MODEL,
            "Allow Python code from the model's repository or folder to run.",
            sglang="trust_remote_code",
        ),
    ] = True
    is_embedding: Annotated[
        bool,
        About(
            Group.MODEL,
            "Return embeddings of a model that generates text otherwise, as Qwen3-Embedding. "
            "Models that only return embeddings, classes or rewards do so without it.",
            sglang="is_embedding",
            since="0.2",
        ),
    ] = False
    max_image_tokens: Annotated[
        int,
        About(
            Group.MODEL,
            "Image tokens (32 x 32 pixels each) that one batch may have; Qwen-VL only. 1024 "
            "of them add up to 100 MB to the region in `/dev/shm`.",
            limits=(0, 2**17),
        ),
    ] = 1024
    max_input_embeds_bytes: Annotated[
        int,
        About(
            Group.MODEL,
            "Bytes of `input_embeds` (float32) that one batch may have: 16 embeddings or more; a "
            "longer prompt takes several batches. With 0 there are none. Pie sends none; this "
            "package's servers and `Engine` set 2097152 (2 MiB).",
            limits=(0, 2**29),
            since="0.2",
        ),
    ] = 0
    mem_fraction_static: Annotated[
        float | None,
        About(
            Group.MEMORY,
            "Share of the free device memory for weights, adapters, recurrent state and KV pages. "
            "The driver warns if a value of yours leaves less than a safe reserve.",
            limits=(0.01, 0.99),
            default="the largest safe share",
            sglang="mem_fraction_static",
        ),
    ] = None
    page_size: Annotated[
        int,
        About(
            Group.MEMORY,
            "Tokens of one KV page.",
            limits=(1, 1024),
            sglang="page_size",
        ),
    ] = 16
    kv_cache_dtype: Annotated[
        str,
        About(
            Group.MEMORY,
            "Element type of the KV pages; `auto` takes the type of the activations.",
            sglang="kv_cache_dtype",
        ),
    ] = "auto"
    cpu_mem_budget_in_gb: Annotated[
        int,
        About(
            Group.MEMORY,
            "Host memory for swapped KV pages, in GiB for all ranks together; page-locked for a "
            "GPU. With 0 the runtime recomputes suspended contexts.",
            limits=(0, 2**20),
        ),
    ] = 0
    cpu_offload_gb: Annotated[
        int,
        About(
            Group.MEMORY,
            "Weights of layers, in GiB for each rank, that stay in page-locked host memory and are "
            "copied to the GPU in every pass. Such models are not fused. On a CPU it changes "
            "nothing. Not tried on a GPU.",
            limits=(0, 2**20),
            sglang="cpu_offload_gb",
        ),
    ] = 0
    enable_memory_saver: Annotated[
        bool,
        About(
            Group.MEMORY,
            "Allocate weights and KV pages so that a GPU's memory [can be released](weight-updates"
            ".md#sleep) and taken again at the same addresses. On the CPU it changes nothing.",
            sglang="enable_memory_saver",
            since="0.2",
        ),
    ] = False
    attention_backend: Annotated[
        str,
        About(
            Group.SPEED,
            "Attention backend, or a pair `prefill,decode`. `pie` is the driver's own decode "
            "kernel for CUDA; `pie` alone means `triton,pie`. "
            "See [Attention backends](#attention-backends).",
            default="`triton,pie` on CUDA, `fa3,pie` on Hopper with FlashAttention-3, "
            "`torch_native` on the CPU",
            sglang="attention_backend",
        ),
    ]
    fuse_layers: Annotated[
        bool,
        About(
            Group.SPEED,
            "Run Llama-like models ([which](supported-models.md#families)) with the driver's fused "
            "kernels, where `pie` decodes. See [Fused layers](#fused-layers).",
        ),
    ] = True
    tune_gemms: Annotated[
        bool,
        About(
            Group.SPEED,
            "Search the GEMM configs of a fused model at its first load on a GPU, for up to 20 "
            "seconds. See [GEMM configs](#gemm-configs).",
            since="0.2",
        ),
    ] = False
    cuda_graph_max_bs: Annotated[
        int | None,
        About(
            Group.SPEED,
            "Maximum requests of one step, and the largest batch size of the decode graphs. Steps "
            "with prompts of up to 2,304 tokens, or 4,096 with a mixture of experts, are captured, "
            "too. Pie sees it as `max_forward_requests`.",
            limits=(1, 4096),
            default=f"`{DEFAULT_MAX_FORWARD_REQUESTS}`",
            sglang="max_running_requests",
        ),
    ] = None
    chunked_prefill_size: Annotated[
        int | None,
        About(
            Group.SPEED,
            "Maximum tokens of one step; longer prompts are split. -1 asks for the default.",
            limits=(-1, 2**31 - 1),
            default="16,384 on GPUs with 90 GiB and more, 8,192 on smaller ones, 2,048 on the CPU",
            sglang="chunked_prefill_size",
        ),
    ] = None
    disable_cuda_graph: Annotated[
        bool,
        About(
            Group.SPEED,
            "Run every batch eagerly through Python, without CUDA graphs. For debugging.",
        ),
    ] = False
    disable_radix_cache: Annotated[
        bool,
        About(
            Group.SPEED,
            "Without effect in a driver that Pie starts: Pie's runtime has the prefix cache. As an "
            "argument of `Engine` or a flag of `serve` it switches the prefix cache off.",
        ),
    ] = True
    spec_ngram_enabled: Annotated[
        bool,
        About(
            Group.DRAFTS,
            "Draft tokens with the n-gram drafter, for requests that ask for drafts.",
        ),
    ] = False
    spec_ngram_num_drafts: Annotated[
        int,
        About(Group.DRAFTS, "Maximum draft tokens of a request in one step.", limits=(1, 64)),
    ] = 4
    spec_ngram_max_depth: Annotated[
        int,
        About(
            Group.DRAFTS,
            "Longest match that the drafter looks for, in tokens.",
            limits=(1, 255),
        ),
    ] = 18
    spec_ngram_min_n: Annotated[
        int,
        About(
            Group.DRAFTS,
            "Shortest match that drafts, in tokens. 2, with a `spec_ngram_max_n` of 4, gives "
            "prompt lookup.",
            limits=(1, 255),
        ),
    ] = 1
    spec_ngram_max_n: Annotated[
        int | None,
        About(
            Group.DRAFTS,
            "Longest match that drafts, in tokens, where it is shorter than "
            "`spec_ngram_max_depth`.",
            limits=(1, 255),
            default="`spec_ngram_max_depth`",
        ),
    ] = None
    spec_ngram_capacity: Annotated[
        int,
        About(
            Group.DRAFTS,
            "Tokens of the history that all contexts share, of up to 64 bytes each. With 0 a "
            "context drafts from its own text only.",
            limits=(0, 2**30),
        ),
    ] = 1_000_000
    spec_suffix_enabled: Annotated[
        bool,
        About(
            Group.DRAFTS,
            "Draft tokens by suffix decoding and n-grams: drafts are as long as their probability "
            "says. The match lengths and the capacity above apply.",
            since="0.2",
        ),
    ] = False
    spec_suffix_num_drafts: Annotated[
        int,
        About(Group.DRAFTS, "`spec_ngram_num_drafts` of suffix decoding.", (1, 64), since="0.2"),
    ] = 16
    spec_suffix_max_spec_factor: Annotated[
        float,
        About(Group.DRAFTS, "Maximum drafts per token of the match.", (0.01, 64.0), since="0.2"),
    ] = 4.0
    spec_suffix_min_token_prob: Annotated[
        float,
        About(
            Group.DRAFTS,
            "Minimum estimated probability that a draft and all before it are accepted.",
            limits=(0.0, 1.0),
            since="0.2",
        ),
    ] = 0.1
    spec_eagle_path: Annotated[
        str | None,
        About(
            Group.DRAFTS,
            "Folder of an EAGLE-3 or EAGLE-2 head for the model, which drafts chains of tokens "
            "while they pay off. An absolute path.",
            default="no head",
            since="0.2",
        ),
    ] = None
    spec_eagle_num_drafts: Annotated[
        int,
        About(
            Group.DRAFTS,
            "Draft tokens of a request in one step, each a pass of the head.",
            limits=(1, 7),
            since="0.2",
        ),
    ] = 3
    enable_lora: Annotated[
        bool,
        About(
            Group.ADAPTERS,
            "Accept LoRA adapters. Memory for them is reserved at the start.",
            sglang="enable_lora",
        ),
    ] = False
    max_lora_rank: Annotated[
        int,
        About(
            Group.ADAPTERS,
            "Largest rank of an adapter.",
            limits=(1, 4096),
            sglang="max_lora_rank",
        ),
    ] = 64
    lora_target_modules: Annotated[
        Sequence[str],
        About(
            Group.ADAPTERS,
            'Layers that adapters may change, by their checkpoint names, e.g. `["q_proj", '
            '"v_proj"]`; `["all"]` for all layers that SGLang can adapt.',
            sglang="lora_target_modules",
        ),
    ] = ("all",)
    max_loras_per_batch: Annotated[
        int,
        About(
            Group.ADAPTERS,
            "Different adapters of one forward pass; the base model counts as one. Batches with "
            "more are split.",
            limits=(1, 4096),
            sglang="max_loras_per_batch",
        ),
    ] = 8
    max_loaded_loras: Annotated[
        int,
        About(
            Group.ADAPTERS,
            "Maximum adapters in the host memory of each rank; at least `max_loras_per_batch`. "
            "What happens beyond it [depends on the frontend](adapters.md#loading).",
            limits=(1, 2**20),
            sglang="max_loaded_loras",
        ),
    ] = 32
    lora_root: Annotated[
        str | None,
        About(
            Group.ADAPTERS,
            "Accept only adapters from below this folder; what symbolic links lead to counts. "
            "Without it an inferlet may name any path that the driver can read.",
            default="any folder",
        ),
    ] = None
    lora_backend: Annotated[
        str,
        About(
            Group.ADAPTERS,
            "SGLang's LoRA kernels: `triton` or `csgmv` on CUDA, `torch_native` on the CPU. With "
            "`pie` [fused layers apply adapters](adapters.md#the-backend-pie), and `triton` those "
            "that they do not support.",
            default="`triton` on CUDA, `torch_native` on the CPU",
            choices=("ascend", "csgmv", FUSED_LORA, "torch_native", "triton"),
            sglang="lora_backend",
        ),
    ] = "triton"
    enable_custom_logit_processor: Annotated[
        bool,
        About(
            Group.MODEL,
            "Run the Python of requests that bring a `custom_logit_processor`, in the driver's "
            "process: anyone who can send requests can then run code there. See "
            "[custom logit processors](sampling.md#custom-logit-processors).",
            since="0.2",
        ),
    ] = False
    trace_file: Annotated[
        str | None,
        About(
            Group.LOGS,
            "Write a Chrome trace of all steps to this regular file, for Perfetto. The file is a "
            "complete JSON array after every step. `{group}` in the path becomes the number of the "
            "driver's group. See [tracing](tracing.md).",
        ),
    ] = None
    trace_max_mib: Annotated[
        int,
        About(
            Group.LOGS,
            "Maximum size of all traces, in MiB. A trace that reaches half of it is renamed to "
            "`<trace_file>.1`, and a new one begins.",
            limits=(1, 2**20),
        ),
    ] = 1024
    log_format: Annotated[
        str,
        About(
            Group.LOGS,
            "`text` for lines to read, `json` for one JSON object a line.",
            choices=("text", "json"),
        ),
    ] = "text"
    log_level: Annotated[
        str | None,
        About(
            Group.LOGS,
            "Minimum log level.",
            default="PIE_DRIVER_LOG of the environment, else `info`",
            choices=("debug", "info", "warning", "error"),
        ),
    ] = None
    log_interval_s: Annotated[
        int,
        About(
            Group.LOGS,
            "Interval of the statistics log line, in seconds of work. An idle driver logs none; "
            "0 disables it.",
            limits=(0, 86400),
        ),
    ] = 10
    metrics_port: Annotated[
        int | None,
        About(
            Group.LOGS,
            "Serve Prometheus metrics at `http://127.0.0.1:PORT/metrics`. The driver of group N "
            "takes this port plus N. See [metrics](metrics.md).",
            limits=(1, 65535),
        ),
    ] = None
    metrics_file: Annotated[
        str | None,
        About(
            Group.LOGS,
            "Write the same metrics to this file once a second, for node_exporter's textfile "
            "collector. `{group}` in the path becomes the number of the driver's group.",
        ),
    ] = None
    active_file: Annotated[
        str | None,
        About(
            Group.LOGS,
            "Write what serves the model to this file, as JSON, once it is loaded: attention, "
            "layers, steps and drafts, and the reasons where a faster one is not used. The log "
            "has the same.",
        ),
    ] = None
    control_socket: Annotated[
        str | None,
        About(
            Group.LOGS,
            "Connect to this socket of the runtime's process, which updates weights and releases "
            "memory by it. The engine and the server set it.",
        ),
    ] = None
    nvtx: Annotated[
        bool,
        About(
            Group.LOGS,
            "Mark forward passes, sampling and copies by NVTX ranges, for Nsight Systems; CUDA "
            "only. The graph path has none: its steps show as graph launches.",
        ),
    ] = False
    paged_decode: bool | None = False
    """Whether `pie` decodes; None: where the model allows it. Follows from the backends."""
    server_args: dict[str, Any] = {}
    """Other fields of SGLang's `ServerArgs` or vLLM's `EngineArgs` that the user set, by name."""

    @property
    def max_forward_requests(self) -> int:
        """Requests in one batch, as announced to the runtime."""
        return self.cuda_graph_max_bs or max(DEFAULT_MAX_FORWARD_REQUESTS, *self.graph_sizes, 0)

    @property
    def drafts(self) -> str:
        """What drafts tokens: `eagle`, `suffix`, which has n-grams, too, `ngram` or `off`."""
        if self.spec_eagle_path is not None:
            return "eagle"
        by_ngrams = "ngram" if self.spec_ngram_enabled else "off"
        return "suffix" if self.spec_suffix_enabled else by_ngrams

    @property
    def graph_sizes(self) -> tuple[int, ...]:
        """Sizes of the decode graphs that the user has set; empty for the default ones."""
        return tuple(self.server_args.get("cuda_graph_bs_decode", ()))


class Option(NamedTuple):
    """An option as its field defines it."""

    name: str
    type: str
    """What TOML holds, in the words of `server_args.py`: `bool`, `int`, `list[str]`, ..."""
    default: Any
    """The field's; :data:`msgspec.NODEFAULT` where the device decides."""
    about: About


_TYPE_NAMES: Final[Mapping[Any, str]] = MappingProxyType(
    {bool: "bool", float: "float", int: "int", str: "str", Sequence[str]: "list[str]"}
)


def _defined_options() -> dict[str, Option]:
    """The fields of `DriverOptions` that are options, in their order."""
    hints = typing.get_type_hints(DriverOptions, include_extras=True)
    options = {}
    for field in msgspec.structs.fields(DriverOptions):
        about = next(iter(getattr(hints[field.name], "__metadata__", ())), None)
        if isinstance(about, About):
            kind = _type_name(hints[field.name].__origin__)
            options[field.name] = Option(field.name, kind, field.default, about)
    return options


def _type_name(annotation: Any) -> str:
    """The type that TOML holds: an option whose field may be None is left out instead."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    return _TYPE_NAMES[annotation]


#: The options by name, in the order of the documentation.
OPTIONS: Final[Mapping[str, Option]] = MappingProxyType(_defined_options())
