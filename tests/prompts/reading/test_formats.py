"""File formats and stores, cut into chunks: how a file is read must never show in the prompts."""

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from object_stores import running_store
from prompt_stage import chat, read_file, some_rows, texts, users, write

from eagle3.errors import InputError
from eagle3.prompts import Prompt, Refused, source_at
from eagle3.prompts.reading.formats import BLANK, chunk_rows, cut
from eagle3.prompts.reading.shapes import build_layout

# Chunks


@pytest.mark.parametrize("size", [1, 7, 50, 1000, 1 << 20])
@pytest.mark.parametrize("end", ["\n", ""])
def test_every_line_is_in_exactly_one_chunk(tmp_path, size, end):
    lines = [json.dumps({"prompt": "ü" * length}, ensure_ascii=False) for length in (0, 30, 1, 200, 2)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(("\n\n".join(lines) + end).encode())
    chunks = cut(str(path), size)
    assert sum(chunk.size for chunk in chunks) == path.stat().st_size
    assert all(chunk.size == size for chunk in chunks[:-1]) and chunks[-1].size <= size
    found, offset = [], 0
    for chunk in chunks:
        line = 0
        for line, value in chunk_rows(chunk, build_layout(None, None)):
            found.append((offset + line, value))
        offset += line
    assert [value for _, value in found if value is not BLANK] == [json.loads(line) for line in lines]
    assert [line for line, value in found if value is not BLANK] == [1, 3, 5, 7, 9]


def test_an_empty_file_and_one_without_any_row_are_read(prepare, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n \n")
    full = write(tmp_path / "full.jsonl", [chat("a")])
    ledger = prepare(sources=[str(tmp_path / name) for name in ("empty.jsonl", "blank.jsonl", full.name)])
    assert [source["rows"] for source in ledger["sources"].values()] == [0, 0, 1]


def test_maps_and_texts_as_bytes_in_parquet_are_read(tmp_path):
    schema = pa.schema([("messages", pa.list_(pa.map_(pa.string(), pa.string()))), ("system", pa.binary())])
    turn = [("role", "user"), ("content", "a")]
    rows = [{"messages": [turn], "system": b"s"}, {"messages": [turn], "system": b"\xff"}, {"messages": [turn]}]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "a.parquet")
    found, refused, other = read_file(tmp_path / "a.parquet")
    assert isinstance(found, Prompt) and [each["content"] for each in found.messages] == ["s", "a"]
    assert isinstance(refused, Refused) and refused.reason == "content is not text"
    assert isinstance(other, Prompt) and other.messages == users("a")


def test_row_groups_are_cut_without_losing_a_row(prepare, tmp_path):
    table = pa.Table.from_pylist([chat(f"q {number}", id=str(number)) for number in range(50)])
    pq.write_table(table, tmp_path / "same.parquet", row_group_size=7)
    assert len(cut(str(tmp_path / "same.parquet"), 1)) == 8
    assert len(cut(str(tmp_path / "same.parquet"), 1 << 30)) == 1
    prepare(path=str(tmp_path / "same.parquet"), chunk_mb=0.000001)
    assert [prompt["id"] for prompt in prepare.prompts()] == [str(number) for number in range(50)]


# Packed files


def zstd(data: bytes) -> bytes:
    packed = pa.BufferOutputStream()
    with pa.CompressedOutputStream(packed, "zstd") as stream:
        stream.write(data)
    return packed.getvalue().to_pybytes()


PACK = {"gz": gzip.compress, "zst": zstd}


@pytest.mark.parametrize("ending", PACK)
def test_packed_files_are_read_like_plain_ones(prepare, tmp_path, ending):
    expected = prepare(some_rows(20), name="same")
    (tmp_path / f"chats.jsonl.{ending}").write_bytes(PACK[ending]((tmp_path / "chats.jsonl").read_bytes()))
    found = prepare(path=str(tmp_path / f"chats.jsonl.{ending}"), name="same", chunk_mb=0.0001)  # but in one chunk
    assert [found[key] for key in ("rows", "sha256")] == [expected[key] for key in ("rows", "sha256")]


def asked(path: Path) -> list[str]:
    return [row.messages[0]["content"] for row in read_file(path) if isinstance(row, Prompt)]


@pytest.mark.parametrize("start", ["[", "\n [", "\ufeff[", "\ufeff\r\n["])
def test_a_json_array_is_read_plain_or_packed_whatever_its_first_bytes(tmp_path, start):
    array = (start + json.dumps([chat("a"), chat("b")], indent=1)[1:]).encode()
    for name, content in {"a.json": array, "a.json.gz": gzip.compress(array), "a.JSON.zst": zstd(array)}.items():
        (tmp_path / name).write_bytes(content)
        assert asked(tmp_path / name) == ["a", "b"] and len(read_file(tmp_path / name)) == 2, name


TURNS = chat("a", "x")["messages"]
ROWS = [json.dumps(chat(text)) for text in "abc"]
LAYOUTS = {
    "array, a row a line": "[\n" + ",\n".join(ROWS) + "\n]",
    "array in one line": f"[{','.join(ROWS)}]\n",
    "array, indented": json.dumps([chat(text) for text in "abc"], indent=2),
    "array without its brackets": ",\n".join(ROWS),
    "object around an array": json.dumps({"version": 1, "data": [chat(text) for text in "abc"]}, indent=1),
    "object around an array, in one line": json.dumps({"data": [chat(text) for text in "abc"]}),
    "object around rows by their ids": json.dumps({"conversations": {text: chat(text) for text in "abc"}}),
    "object around turns by their ids": json.dumps({"chats": {text: chat(text)["messages"] for text in "abc"}}),
    "object of rows by their ids": json.dumps({text * 2: chat(text) for text in "abc"}, indent=1),
    "a list of turns a line": "\n".join(json.dumps(chat(text)["messages"]) for text in "abc"),
    "object around lists of turns": json.dumps({"conversations": [chat(text)["messages"] for text in "abc"]}),
    "array of lists of turns": json.dumps([chat(text)["messages"] for text in "abc"]),
    "lines, the first of which is broken": "\n".join(['{"messages": [', *ROWS]),
}


EMPTY_ROW = {"license": "MIT", "messages": []}


@pytest.mark.parametrize("key", ["data", "conversations"])
def test_an_empty_row_at_the_beginning_of_an_array_hides_none_of_the_others(prepare, tmp_path, key):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({key: [EMPTY_ROW, chat("a"), chat("b")], "count": 3}))
    assert prepare(path=str(path))["rows"] == 3 and texts(prepare) == ["a", "b"]
    path.write_text(json.dumps({key: [EMPTY_ROW, chat("a"), chat("b")], "faq": [{"question": "c", "license": "MIT"}]}))
    with pytest.raises(InputError, match=rf"several arrays of rows \({key}, faq\); make a file of each"):
        prepare(path=str(path))


