"""docs/pie-protocol.md agrees with the code: layouts, constants, names and examples."""

from __future__ import annotations

import re
from typing import Final

import pytest

from pie_driver_sglang.config import config_file as config
from pie_driver_sglang.driver.capabilities import Capabilities
from support import REPOSITORY

PAGE: Final = (REPOSITORY / "docs" / "pie-protocol.md").read_text()
SCHEMA: Final = REPOSITORY / "rust" / "wire" / "src" / "schema"
SIZES: Final = {"u8": 1, "bool": 1, "u32": 4, "i32": 4, "f32": 4, "u64": 8, "i64": 8}


def section(number: str) -> str:
    """The text of a section, up to the next heading."""
    text = re.split(rf"^#+ {re.escape(number)} ", PAGE, flags=re.MULTILINE)[1]
    return re.split(r"^#+ ", text, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def rust_fields(file: str, name: str) -> list[tuple[str, str]]:
    """Names and types of a struct's fields, in their order."""
    text = (SCHEMA / file).read_text().partition(f"pub struct {name} {{")[2].partition("\n}")[0]
    return re.findall(r"^    pub (\w+): ([\w<>]+),", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "file", "name", "size"),
    [
        ("5.5", "forward.rs", "ForwardRequest", 284),
        ("5.7", "response.rs", "ForwardResponse", 164),
    ],
)
def test_layouts_are_those_of_the_schema(number: str, file: str, name: str, size: int) -> None:
    """Offsets follow from the types: a vector has 8 bytes, aligned to 4."""
    cells = [row for row in rows(section(number)) if len(row) == 4 and row[0] != "offset"]
    page = {
        field.partition("`, ")[0].strip("`"): (int(offset), field.partition("`, ")[2])
        for row in cells
        for offset, field in (row[:2], row[2:])
        if offset.isdigit()
    }
    fields = rust_fields(file, name)
    assert [each for each, _ in fields] == sorted(page, key=lambda each: page[each][0])
    end = 0
    for each, kind in fields:
        element = re.fullmatch(r"Vec<(\w+)>", kind)
        width = 8 if element else SIZES[kind]
        offset, said = page[each]
        assert offset == end + -end % min(width, 4), each
        expected = element[1] if element else f"one {kind}"
        assert said == ("" if expected == "u32" else expected), each
        end = offset + width
    assert end == size
    assert f"{size} bytes" in section(number)


def test_samplers_are_those_of_the_schema() -> None:
    text = (
        (SCHEMA / "sampler.rs").read_text().partition("pub enum Sampler {")[2].partition("\n}")[0]
    )
    names = re.findall(r"^    (\w+)(?:,| \{)$", text, re.MULTILINE)
    page = {
        int(row[0]): row[1] for row in rows(section("5.5")) if len(row) == 3 and row[0].isdigit()
    }
    assert [page[tag] for tag in range(len(page))] == names


BEYOND = {"embedding_size", "embedding_normalized", "hidden_size", "embed_size"}
"""Capabilities that are not Pie's, which its runtime is never told."""


def test_capabilities_and_keys_of_the_configuration() -> None:
    fields = set(Capabilities.__struct_fields__)
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows(section("3.2")))))
    # The group line has the name of the region, too.
    assert named == fields - {"shmem_name"} - BEYOND
    extension = (REPOSITORY / "docs" / "wire-extension.md").read_text()
    assert all(f"`{name}`" in extension for name in BEYOND)
    keys = set(re.findall(r"`([\w.]+)[.*]*`", " ".join(row[0] for row in rows(section("2")))))
    known = {f"model.{name}" for name in config._ModelTable.__struct_fields__}
    known |= {f"driver.{name}" for name in config._DriverTable.__struct_fields__}
    assert {key.rstrip(".") for key in keys} == known


def test_the_hash_and_the_magic_are_those_of_the_code() -> None:
    source = (REPOSITORY / "rust" / "wire" / "src" / "lib.rs").read_text()
    [found] = re.findall(r"SCHEMA_HASH: \[u8; 8\] = \[(.+?)\]", source)
    assert found.replace("0x", "").replace(",", "") in section("4.2")
    assert "PIETFWD1" in section("8.2")


@pytest.mark.parametrize(
    ("file", "size", "set_bytes"),
    [
        ("response_ok.bin", 176, {8: 1}),
        ("response_abort.bin", 176, {4: 1, 8: 1, 12: 255, 13: 255, 14: 255, 15: 255}),
    ],
)
def test_examples_are_the_vectors(file: str, size: int, set_bytes: dict[int, int]) -> None:
    """As §5.9 describes them."""
    data = (REPOSITORY / "tests" / "data" / "wire" / file).read_bytes()
    assert len(data) == size
    # The first four bytes are the driver's number.
    assert {at: byte for at, byte in enumerate(data) if byte and at >= 4} == set_bytes
    assert f"{size} bytes" in section("5.9")
