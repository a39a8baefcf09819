"""The hooks of SGLang's own server, for the plugins: what they replace there, and by which name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pie_driver_sglang.backends.sglang.version import check_versions
from pie_driver_sglang.config.sglang_versions import is_0517
from pie_driver_sglang.errors import StartError

_CORPUS = "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus"
_WORKER = "sglang.srt.speculative.ngram_worker.NGRAMWorker"
_SETTINGS = "sglang.srt.server_args.ServerArgs"

Hook = Callable[..., None]
"""Called after a method with its result, the object and the arguments."""


def is_named(plugin: str) -> bool:
    """Whether ``SGLANG_PLUGINS`` names a plugin.

    Raises:
        SystemExit: It does, and this version of SGLang is none that the hooks are for. SGLang would
            log another exception, and serve without the plugin.
    """
    named = plugin in [name.strip() for name in envs.SGLANG_PLUGINS.get().split(",")]
    if named:
        try:
            check_versions()
        except StartError as error:
            raise SystemExit(f"{plugin}: {error.message}\n\nhint: {error.hint}") from error
    return named


def has_tree_cores() -> bool:
    """Whether SGLang's prefix cache takes a radix tree, as `v0523.prefix_cache` has it.

    Before that a prefix cache is one class, as in `v0517.prefix_cache`.
    """
    return not is_0517()


def corpus_prompt(request: Any) -> list[int]:
    """The prompt of a request as the NGRAM worker gives it to its corpus.

    Until 0.5.17 the place of an image has placeholders, as in the KV cache; later versions have the
    prompt before that, which may be shorter.
    """
    is_padded = is_0517()
    return list(request.origin_input_ids if is_padded else request.origin_input_ids_unpadded)


def replace_corpus(corpus: type, *, made: Hook, stepped: Hook) -> None:
    """Puts a class in the place of the NGRAM worker's `NgramCorpus`, whose methods it must have.

    Args:
        corpus: The class.
        made: Called after a worker is made.
        stepped: Called after its `forward_batch_generation`.
    """
    HookRegistry.register(_CORPUS, hook=corpus, hook_type=HookType.REPLACE)
    after = HookType.AFTER
    HookRegistry.register(f"{_WORKER}.__init__", hook=made, hook_type=after)
    HookRegistry.register(f"{_WORKER}.forward_batch_generation", hook=stepped, hook_type=after)


def register_prefix_cache(backend: str, make: Callable[[Any], Any], check: Hook) -> None:
    """Makes a prefix cache known to ``--radix-cache-backend``.

    Args:
        backend: Its name.
        make: Given a ``TreeCacheBuildContext``.
        check: Called after ``ServerArgs.check_server_args``, which later versions do not have.
    """
    # Not at once: the plugins are loaded early, in processes that have no cache, too.
    from sglang.srt.mem_cache.registry import register_radix_cache_backend

    register_radix_cache_backend(backend, factory=make)
    HookRegistry.register(f"{_SETTINGS}.check_server_args", hook=check, hook_type=HookType.AFTER)