def test_an_empty_row_hides_none_of_the_others_in_an_object_of_rows_by_their_ids(tmp_path):
    rows = {"one": chat("a"), "none": EMPTY_ROW, "two": chat("b")}
    (tmp_path / "a.json").write_text(json.dumps(rows))
    assert asked(tmp_path / "a.json") == ["a", "b"] and len(read_file(tmp_path / "a.json")) == 3
    (tmp_path / "a.json").write_text(json.dumps({"request": chat("a"), "response": {"text": "x"}}))
    assert [row.name for row in read_file(tmp_path / "a.json") if isinstance(row, Refused)] == ["request.messages"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Texts of a talk, such as ParlAI's: those of both sides are no questions
        ({"dialog": [{"id": "p", "text": "a"}, {"id": "bot", "text": "b"}], "workers": ["w"]}, "no column of messages"),
        ({"question": "a", "chat_history": [{"question": "b", "answer": "c"}]}, "row with chat_history"),
        ({"conversations": [{"session_id": "1", "turns": users("a")}, {"session_id": "2", "turns": []}]}, None),
    ],
)
def test_an_object_with_the_turns_of_one_talk_is_one_row(tmp_path, content, reason):
    (tmp_path / "a.jsonl").write_text(json.dumps(content))
    first = read_file(tmp_path / "a.jsonl")[0]
    if reason is None:  # its array is of rows
        assert asked(tmp_path / "a.jsonl") == ["a"] and len(read_file(tmp_path / "a.jsonl")) == 2
    else:
        assert isinstance(first, Refused) and first.reason.startswith(reason)
        assert len(read_file(tmp_path / "a.jsonl")) == 1


