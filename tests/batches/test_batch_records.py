"""Validation of input files, and the records of batches and files."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.batches import batch_store
from pie_driver_sglang.frontends.batches.batch_records import BatchStatus, LineResult
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, StoreLimitError
from pie_driver_sglang.frontends.batches.input_lines import MAX_ERRORS, MAX_LINE_BYTES, validate
from support.batches import HOUR, URL, Server, begun, line, output, run, text_of


def problem(tmp_path: Path, *lines: Any, most: int | None = 4) -> tuple[str, str, int | None]:
    path = tmp_path / "in.jsonl"
    raw = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"\n".join(raw))
    [error] = validate(path, URL, most).errors
    assert "\n" not in error.message
    return error.code, error.message, error.line


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        (b"{", "invalid_json_line", "line 2 is not JSON"),
        (b"[" * 100_000, "invalid_json_line", "line 2 is not JSON: it is nested too deeply"),
        ([1], "invalid_json_line", "line 2 is [1]: write a JSON object"),
        (line(2, custom_id=""), "invalid_custom_id", "`custom_id` is '', expected 1 to 512"),
        (line(2, custom_id=7), "invalid_custom_id", "`custom_id` is 7, expected"),
        (line(2, custom_id="id-1"), "duplicate_custom_id", "`custom_id` is 'id-1', as in line 1"),
        (line(2, method="GET"), "invalid_method", "`method` is 'GET', expected 'POST'"),
        (line(2, url="/v1/images"), "invalid_url", "`url` is '/v1/images', expected one of /v1/"),
        (line(2, url=["/v1/images"]), "invalid_url", "`url` is ['/v1/images'], expected one"),
        (line(2, url="/v1/embeddings"), "mismatched_url", "the batch has '/v1/completions'"),
        (line(2, body=[]), "invalid_body", "`body` is [], expected an object"),
        (line(2, body={"model": "m", "stream": True}), "invalid_body", "`stream` is True"),
        (line(2, body={"model": 3}), "invalid_model", "`model` is 3, expected up to 1024"),
        (line(2, body={"model": "\ud800"}), "invalid_model", "`model` is '\\ud800', expected"),
        (line(2, body={"model": "n"}), "mismatched_model", "`model` is 'n', and 'm' in line 1"),
        (b" " * MAX_LINE_BYTES + b"12", "line_too_long", f"more than {MAX_LINE_BYTES} bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "-",
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: Any, code: str, text: str) -> None:
    found, message, number = problem(tmp_path, line(1), wrong, line(3))
    assert (found, number) == (code, 2)
    assert text in message
    assert message.startswith("line 2")


def test_a_wrong_file_fails_its_batch(store: BatchStore, tmp_path: Path) -> None:
    assert problem(tmp_path, b"", b" ")[0] == "empty_file"
    code, message, number = problem(tmp_path, *map(line, range(5)))
    assert (code, number) == ("too_many_lines", 5)
    assert "the 4 lines that a batch may have" in message
    server = Server()
    batch = begun(store, b"{}\n" * 2 * MAX_ERRORS)
    ended = asyncio.run(run(store, batch, server))
    assert ended.status is BatchStatus.FAILED
    errors = ended.as_object()["errors"]["data"]
    assert [error["line"] for error in errors] == list(range(1, MAX_ERRORS + 1))
    assert not server.asked
    assert ended.output_file_id is ended.error_file_id is None


def test_a_file_with_a_mark_and_empty_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text_of([line(1)]) + b"\r\n" + text_of([line(2)])[:-1])
    assert validate(path, None, 2)._asdict() == {
        "total": 2,
        "model": "m",
        "endpoint": URL,
        "errors": [],
    }


class TestRecords:
    def test_lists_have_pages(self, store: BatchStore) -> None:
        names = [begun(store, text_of([line(number)])).id for number in range(5)][::-1]
        assert [each.id for each in store.list_batches(None, 2)] == names[:2]
        assert [each.id for each in store.list_batches(names[1], 9)] == names[2:]
        with pytest.raises(ConfigError, match="`after` is 'batch_none'"):
            store.list_batches("batch_none", 9)
        files = [each.id for each in store.list_files("batch", None, 9)]
        assert len(files) == 5
        old_first = store.list_files(None, files[2], 9, newest_first=False)
        assert [each.id for each in old_first] == files[1::-1]
        assert store.list_files("vision", None, 9) == []

    def test_a_line_keeps_its_first_result(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        first, second = LineResult(1, False, "first"), LineResult(1, True, "second")
        store.add_results(batch.id, [first, second])
        store.add_results(batch.id, [second, LineResult(2, True, "other")])
        assert list(store.results(batch.id)) == ["first", "other"]
        found = store.batch(batch.id)
        assert (found.completed, found.failed) == (1, 1)

    def test_an_input_is_kept_while_it_is_read(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1)]))
        with pytest.raises(ConfigError, match=f"input of {batch.id}, which is validating"):
            store.delete_file(batch.input_file_id)
        ended = asyncio.run(run(store, batch, Server()))
        assert store.delete_file(batch.input_file_id)
        assert not store.delete_file(batch.input_file_id)
        assert not store.path_of(batch.input_file_id).exists()
        assert output(store, ended.output_file_id)

    def test_files_expire_and_leftovers_are_removed(self, store: BatchStore) -> None:
        with store.new_file("short", "batch", 10) as short:
            short.write(b"x")
        with store.new_file("long", "batch") as long:
            long.write(b"x")
        left = store.path_of("file-left.partial")
        left.write_bytes(b"x")
        store.delete_expired_files(time.time() + 5)
        assert left.exists()
        store.delete_expired_files(time.time() + 2 * HOUR)
        assert store.find_file(short.record.id) is None
        files = [path.name for path in (store.folder / "files").iterdir()]
        assert files == [long.record.id]

    def test_a_failed_upload_leaves_nothing(self, store: BatchStore) -> None:
        with pytest.raises(ConnectionError), store.new_file("a", "batch") as writer:
            writer.write(b"x")
            raise ConnectionError
        assert list((store.folder / "files").iterdir()) == []
        assert store.list_files(None, None, 9) == []

    def test_uploads_at_once_do_not_exceed_the_limit(self, store: BatchStore) -> None:
        with (
            pytest.raises(StoreLimitError, match="have 6 bytes, and with this one more than 10"),
            store.new_file("a", "batch", most=10) as late,
            store.new_file("b", "batch", most=10) as first,
        ):
            late.write(b"x" * 6)
            first.write(b"x" * 6)
        assert [each.filename for each in store.list_files(None, None, 9)] == ["b"]
        assert [path.name for path in (store.folder / "files").iterdir()] == [first.record.id]

    def test_open_batches_are_found_by_an_index_and_have_a_limit(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [begun(store, text_of([line(number)])).id for number in range(3)]
        store.finish(names[1], BatchStatus.CANCELLED, None, None)
        queries: list[str] = []
        store._database.set_trace_callback(queries.append)
        assert store.open_batches(9) == [names[0], names[2]]
        assert store.open_batches(1) == names[:1]
        plan = store._database.execute(f"EXPLAIN QUERY PLAN {queries[0]}").fetchall()
        assert "USING COVERING INDEX" in str(plan) or "USING INDEX batches_by_status" in str(plan)
        monkeypatch.setattr(batch_store, "MAX_OPEN_BATCHES", 3)
        begun(store, text_of([line(1)]))
        with pytest.raises(StoreLimitError, match="3 batches have not ended, all that there may"):
            begun(store, text_of([line(1)]))

    def test_others_cannot_read_what_is_stored(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            found = BatchStore(tmp_path / "new" / "store")
            (tmp_path / "old").mkdir(mode=0o755)
            other = BatchStore(tmp_path / "old")
            for store in (found, other):
                begun(store, text_of([line(1)]))
        finally:
            os.umask(before)
        assert found.folder.stat().st_mode & 0o777 == 0o700
        for store in (found, other):
            modes = {path.name: path.stat().st_mode & 0o777 for path in store.folder.iterdir()}
            assert modes.pop("files") == 0o700
            assert set(modes) == {f"batches.sqlite3{end}" for end in ("", "-shm", "-wal")}
            assert set(modes.values()) == {0o600}
            store.close()

    def test_another_version_and_a_file_as_folder_are_refused(self, tmp_path: Path) -> None:
        store = BatchStore(tmp_path / "store")
        store._database.execute("PRAGMA user_version = 9")
        store.close()
        with pytest.raises(StartError, match="has version 9"):
            BatchStore(tmp_path / "store")
        (tmp_path / "file").write_text("x")
        with pytest.raises(StartError, match="files cannot be stored in"):
            BatchStore(tmp_path / "file")
        assert batch_store.is_storage(tmp_path / "store")
