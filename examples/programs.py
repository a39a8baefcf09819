"""Programs in SGLang's language against `pie-sglang serve`, cell by cell.

Start a server first, `make serve` for one on the CPU, then run this file, or open it as a notebook
(editors show `# %%` as cells):

    python examples/programs.py --url http://127.0.0.1:30000

Programs that share a prefix share its KV. The last lines tell how much of the prompts was there.
"""

# %%
from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

import sglang as sgl

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--url", default="http://127.0.0.1:30000")
url = parser.parse_args().url
sgl.set_default_backend(sgl.RuntimeEndpoint(url))


def counts() -> dict[str, Any]:
    """What the scheduler has counted so far."""
    with urllib.request.urlopen(f"{url}/server_info") as answer:
        found: dict[str, Any] = json.load(answer)["internal_states"][0]
    return found


before = counts()

# %% One text after the other; `gen` asks the model, and what it says is part of the text.


@sgl.function
def introduce(s: Any, name: str) -> None:
    """Two answers, the second of which sees the first."""
    s += f"def {name}(values):\n"
    s += '    """' + sgl.gen("summary", stop='"""', max_tokens=24, temperature=0) + '"""\n'
    s += "    return " + sgl.gen("body", stop="\n", max_tokens=24, temperature=0)


state = introduce.run(name="mean")
print(state.text(), end="\n\n")

# %% Branches of one text: each continues by itself, from the KV of what they have in common.


@sgl.function
def tips(s: Any) -> None:
    """Three answers at once."""
    s += "# A module of small functions that count, sort and search, with a test for each.\n"
    branches = s.fork(3)
    for number, branch in enumerate(branches):
        branch += f"def function_{number}(" + sgl.gen("code", max_tokens=16, temperature=0)
    s += "\n".join(branch["code"].strip() for branch in branches)


print(tips.run().text(), end="\n\n")

# %% Many texts at once, as they come.

for each in introduce.run_batch([{"name": name} for name in ("median", "mode", "spread")]):
    print(each["body"])

# %% The model chooses among texts, by their log-probabilities.


@sgl.function
def judge(s: Any, code: str) -> None:
    """A choice."""
    s += f"{code}\n# This function returns a "
    s += sgl.gen("kind", choices=["number", "list", "string"])


print("\n" + judge.run(code="def count(values):\n    return len(values)")["kind"])

# %% What binds an answer: a regular expression.


@sgl.function
def version(s: Any) -> None:
    """An answer of a form."""
    s += '__version__ = "' + sgl.gen("number", regex=r"[0-9]\.[0-9]{1,2}\.[0-9]", max_tokens=12)


print(version.run()["number"])

# %% How much of the prompts was in the prefix index.

after = counts()
prompts = after["prompt_tokens"] - before["prompt_tokens"]
cached = after["cached_tokens"] - before["cached_tokens"]
print(f"\n{cached} of {prompts} prompt tokens were there: {cached / prompts:.0%}")