@pytest.mark.parametrize(
    "table",
    [
        {"question": ["a", "b"], "answer": ["x", "y"], "id": [1, 2]},
        {"prompt": ["a", "b"]},
        {"question": {"0": "a", "1": "b"}, "answer": {"0": "x", "1": None}},
        {"messages": [users("a"), users("b")], "system": ["x", "y"]},
        {"messages": {"0": users("a"), "1": users("b")}, "id": {"0": 1, "1": 2}},
    ],
)
def test_a_table_that_is_stored_by_columns_is_no_conversation(prepare, tmp_path, table):
    (tmp_path / "a.json").write_text(json.dumps(table, indent=1))
    with pytest.raises(
        InputError, match=r"is stored by columns \((question, answer|prompt|messages, ).*\), not by rows; write"
    ):
        prepare(path=str(tmp_path / "a.json"), license="MIT")


def test_an_array_with_turns_of_several_conversations_is_not_read_as_one(prepare, tmp_path):
    turns = [turn | {"session_id": text} for text in "aab" for turn in chat(text, "x")["messages"]]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(turns))
    with pytest.raises(InputError, match="one array with the turns of 2 conversations, by their session_id; write"):
        prepare(path=str(path), license="MIT")
    path.write_text(json.dumps(turns[:4]))
    assert prepare(path=str(path), license="MIT")["prompts"] == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_json_is_read_by_what_it_is_whatever_the_ending(tmp_path, layout):
    content = LAYOUTS[layout].encode()
    for name, written in {"a.jsonl": content, "a.json": content, "a.jsonl.gz": gzip.compress(content)}.items():
        (tmp_path / name).write_bytes(written)
        assert asked(tmp_path / name) == ["a", "b", "c"], name


def test_a_file_may_hold_one_conversation(tmp_path):
    for content in (json.dumps(TURNS), json.dumps(chat("a", "x"), indent=1), json.dumps(chat("a", "x"))):
        (tmp_path / "a.json").write_text(content)
        assert asked(tmp_path / "a.json") == ["a"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": TURNS, "system": [{"type": "text", "text": "Be brief."}]}, users("a")),
        ({"messages": TURNS, "documents": [{"text": "b"}, {"text": "c"}]}, users("a")),
        ({"messages": TURNS, "examples": [{"input": "b", "output": "c"}]}, users("a")),
        ({"prompt": "a", "candidates": [{"text": "b"}, {"text": "c"}]}, users("a")),
        ({"body": {"input": "a", "temperature": 1}}, users("a")),
        ({"prompt": "a", "examples": [{"input": "b"}], "tests": [{"input": "c"}]}, users("a")),
        ({"messages": [{"author": "Ann", "text": "b"}, {"author": "Bob", "text": "c"}]}, "turn without a role"),
        ({"conversation": [{"prompt": "b", "response": "c"}, {"prompt": "d"}]}, "turn without a role"),
    ],
)
def test_a_list_in_the_one_row_of_a_file_is_not_taken_for_rows(tmp_path, row, expected):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [found] = read_file(tmp_path / "a.jsonl")
    assert (found.messages[-1:] if isinstance(found, Prompt) else found.reason) == expected


