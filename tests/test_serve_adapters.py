"""LoRA adapters through the server: named by clients, loaded and unloaded while it serves."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from pie_driver_sglang.frontends.common.vllm_arguments import LIBRARY_FOLDER
from support.models import lora_adapters
from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.process import vllm_drivers
from support.servers.pie_server import refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROMPT = [100, 7, 300, 41, 8]
TOKENS = 8


class Served(NamedTuple):
    """A server, adapters in folders, and the models that they make of its own."""

    server: Server
    made: dict[str, lora_adapters.Made]
    references: dict[str | None, Reference]

    def check(self, name: str | None, prompt: list[int] | None = None, **more: Any) -> Any:
        """The tokens are those of the adapter's own model."""
        prompt = prompt or PROMPT
        body = self.server.body(prompt, TOKENS, **({} if name is None else {"lora_path": name}))
        answer: Any = json.loads(self.server.fetch("/generate", {**body, **more}))
        tokens = answer["output_ids"]
        kind = None if name is None else name.partition("-")[0]
        assert self.references[kind].check([*prompt, *tokens[:-1]], tokens) > TOKENS // 2
        return answer

    def load(self, name: str, path: str | Path) -> tuple[int, Any]:
        return self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> tuple[int, Any]:
        return self._post("/unload_lora_adapter", {"lora_name": name})

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            return 200, json.loads(self.server.fetch(path, body))
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


ENGINES = {"sglang": ["--scheduler", "pie"], "vllm": ["--engine", "vllm"]}


