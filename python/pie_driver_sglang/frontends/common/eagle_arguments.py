"""SGLang's arguments for EAGLE heads, as options of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pie_driver_sglang.config.draft_head import read_draft_head
from pie_driver_sglang.config.options import OPTIONS
from pie_driver_sglang.errors import ConfigError, Unsupported, quoted
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.memory.gpus import has_gpu, prefers_cpu

ALGORITHMS: Final = ("eagle", "eagle3")
"""Values of `speculative_algorithm` in lower case."""
ARGUMENTS: Final = (
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_eagle_topk",
    "speculative_num_steps",
)
"""Besides `speculative_algorithm` and `speculative_num_draft_tokens`."""
_PATH: Final = ARGUMENTS[0]


def with_head_folder(values: Mapping[str, Any], *, with_weights: bool = True) -> dict[str, Any]:
    """The arguments with the folder of the head, which is downloaded if it is a repository.

    Raises:
        ConfigError: It is neither a folder nor an available repository.
    """
    name = values.get(_PATH)
    if name is None or not is_eagle(values):
        return dict(values)
    where = {
        "model_path": name,
        "revision": values.get("speculative_draft_model_revision"),
        "download_dir": values.get("download_dir"),
    }
    folder = model_folder(where, with_weights=with_weights)
    return {**values, _PATH: str(folder.resolve())}


def is_eagle(values: Mapping[str, Any]) -> bool:
    """Whether an EAGLE head is to draft."""
    return str(values.get("speculative_algorithm")).lower() in ALGORITHMS


def eagle_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the driver for the arguments of a head, whose folder they name.

    Raises:
        Unsupported: They ask for drafts that the driver does not have.
        ConfigError: They contradict each other.
    """
    algorithm, path = str(values["speculative_algorithm"]), values.get(_PATH)
    if (values.get("device") or ("cpu" if prefers_cpu() or not has_gpu() else "cuda")) != "cpu":
        raise Unsupported(
            f"`speculative_algorithm` is {quoted(algorithm)}: the driver's EAGLE drafts have not "
            "run on a GPU yet",
            "set the option `spec_eagle_path` to the head's folder to try them",
        )
    if path is None:
        raise Unsupported(
            f"`speculative_algorithm` is {quoted(algorithm)} without `{_PATH}`: the driver has no "
            "drafts by layers of the model's own checkpoint",
            f"name an EAGLE head by `{_PATH}`",
        )
    topk = values.get("speculative_eagle_topk", 1)
    if topk != 1:
        raise Unsupported(
            f"`speculative_eagle_topk` is {quoted(topk)}: the driver drafts chains, and no trees",
            "set `speculative_eagle_topk` to 1, or remove it",
        )
    _, most = OPTIONS["spec_eagle_num_drafts"].about.limits or (0, 0)
    drafts = _num_drafts(values)
    if drafts is not None and not (type(drafts) is int and 1 <= drafts <= most):
        raise Unsupported(
            f"the EAGLE head is to draft {quoted(drafts)} tokens; the driver takes 1 to {most}",
            f"set `speculative_num_steps` from 1 to {most}, or remove it",
        )
    if read_draft_head(path).is_eagle3 != (algorithm.lower() == "eagle3"):
        raise ConfigError(
            f"`speculative_algorithm` is {quoted(algorithm)}, and {quoted(path)} is a head of the "
            "other kind",
            "set EAGLE3 for `LlamaForCausalLMEagle3`, EAGLE for `LlamaForCausalLMEagle`",
        )
    return {
        "spec_eagle_path": path,
        **({} if drafts is None else {"spec_eagle_num_drafts": drafts}),
    }


def _num_drafts(values: Mapping[str, Any]) -> Any:
    """Drafts of a step; None where the arguments do not say.

    SGLang counts the token before the drafts among its draft tokens.
    """
    steps, tokens = (
        values.get(name) for name in ("speculative_num_steps", "speculative_num_draft_tokens")
    )
    if tokens is None:
        return steps
    if steps is not None and tokens != steps + 1:
        raise ConfigError(
            f"`speculative_num_draft_tokens` is {quoted(tokens)}, and a chain of "
            f"`speculative_num_steps` = {quoted(steps)} has {steps + 1}",
            "remove `speculative_num_draft_tokens`",
        )
    return tokens - 1 if type(tokens) is int else tokens
