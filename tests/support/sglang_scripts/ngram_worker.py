"""Decodes by SGLang's NGRAM worker with the plugin's corpus.

The forward pass and the CUDA kernels around it are left out: a text that is known beforehand says
which drafts are accepted. What the worker does with batches, drafts and requests that leave is
SGLang's. Prints what it found as JSON. Run it with ``SGLANG_PLUGINS`` as a user would.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from pie_driver_sglang.config.sglang_versions import adapter_version
from pie_driver_sglang.errors import StartError

IS_0517 = adapter_version().sglang == "0.5.17"
NODES = 8
DEPTH = 6
VOCAB = 100_000
IMAGE = [1_000_000 + 77] * 4
"""As SGLang fills the place of an image."""
STEPS = 60


def stand_in_for_kernels() -> None:
    """`ngram_worker` imports one CUDA kernel, which is replaced before it is called."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        try:
            import sgl_kernel.speculative  # noqa: F401
        except ImportError:
            for name in [name for name in sys.modules if name.startswith("sgl_kernel")]:
                del sys.modules[name]
        else:
            return
    kernels, speculative = (
        types.ModuleType(name) for name in ("sgl_kernel", "sgl_kernel.speculative")
    )
    kernels.speculative = speculative  # type: ignore[attr-defined]
    speculative.reconstruct_indices_from_tree_mask = None  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (kernels, speculative)})


def text(request: int) -> Iterator[int]:
    """What a request says: rounds of its own, and now and then a token that was never there."""
    at = 0
    while True:
        yield 1000 * request + at % 11 if at % 37 else 50_000 + 1000 * request + at
        at += 1


class Request(SimpleNamespace):
    """As much of SGLang's request as the worker looks at."""

    def __init__(self, number: int, prompt: int, before: tuple[int, ...] = ()) -> None:
        text_of = text(number)
        self.truth = [*before, *(next(text_of) for _ in range(2000))]
        prompt += len(before)
        unpadded = self.truth[:prompt]
        super().__init__(
            rid=f"request-{number}",
            # Later versions give the corpus the prompt that has no placeholders for images.
            origin_input_ids=unpadded if IS_0517 else [*IMAGE, *unpadded],
            origin_input_ids_unpadded=unpadded,
            output_ids=[],
            said=prompt,
        )


def accepted(tree: list[int], links: tuple[list[int], list[int]], truth: list[int]) -> list[int]:
    """The tokens that verification gives: drafts that are true, and the one after them."""
    children, siblings = links
    node, said = 0, []
    while True:
        said.append(truth[len(said)])
        child = children[node]
        while child >= 0 and tree[child] != said[-1]:
            child = siblings[child]
        if child < 0:
            return said
        node = child


class Target:
    """The target worker: its model says what the requests' texts say."""

    def __init__(self) -> None:
        config = SimpleNamespace(vocab_size=VOCAB)
        self.model_runner = SimpleNamespace(
            max_running_requests=4, model_config=config, watermark_state=None
        )

    def get_memory_pool(self) -> tuple[None, None]:
        return None, None

    def forward_batch_generation(self, batch: Any, is_verify: bool = False, **_: Any) -> Any:
        following = [request.truth[request.said] for request in batch.reqs]
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=None),
            can_run_cuda_graph=False,
            next_token_ids=None if is_verify else torch.tensor(following),
        )


def link(mask: Any, _lengths: Any, _positions: Any, _index: Any, *links: Any) -> None:
    """The kernel that links a tree's nodes, as SGLang does it on the host."""
    from sglang.srt.speculative import ngram_worker

    children, siblings, requests, nodes = links
    found = ngram_worker._derive_tree_links(mask.numpy(), requests, nodes)
    children.copy_(found[0])
    siblings.copy_(found[1])


def verify(trees: Any, batch: Any, _logits: Any, _grammar: Any, **_: Any) -> tuple[Any, ...]:
    """Accepts the drafts that are true."""
    requests = len(batch.reqs)
    predicted = torch.zeros(requests * NODES, dtype=torch.int32)
    index = torch.full((requests, NODES), -1)
    lengths = []
    drafts = trees.draft_token.reshape(requests, NODES).tolist()
    for number, (request, tree) in enumerate(zip(batch.reqs, drafts, strict=True)):
        assert tree[0] == request.truth[request.said - 1]
        assert all(0 <= token < VOCAB for token in tree), tree
        children, siblings = trees.retrieve_next_token, trees.retrieve_next_sibling
        links = children[number].tolist(), siblings[number].tolist()
        said = accepted(tree, links, request.truth[request.said :])
        where = range(number * NODES, number * NODES + len(said))
        predicted[list(where)] = torch.tensor(said, dtype=torch.int32)
        index[number, : len(said)] = torch.tensor(where)
        lengths.append(len(said))
    return predicted, torch.tensor(lengths, dtype=torch.int32), index


def without_a_gpu(worker: Any) -> None:
    """Replaces what needs a GPU, or a model with its pools."""
    suffix = "" if IS_0517 else "_func"
    assert hasattr(worker, f"reconstruct_indices_from_tree_mask{suffix}")
    setattr(worker, f"reconstruct_indices_from_tree_mask{suffix}", link)
    worker.eagle_sample = verify
    for name in (
        "assign_extend_cache_locs_func",
        "prepare_mamba_track_for_verify",
        "commit_mamba_states_after_verify",
        "move_accept_tokens_to_target_kvcache",
    ):
        assert hasattr(worker, name)
        setattr(worker, name, lambda *_, **__: None)


