"""A client of the gateway."""

from __future__ import annotations

import contextlib
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

openai: Any = pytest.importorskip("openai")

PROMPT: Final = "def f(x):"


@contextlib.contextmanager
def openai_client(url: str, key: str = "none") -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        yield client


def complete(client: Any, prompt: str = PROMPT, tokens: int = 12, **more: Any) -> Any:
    return client.completions.create(
        model="pocket", prompt=prompt, temperature=0, max_tokens=tokens, **more
    )


def refusal(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    return error.value.status_code, str(error.value)


class Scrape(NamedTuple):
    """What an endpoint shows: values by name and labels. No name is declared twice."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def total(self, name: str, **labels: str) -> float:
        """The sum of what has these labels."""
        wanted = labels.items()
        return sum(
            value for (key, has), value in self.values.items() if key == name and wanted <= has
        )


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    declared = Counter(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [name for name, count in declared.items() if count > 1] == []
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    values = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
    assert len(values) == len(samples)
    assert all(family.type != "unknown" and family.samples for family in families)
    return Scrape(values)
