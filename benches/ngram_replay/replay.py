"""Replays token streams through drafters and counts what they get right.

    python benches/ngram_replay/replay.py target/ngram_streams.json target/release/ngram_replay

Each step drafts after what is known, is given as many drafts as are right and one token more, and
continues. All have the same number of drafts to try; a tree has as many nodes. The streams of a
kind follow each other, so drafters that share a history may use it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "peers"))
from ngram_lookup import lookup
from ngram_sglang import CHUNK, NgramCorpus

DEPTH = 18
RESULTS = Path(__file__).parents[1] / "results" / "ngram.json"
Stream = dict[str, list[int]]
Kinds = dict[str, list[Stream]]
Outcome = dict[str, float]
# Drafts for a text of which so many tokens are new: tokens with the numbers of their parents, of
# which -1 is the text's last token.
Drafter = Callable[[list[int], int], tuple[list[int], list[int]]]


def replay(streams: list[Stream], start: Callable[[], Drafter]) -> Outcome:
    """One drafter over all streams of a kind."""
    outcome: Outcome = {"steps": 0, "drafted": 0, "accepted": 0, "seconds": 0.0}
    draft = start()
    for stream in streams:
        text = stream["given"] + stream["said"]
        known, end = 0, len(stream["given"])
        while end < len(text):
            begin = perf_counter()
            tokens, parents = draft(text[:end], end - known)
            outcome["seconds"] += perf_counter() - begin
            at, accepted = -1, 0
            while end + accepted < len(text):
                right = (
                    number
                    for number, (token, parent) in enumerate(zip(tokens, parents, strict=True))
                    if parent == at and token == text[end + accepted]
                )
                at = next(right, -1)
                if at < 0:
                    break
                accepted += 1
            outcome["steps"] += 1
            outcome["drafted"] += len(tokens)
            outcome["accepted"] += accepted
            known, end = end, end + accepted + 1
    return outcome


def prompt_lookup(drafts: int, shortest: int, longest: int) -> Drafter:
    """A chain from the context alone."""

    def draft(text: list[int], _new: int) -> tuple[list[int], list[int]]:
        found = lookup(np.array(text, np.uint32), shortest, longest, drafts).tolist()
        return found, list(range(-1, len(found) - 1))

    return draft


def sglang(drafts: int, breadth: int, match_type: str) -> Drafter:
    """A chain (breadth 1) or a tree from all that was put in.

    Every new token is put in, with the tokens before it.
    """
    corpus = NgramCorpus(
        max_trie_depth=DEPTH,
        min_bfs_breadth=1,
        max_bfs_breadth=breadth,
        draft_token_num=drafts + 1,
        match_type=match_type,
        capacity=1_000_000,
    )
    requests = 0

    def draft(text: list[int], new: int) -> tuple[list[int], list[int]]:
        nonlocal requests
        requests += new == len(text)
        for start in range(len(text) - new, len(text), CHUNK):
            end = min(start + CHUNK, len(text))
            corpus.batch_put([text[max(start - DEPTH, 0) : end]])
        corpus.synchronize()
        tokens, mask = corpus.batch_get([str(requests)], [text[-DEPTH:]], [len(text)])
        rows = mask.reshape(drafts + 1, drafts + 1)
        found, parents, numbers = [], [], {0: -1}
        for node in range(1, drafts + 1):
            if not rows[node, node]:
                continue  # a node that was not needed
            above = max(other for other in np.flatnonzero(rows[node]) if other != node)
            numbers[node] = len(found)
            found.append(int(tokens[node]))
            parents.append(numbers[int(above)])
        return found, parents

    return draft


def measure(kinds: Kinds, drafts: int, program: str, path: str) -> dict[str, dict[str, Outcome]]:
    """Every drafter over every kind."""
    ours = subprocess.run(
        [program, path, str(drafts)], check=True, capture_output=True, text=True
    ).stdout
    peers: dict[str, Callable[[], Drafter]] = {
        "sglang, chain": lambda: sglang(drafts, 1, "BFS"),
        "sglang, tree": lambda: sglang(drafts, 10, "BFS"),
        "sglang, tree by probability": lambda: sglang(drafts, 10, "PROB"),
        "prompt lookup, 2 to 4": lambda: prompt_lookup(drafts, 2, 4),
        "prompt lookup, 1 to 18": lambda: prompt_lookup(drafts, 1, DEPTH),
    }
    variants: dict[str, dict[str, Outcome]] = json.loads(ours)
    # Not those of which the policy chooses how many drafts to verify.
    found = {name: each for name, each in variants.items() if "rows of" not in name}
    for name, start in peers.items():
        found[name] = {kind: replay(streams, start) for kind, streams in kinds.items()}
    return found


def table(found: dict[str, dict[str, Outcome]]) -> str:
    """Accepted drafts per step by kind; drafts and time per step over all kinds."""
    kinds = sorted(next(iter(found.values())))
    columns = [*kinds, "all", "drafted", "us/step"]
    lines = [f"{'accepted per step':28}" + "".join(f"{column:>11}" for column in columns)]
    for name, outcomes in found.items():
        total = {
            key: sum(outcome[key] for outcome in outcomes.values()) for key in outcomes[kinds[0]]
        }
        values = [outcomes[kind]["accepted"] / outcomes[kind]["steps"] for kind in kinds]
        values += [total["accepted"] / total["steps"], total["drafted"] / total["steps"]]
        row = "".join(f"{value:11.3f}" for value in values)
        lines.append(f"{name:28}{row}{1e6 * total['seconds'] / total['steps']:11.1f}")
    return "\n".join(lines)


def main(path: str, program: str) -> None:
    """Replays with 4 and 8 drafts, prints the tables and writes all counts."""
    kinds: Kinds = json.loads(Path(path).read_text())
    prompt_lookup(1, 1, 1)([1, 1, 1], 3)  # compiles it
    results: dict[str, Any] = {}
    for drafts in (4, 8):
        found = measure(kinds, drafts, program, path)
        print(f"{drafts} drafts\n{table(found)}\n")
        results[str(drafts)] = found
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1], sys.argv[2])