@pytest.fixture(scope="module", params=ENGINES)
def served(
    request: pytest.FixtureRequest, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    on_vllm = request.param == "vllm"
    if on_vllm and (reason := vllm_drivers.missing()):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("adapters")
    made = {name: lora_adapters.make_for(POCKET, name, folder) for name in ("linear", "mlp")}
    flags = [*ENGINES[request.param], "--enable-lora", "--max-lora-rank", "16"]
    flags += ["--max-loras-per-batch", "2", "--max-loaded-loras", "2"]
    flags += ["--lora-target-modules", "all", "--served-model-name", "pocket"]
    flags += ["--lora-paths", f"linear={made['linear'].adapter}"]
    folder, drivers = tmp_path_factory.mktemp("server"), ""
    if on_vllm:
        drivers = request.getfixturevalue("vllm_python")
    with (
        mock.patch.dict(os.environ, {LIBRARY_FOLDER: str(vllm_drivers.site())}),
        running(folder, *flags, python=forked_python, driver_python=drivers) as (server, _),
    ):
        references: dict[str | None, Reference] = {
            name: Reference(each.merged) for name, each in made.items()
        }
        references[None] = Reference(POCKET)
        yield Served(server, made, references)


def test_requests_name_their_adapter(served: Served) -> None:
    answers = [served.check("linear"), served.check(None), served.check("linear")]
    assert answers[0]["output_ids"] == answers[2]["output_ids"] != answers[1]["output_ids"]
    # An adapter's KV is no other's: only its own prompt was there.
    prompt = list(range(600, 664))
    cached = [served.check(name, prompt)["meta_info"]["cached_tokens"] for name in ("linear", None)]
    assert cached == [0, 0]
    assert served.check("linear", prompt)["meta_info"]["cached_tokens"] >= 48
    models = [each["id"] for each in json.loads(served.server.fetch("/v1/models"))["data"]]
    assert models == ["pocket", "linear"]


def test_openai_names_model_and_adapter(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {"prompt": "def f(x):", "temperature": 0, "max_tokens": 12}
    adapted = client.completions.create(model="pocket:linear", **ask).choices[0].text
    plain = client.completions.create(model="pocket", **ask).choices[0].text
    assert adapted != plain
    # As vLLM's clients name it. Of any other name the base model answers, as SGLang's.
    assert client.completions.create(model="linear", **ask).choices[0].text == adapted
    assert client.completions.create(model="default", **ask).choices[0].text == plain
    said = [{"role": "user", "content": "def f(x):"}]
    chats = [
        client.chat.completions.create(model=name, messages=said, temperature=0, max_tokens=12)  # type: ignore[arg-type]
        .choices[0]
        .message.content
        for name in ("pocket:linear", "linear", "pocket")
    ]
    assert chats[0] == chats[1] != chats[2]
    with pytest.raises(openai.BadRequestError, match="other"):
        client.completions.create(model="pocket:other", **ask)


def test_load_use_unload_while_others_stream(served: Served) -> None:
    expected, _ = served.server.generate([31, 32, 33], 120)
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.extend(served.server.stream([31, 32, 33], 120)))
    reader.start()
    status, answer = served.load("mlp", served.made["mlp"].adapter)
    assert (status, answer["success"]) == (200, True)
    assert set(answer["loaded_adapters"]) == {"linear", "mlp"}
    served.check("mlp")
    status, answer = served.unload("mlp")
    assert (status, set(answer["loaded_adapters"])) == (200, {"linear"})
    reader.join(300)
    assert found[-1] == expected
    status, text = refusal(served.server, {"input_ids": PROMPT, "lora_path": "never"})
    assert (status, "never" in text) == (400, True)


def test_what_cannot_be_loaded_has_its_reason(served: Served, tmp_path: Path) -> None:
    status, answer = served.load("gone", tmp_path / "none")
    assert status == 400
    assert "not at" in answer["error_message"]
    wide = lora_adapters.edit(served.made["mlp"].adapter, tmp_path / "wide", r=32)
    status, answer = served.load("wide", wide)
    assert status == 400
    # From the driver's log.
    assert "rank" in answer["error_message"]
    status, answer = served.load("linear", served.made["linear"].adapter)
    assert "already" in answer["error_message"]
    assert "there is an adapter 'linear' already" in answer["error_message"]
    served.check("linear")


def test_the_least_recently_used_one_leaves_and_is_read_again(served: Served) -> None:
    for number in range(3):
        status, answer = served.load(f"mlp-{number}", served.made["mlp"].adapter)
        assert (status, len(answer["loaded_adapters"])) == (200, 2)
        served.check(f"mlp-{number}")
    # `linear` had to leave; a request that names it has it read again.
    served.check("linear")
    served.check("mlp-2")
    assert served.unload("mlp-2")[0] == 200


def test_an_adapter_may_come_as_safetensors(served: Served, tmp_path: Path) -> None:
    folder = served.made["mlp"].adapter
    data = (folder / "adapter_model.safetensors").read_bytes()
    body = {
        "lora_name": "mlp-tensors",
        "config_dict": json.loads((folder / "adapter_config.json").read_text()),
        "load_format": "safetensors",
        "serialized_named_tensors": [base64.b64encode(data).decode()],
    }
    status, answer = served._post("/load_lora_adapter_from_tensors", body)
    assert (status, answer["success"]) == (200, True), answer
    served.check("mlp-tensors")
    assert served.unload("mlp-tensors")[0] == 200
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"serialized_named_tensors": [base64.b64encode(data[:-9]).decode()]}, "adapter"),
        ({"serialized_named_tensors": [body["serialized_named_tensors"][0]] * 2}, "2 entries"),
        ({"expected_checksums": {"x": "00"}}, "expected_checksums"),
        ({"load_format": "flattened_bucket"}, "--allow-pickled-adapters"),
        ({"load_format": None}, "--allow-pickled-adapters"),
    ]
    for change, words in wrong:
        status, answer = served._post("/load_lora_adapter_from_tensors", {**body, **change})
        assert (status, words in answer["error_message"]) == (400, True), answer


def test_pickles_of_clients_are_not_read(served: Served, tmp_path: Path) -> None:
    """What SGLang's list of allowed names lets pass, and runs a command."""
    trace = tmp_path / "was-run"

    # os.system("touch …"), by names of `builtins` alone.
    bomb = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(Vtouch %s\ntR." % (
        str(trace).encode()
    )
    for load_format in (None, "flattened_bucket", "pickle"):
        body = {
            "lora_name": "bomb",
            "config_dict": {},
            "load_format": load_format,
            "serialized_named_tensors": [base64.b64encode(bomb).decode()],
        }
        status, answer = served._post("/load_lora_adapter_from_tensors", body)
        assert (status, "can run code" in answer["error_message"]) == (400, True), answer
    served.check("linear")
    assert not trace.exists()


def test_adapters_survive_a_driver(served: Served) -> None:
    served.check("linear")
    [driver] = state(served.server)["driver_pids"]
    os.kill(driver, signal.SIGKILL)
    wait_until(lambda: state(served.server)["restarts"] >= 1, 120, "it was started again")
    served.check("linear")