def test_a_key_that_is_given_twice_is_counted(tmp_path):
    for name in ("a.jsonl", "b.json"):
        row = '{"prompt": "x", "prompt": "a", "license": "MIT", "license": "MIT"}'
        turns = '{"messages": [{"role": "user", "content": "y", "content": "b"}]}'
        (tmp_path / name).write_text(f"{row}\n{turns}" if name == "a.jsonl" else f"[{row},\n{turns}]")
        first, second = read_file(tmp_path / name)
        assert isinstance(first, Prompt) and first.messages == users("a")
        assert first.notes == (("column not read", "prompt, given twice"),)
        assert isinstance(second, Prompt) and second.messages == users("b")
        assert second.notes == (("key of turns not read", "content, given twice"),)


def test_what_an_object_says_next_to_its_array_holds_for_each_row(tmp_path):
    wrapped = {"license": "GPL-3.0-only", "data": [{"prompt": "a"}, {"prompt": "b", "license": "MIT"}]}
    (tmp_path / "a.json").write_text(json.dumps(wrapped))
    assert [row.license for row in read_file(tmp_path / "a.json")] == ["GPL-3.0-only", "MIT"]
    wrapped = {
        "metadata": {"license": "MIT"},
        "tools": [{"name": "f"}],
        "data": [{"prompt": "a"}, {"prompt": "b", "tools": []}],
    }
    (tmp_path / "a.json").write_text(json.dumps(wrapped))
    first, second = read_file(tmp_path / "a.json")
    assert isinstance(first, Refused) and first.reason == "row with tools"
    assert isinstance(second, Prompt) and second.license == "MIT"
    (tmp_path / "a.json").write_text(json.dumps({"license": "MIT", "system": "s", "conversations": [TURNS, "b"]}))
    first, second = read_file(tmp_path / "a.json")
    assert isinstance(first, Prompt) and first.license == "MIT" and first.messages[0]["content"] == "s"
    assert isinstance(second, Refused) and second.reason == "not a JSON object"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n{"prompt": "a"}\n{"prompt": "b"}\n]', r"line 3, column 1: .*jq -c"),
        (b'{\n"prompt": "a"\n}\n{\n"prompt": "b"\n}', r"line 4, column 1: .*jq -c"),
        (
            json.dumps({"text": "of", "data": [chat("a")]}).encode(),
            r"a conversation \(text\) and .* rows \(data\); leave",
        ),
        (json.dumps({"train": [chat("a")], "test": [chat("b")]}).encode(), r"several arrays of rows \(train, test\)"),
        (b"\x1f\x8b\x08rest", r"packed with gzip; rename it"),
        (b"PAR1rest", r"Parquet; rename it"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"a pointer of Git LFS; fetch"),
        (b"BZh91AY", r"packed with bzip2; unpack it"),
        (b"<!DOCTYPE html>\n<html>", r"HTML or XML, .*; fetch the data file itself"),
        (b'// of May\n[{"prompt": "a"}]', r"JSON with comments; remove"),
        (b"{'prompt': 'a'}\n{'prompt': 'b'}\n", r"written by Python's str\(\), not JSON; .*json\.dumps"),
        (b'{"columns": ["prompt"], "index": [0], "data": [["a"]]}', r"columns apart \(orient='split'\); write"),
        ('{"prompt": "a"}\n{"prompt": "für"}\n'.encode("latin-1"), r"not UTF-8: its byte 29 is 0xfc"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_what_to_do(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=rf"a\.jsonl.*{message}"):
        read_file(tmp_path / "a.jsonl")


@pytest.mark.parametrize("ending", PACK)
def test_a_damaged_packed_file_is_named(tmp_path, ending):
    plain = "".join(json.dumps(chat(os.urandom(50).hex())) for _ in range(100)).encode()
    path = tmp_path / f"chats.jsonl.{ending}"
    packed = PACK[ending](plain)
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match=rf"chats\.jsonl\.{ending} is damaged"):
        read_file(path)
    path.write_bytes(plain)
    with pytest.raises(InputError, match=rf"chats\.jsonl\.{ending} begins with JSON, .*; rename it to end in \.jsonl"):
        read_file(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "a.jsonl"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS; fetch"),
        (b"/annex/objects/MD5E-s9--0.jsonl\n", "is a pointer of git-annex; fetch"),
        (b"<!DOCTYPE html>", "is HTML or XML, .*; fetch the data file itself"),
    ],
)
def test_what_a_download_left_in_place_of_a_file_is_named_whatever_the_ending(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"{name} {message}"):
        read_file(tmp_path / name)


