"""Which attention backends are chosen for a loaded model."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


def check_choice(runner: Any) -> None:
    """Whether it decodes where it is asked for, where it is not, and where nothing is said."""
    import torch
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MLATokenToKVPool

    from pie_driver_sglang.backends.sglang import support
    from pie_driver_sglang.backends.sglang.compat.settings import change_settings
    from pie_driver_sglang.errors import StartError

    def choices() -> tuple[str, bool]:
        """What asking for it says, and what is chosen otherwise."""
        assert support.paged_decode_refusal(runner, False)
        said = ""
        try:
            assert support.paged_decode_refusal(runner, True) is None
        except StartError as error:
            said = str(error)
        return said, support.paged_decode_refusal(runner, None) is None

    assert choices() == ("", True)
    latent = MLATokenToKVPool(
        size=16, page_size=16, dtype=torch.float32, kv_lora_rank=4, qk_rope_head_dim=2,
        layer_num=1, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    hybrid = HybridLinearKVPool.__new__(HybridLinearKVPool)
    hybrid.full_kv_pool = runner.token_to_kv_pool
    layer = support.attention_layers(runner)[-1]
    for owner, name, value, reason in (
        (runner, "token_to_kv_pool", latent, "its KV pool is a MLATokenToKVPool"),
        (runner.token_to_kv_pool, "dtype", torch.uint8, "its KV pool keeps torch.uint8"),
        (layer, "use_irope", True, "some of its layers have custom attention"),
        # These are left to SGLang, unless the user asks for the backend.
        (runner, "token_to_kv_pool", hybrid, ""),
        (layer, "v_head_dim", 512, ""),
    ):
        with mock.patch.object(owner, name, value):
            said, chosen = choices()
            assert (reason in said, bool(said), chosen) == (True, bool(reason), False), said
    change_settings(runner.server_args, enable_deterministic_inference=True)
    said, chosen = choices()
    assert "enable_deterministic_inference" in said, said
    assert not chosen


def check_fa3() -> None:
    """Its library may be absent, broken or there."""
    from pie_driver_sglang.backends.sglang import support

    contents = ((None, False), ("flash_ops.abi3.so", False), ("flash_ops.py", True))
    for name, found in contents:
        with tempfile.TemporaryDirectory() as folder:
            package = ModuleType("sgl_kernel")
            package.__path__ = [folder]
            if name is not None:
                Path(folder, name).touch()
            with mock.patch.dict(sys.modules, {"sgl_kernel": package}):
                sys.modules.pop("sgl_kernel.flash_ops", None)
                assert support.has_fa3() == found, name


def check_vision() -> None:
    """Images are encoded by triton where SGLang's own choice is not installed."""
    import torch

    from pie_driver_sglang.backends.sglang import support

    def chosen(device: str, image: bool, named: str | None, hopper: bool, there: bool) -> object:
        args = SimpleNamespace(device=device, mm_attention_backend=named)
        capability, change = (9 if hopper else 8, 0), vars(args).update
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: capability),
            mock.patch.object(support, "has_fa3", lambda: there),
            # SGLang 0.5.23 changes published settings only.
            mock.patch.object(support, "change_settings", lambda _, **fields: change(**fields)),
        ):
            model: Any = SimpleNamespace(is_multimodal=image)
            support.choose_vision_backend(args, model, 0)  # type: ignore[arg-type]
        return args.mm_attention_backend

    assert chosen("cuda", True, None, True, False) == "triton_attn"
    assert chosen("cuda", True, "sdpa", True, False) == "sdpa"
    for others in (
        ("cpu", True, None, True, False),
        ("cuda", False, None, True, False),
        ("cuda", True, None, False, False),
        ("cuda", True, None, True, True),
    ):
        assert chosen(*others) is None, others


def check_prefills(runner: Any) -> None:
    """Where FlashAttention-3 computes prefills, and where steps may have prompts in them."""
    import torch

    from pie_driver_sglang.backends.sglang import support

    assert support.takes_prompts(runner)
    layer, pool = support.attention_layers(runner)[-1], runner.token_to_kv_pool
    fits = (
        (torch.cuda, "get_device_capability", lambda _: (9, 0)),
        (support, "has_fa3", lambda: True),
        (support, "attention_layers", lambda _: [layer]),
        (runner, "device", "cuda"),
        (runner, "dtype", torch.bfloat16),
        (pool, "dtype", torch.bfloat16),
        (layer, "qk_head_dim", 128),
        (layer, "v_head_dim", 128),
        (layer, "sliding_window_size", -1),
        (layer, "logit_cap", 0.0),
    )
    does_not = (
        (torch.cuda, "get_device_capability", lambda _: (8, 0)),
        (support, "has_fa3", lambda: False),
        (runner, "device", "cpu"),
        (pool, "dtype", torch.float8_e4m3fn),
        (layer, "qk_head_dim", 80),
        (layer, "v_head_dim", 64),
        (layer, "sliding_window_size", 16),
        (layer, "logit_cap", 30.0),
    )
    with contextlib.ExitStack() as patches:
        for owner, name, value in fits:
            patches.enter_context(mock.patch.object(owner, name, value))
        assert support.prefills_by_fa3(runner)
        for owner, name, value in does_not:
            with mock.patch.object(owner, name, value):
                assert not support.prefills_by_fa3(runner), name
        decodes = SimpleNamespace(decode_attention_backend=support.PAGED_DECODE)
        for args, taken in ((decodes, True), (SimpleNamespace(decode_attention_backend=""), False)):
            with mock.patch.object(support, "resolved", mock.Mock(return_value=args)):
                assert support.takes_prompts(runner) == taken
