"""`enable_deterministic_inference` on several GPUs: which layers run, and which all-reduce.

    PYTHONPATH=tests python tests/support/sglang_scripts/deterministic_ranks.py

There is no GPU: what a loaded model would say is said by stand-ins.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from pie_driver_sglang.backends.sglang import boot, support
from pie_driver_sglang.backends.sglang.compat.ranks import TpRank
from pie_driver_sglang.ranks.types import Rank


def check_layers() -> None:
    """The sums of one or two ranks have no order."""
    runner: Any = SimpleNamespace(
        device="cuda", gpu_id=0, token_to_kv_pool=None, dtype=torch.bfloat16
    )
    pool = SimpleNamespace(dtype=torch.bfloat16)
    for ranks in (1, 2, 3, 4):
        with (
            mock.patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)),
            mock.patch.object(support, "attention_layers", lambda _: []),
            mock.patch.object(support, "paged", lambda _: pool),
            mock.patch.object(support, "_not_dense_reason", lambda _: None),
            mock.patch.object(support, "rank_of", lambda _, ranks=ranks: TpRank(0, ranks)),
        ):
            reason = support._batch_invariant_unsupported_reason(runner)
        refusal = f"it has {ranks} ranks: only sums of at most 2 are batch-invariant"
        assert reason == (refusal if ranks > 2 else None), reason


def check_all_reduce() -> None:
    """SGLang's mode turns its own all-reduce off; two ranks keep it, unless the user does."""
    for ranks, deterministic, asked_off, keeps in (
        (2, True, False, True),
        (1, True, False, False),
        (3, True, False, False),
        (2, False, False, False),
        (2, True, True, False),
    ):
        settings = SimpleNamespace(enable_deterministic_inference=deterministic)
        options: Any = SimpleNamespace(server_args={"disable_custom_all_reduce": asked_off})
        args: Any = object()
        with (
            mock.patch.object(boot, "change_settings") as change,
            mock.patch.object(boot, "Resolved", lambda _, settings=settings: settings),
        ):
            boot._keep_custom_all_reduce(args, options, Rank(0, ranks))
        expected = [mock.call(args, disable_custom_all_reduce=False)] if keeps else []
        assert change.mock_calls == expected, (ranks, deterministic, asked_off)


def check_warning() -> None:
    """Where SGLang's mode computes, the log says what it does not promise."""
    runner: Any = SimpleNamespace(device="cuda")
    options: Any = SimpleNamespace(paged_decode=None, server_args={})
    table: Any = object()
    for deterministic in (True, False):
        settings = SimpleNamespace(enable_deterministic_inference=deterministic)
        with (
            mock.patch.object(boot, "resolved", lambda _, settings=settings: settings),
            mock.patch.object(support, "paged_decode_refusal", lambda *_: "it has 3 ranks"),
            mock.patch.object(boot.logger, "warning") as warning,
        ):
            assert boot._install_attention(runner, table, options) == "it has 3 ranks"
        assert [("retracted" in str(call)) for call in warning.mock_calls] == [True] * deterministic
    settings = SimpleNamespace(enable_deterministic_inference=True)
    for ranks in (1, 2):
        with (
            mock.patch.object(boot, "resolved", lambda _: settings),
            mock.patch.object(boot, "rank_of", lambda _, ranks=ranks: TpRank(0, ranks)),
            mock.patch.object(support, "paged_decode_refusal", lambda *_: None),
            mock.patch.object(support, "prefills_by_fa3", lambda _: False),
            mock.patch.object(boot.paged, "install"),
            mock.patch.object(boot.logger, "warning") as warning,
        ):
            assert boot._install_attention(runner, table, options) is None
        named = ["several GPUs" in str(call) for call in warning.mock_calls]
        assert named == [True] * (ranks - 1)


if __name__ == "__main__":
    check_layers()
    check_warning()
    check_all_reduce()
    print("checked")