def worker_of(overlap: bool, breadth: int) -> Any:
    from sglang.srt.speculative import ngram_worker

    settings = SimpleNamespace(
        disable_overlap_schedule=not overlap,
        page_size=1,
        device="cpu",
        speculative_num_draft_tokens=NODES,
        speculative_eagle_topk=breadth,
        speculative_num_steps=NODES - 1,
        speculative_ngram_max_trie_depth=DEPTH,
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=breadth,
        speculative_ngram_match_type="BFS",
        speculative_ngram_capacity=10_000,
        speculative_ngram_external_sam_budget=0,
        speculative_ngram_external_corpus_max_tokens=1,
        speculative_ngram_external_corpus_path=None,
    )
    ranks: list[Any] = [0, SimpleNamespace(tp_rank=0), 0]
    if not IS_0517:
        # Read from what the server publishes.
        ranks = [0, 0]
        for space in ("get_device", "get_schedule", "get_spec"):
            assert hasattr(ngram_worker, space)
            setattr(ngram_worker, space, lambda: settings)
    worker = ngram_worker.NGRAMWorker(settings, *ranks, Target())
    worker.alloc_memory_pool()
    return worker


def forward(worker: Any, requests: list[Request], info: Any = None, chunked: Any = None) -> Any:
    """What the worker says of a batch: a decode after `info`, or a prefill without."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lengths = torch.tensor([request.said for request in requests])
    batch = SimpleNamespace(
        reqs=requests,
        forward_mode=ForwardMode.DECODE if info else ForwardMode.EXTEND,
        chunked_req=chunked,
        spec_info=info,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        input_ids=None,
        out_cache_loc=None,
        req_pool_indices=None,
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        has_grammar=False,
        return_logprob=False,
        grammar_needs_sync=lambda: False,
    )
    return worker.forward_batch_generation(batch).next_draft_input


def said_in(info: Any) -> list[list[int]]:
    rows = info.accept_tokens.reshape(-1, NODES).tolist()
    return [row[:length] for row, length in zip(rows, info.accept_lens.tolist(), strict=True)]


def wave_of(number: int) -> list[Request]:
    """Three requests, one of them with an image and an id that a client made up."""
    first, second, third = (4 * number + each for each in range(3))
    return [Request(first, 30), Request(second, 50, (7, -1, *IMAGE)), Request(third, 70)]


def decode(overlap: bool, breadth: int) -> dict[str, Any]:
    """Decodes requests that come and go; tokens of all steps, and of their first ones."""
    worker = worker_of(overlap, breadth)
    corpus = worker.ngram_corpus
    calls: dict[str, list[str]] = {"heard": [], "erased": []}
    add_prompt, erase, get = corpus.add_prompt, corpus.erase_match_state, corpus.batch_get
    lengths: dict[str, int] = {}

    def hear(rid: str, tokens: list[int]) -> None:
        calls["heard"].append(rid)
        lengths[rid] = len(tokens)
        add_prompt(rid, tokens)

    def draft(rids: list[str], ends: list[list[int]], totals: list[int]) -> Any:
        # The worker counts the same prompt.
        assert all(total > lengths[rid] for rid, total in zip(rids, totals, strict=True)), totals
        return get(rids, ends, totals)

    corpus.add_prompt, corpus.batch_get = hear, draft
    corpus.erase_match_state = lambda rids: (calls["erased"].extend(rids), erase(rids))
    counts: list[int] = []
    firsts: list[int] = []
    for wave in range(3):
        requests = wave_of(wave)
        *whole, long = requests
        ends_at_once = Request(4 * wave + 3, 40)
        # The last one's prompt takes two passes, and another request joins it in the second.
        forward(worker, [*whole, long], chunked=long)
        forward(worker, [long, ends_at_once])
        rows = torch.zeros(len(requests), NODES, dtype=torch.int32)
        rows[:, 0] = torch.tensor([request.truth[request.said] for request in requests])
        ones = torch.ones(len(requests), dtype=torch.int32)
        info = SimpleNamespace(accept_tokens=rows.flatten(), accept_lens=ones)
        for number in range(STEPS):
            before = said_in(info)
            for request, tokens in zip(requests, before, strict=True):
                request.said += len(tokens)
                if not overlap:
                    request.output_ids += tokens
            info = forward(worker, requests, info)
            for request, tokens in zip(requests, before, strict=True):
                # Results come a step later.
                if overlap:
                    request.output_ids += tokens
            said = [len(tokens) for tokens in said_in(info)]
            counts += said
            firsts += said if number == 0 else []
    return {
        "overlap": overlap,
        "breadth": breadth,
        "tokens_a_step": sum(counts) / len(counts),
        "tokens_at_first": sum(firsts) / len(firsts),
        **calls,
    }


def refuse() -> None:
    raise StartError("sglang is 0.5.20", hint="install 0.5.17")


def main() -> None:
    stand_in_for_kernels()
    logged: list[str] = []
    log = logging.getLogger("pie_driver_sglang.sglang_plugins.ngram")
    log.setLevel(logging.INFO)
    log.addFilter(lambda record: logged.append(record.getMessage()) or True)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative import ngram_worker

    from pie_driver_sglang.backends.sglang.compat import hooks

    without_a_gpu(ngram_worker)
    if sys.argv[1:] == ["--other-version"]:
        hooks.check_versions = refuse  # type: ignore[assignment]
    load_plugins()
    corpus = ngram_worker.NgramCorpus.__module__
    rounds = []
    if corpus.startswith("pie_driver_sglang"):
        rounds = [decode(overlap, breadth) for overlap in (False, True) for breadth in (1, 8)]
    print(json.dumps({"corpus": corpus, "rounds": rounds, "logged": logged}))


if __name__ == "__main__":
    main()
