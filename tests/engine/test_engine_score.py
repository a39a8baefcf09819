"""`Engine.score` against transformers, and which methods of SGLang's `Engine` there are."""

from __future__ import annotations

import ast
import asyncio
import gc
import importlib.util
import inspect
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
import torch

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.offline.engine import Engine
from pie_driver_sglang.frontends.offline.scoring import REFUSED_SCORE_ARGUMENTS
from pie_driver_sglang.frontends.offline.unsupported import UNSUPPORTED_METHODS
from support import REPOSITORY
from support.models.reference import Reference, random_tokens
from support.versions import of_the_oldest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LABELS: Final = [7, 1200, 7, 30]


def label_probabilities(reference: Reference, tokens: list[int]) -> list[float]:
    last = reference.logits(tokens)[-1]
    found: list[float] = torch.softmax(last, -1)[LABELS].tolist()
    return found


@pytest.mark.parametrize("item_first", [False, True])
def test_probabilities_are_those_of_transformers(
    engine: Engine, reference: Reference, item_first: bool
) -> None:
    """Of items that are cut into several steps, and of short ones."""
    query = random_tokens(reference.vocab_size, 20, "query")
    items = [random_tokens(reference.vocab_size, count, "item", count) for count in (1, 9, 70)]
    found = engine.score(query, items, LABELS, item_first=item_first)
    prompts = [item + query if item_first else query + item for item in items]
    assert found.prompt_tokens == sum(map(len, prompts))
    for prompt, scores in zip(prompts, found.scores, strict=True):
        assert scores == pytest.approx(label_probabilities(reference, prompt), rel=1e-3, abs=1e-9)
    normalized = engine.score(query, items, LABELS, True, item_first).scores
    for scores, part in zip(found.scores, normalized, strict=True):
        assert part == pytest.approx([score / sum(scores) for score in scores], rel=1e-4)
    again = asyncio.run(engine.async_score(query, items, LABELS, item_first=item_first))
    for scores, part in zip(found.scores, again.scores, strict=True):
        assert part == pytest.approx(scores, rel=1e-3)


def test_preferred_parameters_give_no_further_answers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.score([5, 6], [[7], [8, 9]], LABELS)
    preferred = {"n": 2, "temperature": 0.3, "max_new_tokens": 9, "min_new_tokens": 3}
    monkeypatch.setattr(engine._prompts, "_defaults", preferred)
    found = engine.score([5, 6], [[7], [8, 9]], LABELS)
    assert found.prompt_tokens == expected.prompt_tokens == 7
    for scores, others in zip(expected.scores, found.scores, strict=True):
        assert others == pytest.approx(scores, rel=1e-3)


