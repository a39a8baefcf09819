"""The attention kernels of the driver on vLLM, over its pages, against torch in float32."""

from __future__ import annotations

from typing import Any

from vllm_report import find, tried

PAGE = 16


def check(failed: list[str]) -> None:
    """The kernels over the driver's pages, as `attend_*` call them, against torch in float32."""
    import torch

    print("torch", torch.__version__, torch.cuda.get_device_name(), flush=True)
    with tried("import of vLLM", failed):
        import vllm

        print("vllm", vllm.__version__, vllm.__file__, flush=True)
    from pie_driver_sglang.backends.vllm.compat import attention

    with tried("FlashAttention's version", failed):
        version = attention.flash_attention_version()
        print("version", version, flush=True)
        find(flash_attention=version)
    torch.manual_seed(0)
    heads, kv_heads, pages = 16, 8, 64
    for dim, window, cap in ((128, -1, 0.0), (64, -1, 0.0), (128, 20, 0.0), (128, -1, 30.0)):
        lens, counts = [5, 64, 200, 300], [5, 1, 64, 33]
        made: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        keys = torch.randn(pages, PAGE, kv_heads, dim, **made)
        values = torch.randn(pages, PAGE, kv_heads, dim, **made)
        order = torch.randperm(pages - 1, device="cuda") + 1
        table = torch.zeros(4, 20, dtype=torch.int32, device="cuda")
        at = 0
        for row, length in enumerate(lens):
            used = -(-length // PAGE)
            table[row, :used] = order[at : at + used].int()
            at += used
        queries = torch.randn(sum(counts), heads, dim, **made)
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], device="cuda").int()
        kv_lens = torch.tensor(lens, device="cuda").int()
        case = (dim, window, cap)
        wanted = _reference(queries, keys, values, table, lens, counts, (window, cap))
        for name in ("attend_by_fa3", "attend_by_triton"):
            for splits in (0, 1) if name == "attend_by_fa3" else (0,):
                with tried(f"{name} {case} splits {splits}", failed):
                    out = torch.full_like(queries, float("nan"))
                    getattr(attention, name)(
                        queries, keys, values, out, starts=starts, kv_lens=kv_lens, pages=table,
                        most_tokens=max(counts), most_kv=max(lens), scale=dim**-0.5,
                        window=window, cap=cap, sinks=None, splits=splits,
                    )  # fmt: skip
                    torch.cuda.synchronize()
                    error = float((out.float() - wanted).abs().max())
                    print(f"{name} {case} splits {splits}: error {error:.2e}", flush=True)
                    find(**{f"{name} {case} {splits}": error})
                    assert error < 0.05, error
        with tried(f"store_pages {case}", failed):
            slots = torch.tensor([16, 17, 40, 1000], device="cuda")
            # Views with a stride, as layers hand them over.
            qkv = torch.randn(4, 2 * kv_heads * dim, **made)
            new_keys, new_values = qkv.view(4, 2, kv_heads, dim).unbind(1)
            one = torch.ones((), device="cuda")
            attention.store_pages(new_keys, new_values, keys, values, slots, one)
            assert torch.equal(keys.flatten(0, 1)[slots], new_keys)
            assert torch.equal(values.flatten(0, 1)[slots], new_values)


def _reference(
    queries: Any, keys: Any, values: Any, table: Any, lens: Any, counts: Any, rule: Any
) -> Any:
    import torch

    (window, cap), outs, at = rule, [], 0
    group = queries.shape[1] // keys.shape[2]
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        used = table[row, : -(-length // PAGE)].long()
        k, v = (
            x[used].flatten(0, 1)[:length].repeat_interleave(group, 1).float()
            for x in (keys, values)
        )
        q = queries[at : at + count].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        own = torch.arange(length - count, length, device=q.device)[:, None]
        seen = torch.arange(length, device=q.device)[None]
        hidden = (seen > own) | ((seen < own - window) if window >= 0 else (seen < 0))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
        at += count
    return torch.cat(outs)
