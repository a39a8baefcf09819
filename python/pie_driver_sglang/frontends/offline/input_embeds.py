"""`input_embeds`: prompts as matrices of embeddings, by the rules of SGLang's argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pie_driver_sglang.errors import ConfigError, invalid_value

EMBEDS: Final = "input_embeds"
_EXPECTED: Final = "numbers [tokens, hidden], or a list of such matrices"


def parse_input_embeds(
    others: Mapping[str, Any], embed_size: int
) -> tuple[list[npt.NDArray[np.float32]], bool] | None:
    """The embeddings of each prompt, and whether the prompts are a batch; None for tokens.

    Args:
        others: Arguments of `generate` by their names.
        embed_size: Numbers of an embedding of the model; 0 where it takes none.

    Raises:
        ConfigError: They are no matrices of numbers, or of another width than the model's.
    """
    given = others.get(EMBEDS)
    if given is None:
        return None
    if not embed_size:
        raise ConfigError(
            f"`{EMBEDS}` is given, and this model and driver take none",
            "give `prompt` or `input_ids`",
        )
    whole = _matrix(given)
    is_batch = whole is None or whole.ndim != 2
    listed = [_matrix(each) for each in given] if is_batch else [whole]
    if not listed:
        raise invalid_value(f"`{EMBEDS}`", given, _EXPECTED)
    return [_checked(each, embed_size) for each in listed], is_batch


def _matrix(given: Any) -> npt.NDArray[Any] | None:
    """An array of any number of axes; None for rows of different lengths."""
    if hasattr(given, "detach"):
        # A tensor of torch, whose bfloat16 numpy has not.
        given = given.detach().float().cpu().numpy()
    if isinstance(given, list | tuple) and any(hasattr(each, "detach") for each in given):
        return None
    try:
        found = np.asarray(given)
    except ValueError:
        return None
    if found.ndim < 2 or found.dtype.kind not in "fiu":
        raise invalid_value(f"`{EMBEDS}`", given, _EXPECTED)
    return found


def _checked(matrix: npt.NDArray[Any] | None, embed_size: int) -> npt.NDArray[np.float32]:
    """The matrix of one prompt in float32."""
    if matrix is None or matrix.ndim != 2:
        shape = "rows of different lengths" if matrix is None else f"{matrix.ndim} axes"
        raise ConfigError(
            f"a prompt of `{EMBEDS}` has {shape}, expected two: tokens and numbers",
            f"give {_EXPECTED}",
        )
    tokens, width = matrix.shape
    if not tokens or width != embed_size:
        raise ConfigError(
            f"a prompt of `{EMBEDS}` is {tokens} x {width}, and an embedding of this model has "
            f"{embed_size} numbers",
            f"give one embedding or more, of {embed_size} numbers each",
        )
    with np.errstate(over="ignore"):
        # The runtime refuses what is not finite then.
        return np.ascontiguousarray(matrix, np.float32)