def test_texts(engine: Engine, reference: Reference) -> None:
    assert engine.tokenizer is not None
    found = engine.score("the cat", [" sat", " ran away"], LABELS)
    tokens = [
        list(engine.tokenizer.encode([text])[0]) for text in ("the cat sat", "the cat ran away")
    ]
    for prompt, scores in zip(tokens, found.scores, strict=True):
        assert scores == pytest.approx(label_probabilities(reference, prompt), rel=1e-3, abs=1e-9)
    [alone] = engine.score("the cat", " sat", LABELS).scores
    assert alone == pytest.approx(found.scores[0], rel=1e-3)
    assert engine.score("the cat", [], LABELS) == ([], 0, None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("a", ["b"]), "`label_token_ids` is missing, and this model generates text"),
        (("a", ["b"], []), "`label_token_ids` is []"),
        (("a", ["b"], [1 << 40]), "`label_token_ids` is 1099511627776"),
        (("a", ["b"], [True]), "`label_token_ids` is True"),
        (("a", None, [1]), "`items` is missing"),
        (("a", [[5]], [1]), "expected a list of texts, as `query` is a text"),
        (([5], ["a"], [1]), "expected lists of token ids, as `query` is token ids"),
        (([5], "ab", [1]), "expected lists of token ids, as `query` is token ids"),
        ((None, ["a"], [1]), "`query` is None, expected a text or a list of token ids"),
        ((["a"], [[1]], [1]), "'a'"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(engine: Engine, arguments: tuple[Any, ...], line: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine.score(*arguments)
    assert line in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_arguments_that_are_not_supported(engine: Engine) -> None:
    for name in REFUSED_SCORE_ARGUMENTS:
        assert engine.score([5], [[6]], [7], **{name: None}).scores
        with pytest.raises(ConfigError, match=f"`{name}` is not served"):
            engine.score([5], [[6]], [7], **{name: 1})
    with pytest.raises(ConfigError, match="`score` has no argument 'labels'"):
        engine.score([5], [[6]], [7], labels=[1])


@of_the_oldest("its `Engine` has other methods")
def test_the_methods_of_sglangs_engine_are_here_or_documented() -> None:
    names = _public_methods("sglang.srt.entrypoints.engine", "Engine")
    names |= _public_methods("sglang.srt.entrypoints.engine_score_mixin", "EngineScoreMixin")
    assert len(names) > 30
    assert {name for name in names if not hasattr(Engine, name)} == UNSUPPORTED_METHODS.keys()
    page = (REPOSITORY / "docs" / "engine.md").read_text()
    _, _, section = page.partition("### Methods of SGLang's `Engine` that are not supported")
    listed = section.partition("\n## ")[0]
    assert not [name for name in UNSUPPORTED_METHODS if f"`{name}`" not in listed]


@pytest.mark.parametrize("name", UNSUPPORTED_METHODS)
def test_a_missing_method_says_what_to_use(engine: Engine, name: str) -> None:
    assert not hasattr(engine, name)
    with pytest.raises(AttributeError, match=f"`Engine.{name}` is not supported") as refusal:
        getattr(engine, name)
    [note] = refusal.value.__notes__
    assert note.startswith("hint: ")


def test_a_method_that_nobody_has_is_suggested(engine: Engine) -> None:
    with pytest.raises(AttributeError, match="'Engine' object has no attribute 'genrate'") as typo:
        engine.genrate  # type: ignore[attr-defined]  # noqa: B018
    assert (typo.value.name, typo.value.obj) == ("genrate", engine)


@of_the_oldest("its arguments are other ones")
def test_the_methods_take_sglangs_arguments() -> None:
    """By name, and with SGLang's default where the method names the argument."""
    different = []
    for name, theirs in _methods("sglang.srt.entrypoints.engine", "Engine").items():
        if name in UNSUPPORTED_METHODS:
            continue
        ours = inspect.signature(getattr(Engine, name)).parameters
        takes_others = any(each.kind is each.VAR_KEYWORD for each in ours.values())
        arguments = theirs.args.args[1:]
        defaults = [ast.unparse(default) for default in theirs.args.defaults]
        required = [""] * (len(arguments) - len(defaults))
        for argument, default in zip(arguments, [*required, *defaults], strict=True):
            found = ours.get(argument.arg)
            if found is None and takes_others:
                continue
            if found is None or (default and default != repr(found.default)):
                different.append((name, argument.arg, default))
    assert not different


def test_child_processes_are_the_drivers(engine: Engine) -> None:
    pids = engine.get_all_child_pids()
    assert pids == engine.get_server_info()["internal_states"][0]["driver_pids"]
    assert len(pids) == 1
    assert psutil.pid_exists(pids[0])


def test_objects_are_excluded_from_garbage_collection(engine: Engine) -> None:
    # The tests' process has frozen objects already, and to thaw them would slow it down.
    before = gc.get_freeze_count()
    made = [[] for _ in range(100_000)]
    engine.freeze_gc()
    assert gc.get_freeze_count() > before + len(made) // 2


def test_a_coroutine_loads_an_adapter(engine: Engine) -> None:
    result = asyncio.run(engine.async_load_lora_adapter("a", "/nowhere"))
    assert result == engine.load_lora_adapter("a", "/nowhere")
    assert not result.success
    assert result.error_message


@of_the_oldest("its arguments are other ones")
def test_the_arguments_of_sglangs_score_are_known() -> None:
    [method] = [
        node
        for node in ast.walk(_source("sglang.srt.entrypoints.engine_score_mixin"))
        if isinstance(node, ast.FunctionDef) and node.name == "score"
    ]
    theirs = [argument.arg for argument in method.args.args]
    ours = [name for name in inspect.signature(Engine.score).parameters if name != "others"]
    assert theirs == [*ours, *REFUSED_SCORE_ARGUMENTS]


def _public_methods(module: str, name: str) -> set[str]:
    return set(_methods(module, name))


def _methods(module: str, name: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    [found] = [
        node
        for node in _source(module).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    methods = [node for node in found.body if isinstance(node, functions)]
    return {method.name: method for method in methods if not method.name.startswith("_")}


def _source(module: str) -> ast.Module:
    """Read, not imported: SGLang's imports take long."""
    package, _, rest = module.partition(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    path = Path(spec.submodule_search_locations[0], *rest.split(".")).with_suffix(".py")
    return ast.parse(path.read_text())
