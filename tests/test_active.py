"""The record of what serves a model: written, read and shown."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pie_driver_sglang.observability.active import Active, ActiveFile, active_line, write_active


def parts() -> Active:
    active = Active()
    active.choose("attention", "fa3,pie")
    active.choose("layers", "sglang", "not fused: it is a GemmaModel")
    return active


def test_a_line_has_the_reasons() -> None:
    assert parts().as_dict()["reasons"] == {"layers": "not fused: it is a GemmaModel"}
    expected = "attention: fa3,pie; layers: sglang (not fused: it is a GemmaModel)"
    assert active_line(parts().as_dict()) == expected


def test_another_process_writes_the_file() -> None:
    file = ActiveFile()
    path = file.runtime({"options": {}})["options"]["active_file"]
    assert file.read() == {"scheduler": "pie", "grammar": "llguidance"}
    # Longer text first: the second driver replaces all of it.
    for each in ({"layers": "sglang", "drafts": "off"}, {"layers": "fused"}):
        program = f"open({path!r}, 'w').write({json.dumps(each)!r})"
        subprocess.run([sys.executable, "-c", program], check=True)
        assert file.read() == {"scheduler": "pie", "grammar": "llguidance", **each}
    assert Path(path).exists()
    del file
    assert not Path(path).exists()


def test_grammars_that_are_off_are_shown_as_off() -> None:
    assert ActiveFile("none").read() == {"scheduler": "pie", "grammar": "none"}


def test_a_users_file_is_left_to_the_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ActiveFile()
    own = {"active_file": str(tmp_path / "mine")}
    assert file.runtime({"options": own, "seed": 1}) == {"options": own, "seed": 1}
    write_active(parts().as_dict(), own["active_file"])
    assert file.read() == {"scheduler": "pie", "grammar": "llguidance", **parts().as_dict()}
    assert json.loads((tmp_path / "mine").read_text()) == parts().as_dict()
    write_active({}, str(tmp_path / "none" / "x"))
    assert "`active_file`: cannot write" in caplog.text


@pytest.mark.parametrize("text", [None, "{", "[" * 9])
def test_a_file_that_cannot_be_read_ends_nothing(text: str | None, tmp_path: Path) -> None:
    file, path = ActiveFile(), tmp_path / "mine"
    file.runtime({"options": {"active_file": str(path)}})
    if text is not None:
        path.write_text(text)
    assert file.read() == {"scheduler": "pie", "grammar": "llguidance"}