def test_a_column_that_a_parquet_file_has_twice_is_named(tmp_path):
    pq.write_table(
        pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt"] * 2), tmp_path / "a.parquet"
    )
    with pytest.raises(InputError, match=r"a\.parquet has several columns of the name prompt; leave one"):
        read_file(tmp_path / "a.parquet")


# Stores


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with running_store():
        fsspec.filesystem("s3").mkdir("chats")
        yield "s3://chats"


def test_a_date_that_python_does_not_know_is_named_in_a_column_that_is_read_and_costs_nothing_elsewhere(
    tmp_path,
):
    for column, message in (("id", r"a\.parquet is damaged, .* cannot be read \(OverflowError\)"), ("time", None)):
        date = pa.array([10**18], pa.timestamp("us"))
        pq.write_table(pa.table({"prompt": ["a"], column: date}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=message) if message else nullcontext():
            assert asked(tmp_path / "a.parquet") == ["a"]


def test_files_and_dataset_folders_in_a_store_are_read_like_local_ones(prepare, tmp_path, bucket):
    import datasets

    rows = [chat(f"q {number}", id=str(number)) for number in range(40)]
    prepare(rows, name="same")
    expected = (prepare.folder / "prompts.jsonl").read_bytes()
    local = tmp_path / "local"
    dataset = datasets.Dataset.from_list(rows)
    for folder in ("hub/data", "lines"):
        (local / folder).mkdir(parents=True)
    dataset.to_parquet(local / "hub/data/train-00000-of-00001.parquet")
    dataset.select([0]).to_parquet(local / "hub/data/test-00000-of-00001.parquet")
    (local / "lines" / "a.jsonl.gz").write_bytes(gzip.compress((tmp_path / "chats.jsonl").read_bytes()))
    write(local / "chats.jsonl", rows)
    fsspec.filesystem("s3").put(f"{local}/", f"{bucket}/{prepare.root.name}/", recursive=True)
    fsspec.filesystem("s3").touch(f"{bucket}/{prepare.root.name}/hub/data/")  # as consoles make a folder
    for path in ("hub", "lines", "chats.jsonl"):
        settings = {"name": "same", "chunk_mb": 0.001, "processes": 2 if path == "hub" else 1}
        ledger = prepare(path=f"{bucket}/{prepare.root.name}/{path}", **settings)
        assert (prepare.folder / "prompts.jsonl").read_bytes() == expected, path
        assert ledger["inputs"]["sources"][0]["files"][0][2], "no version of the file is known"
    fsspec.filesystem("s3").pipe_file(f"{bucket}/{prepare.root.name}/chats.jsonl", json.dumps(chat("a")).encode())
    prepare(path=f"{bucket}/{prepare.root.name}/chats.jsonl", **settings)  # changed
    assert texts(prepare) == ["a"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s3://chats/nowhere.jsonl", "does not exist"),
        ("s3://nobucket/a.jsonl", "does not exist"),
        ("gs://x/a.jsonl", r"cannot be opened \(ImportError: .*gcsfs"),
        ("nope://x", "cannot be opened"),
    ],
)
def test_what_is_not_in_the_store_and_a_store_without_its_package_are_named(bucket, path, message):
    with pytest.raises(InputError, match=rf"prompts\.path={path} {message}"):
        source_at("prompts", path)


def test_a_file_on_a_web_server_that_sends_whole_files_only_is_read(tmp_path):
    class Handler(SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Accept-Ranges", "none")
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    rows = some_rows(30)
    write(tmp_path / "chats.jsonl", rows)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/chats.jsonl"
        found = read_file(url)
        server.shutdown()
    here = read_file(tmp_path / "chats.jsonl")
    assert len(found) == len(here) > 30
    assert [row for row in found if isinstance(row, Prompt)] == [row for row in here if isinstance(row, Prompt)]
