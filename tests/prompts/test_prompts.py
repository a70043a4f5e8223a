"""Raw conversations → clean prompts, through the stage as precompute.py runs it."""

import json
import os

import datasets
import fsspec
import pytest
from prompt_stage import chat, read_file, read_messages, reasons, texts, users, write

from eagle3.errors import InputError
from eagle3.prompts import Refused

# Conversations


IDS = {"prompt_ids": [1, 2], "output_ids": [3]}


NOT_TRAINED = {"trained": False}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (IDS | {"finish_reason": "stop"}, IDS | {"finish_reason": "stop"}),
        ({"finish_reason": {"type": "length", "length": 9}, **IDS}, {"finish_reason": "length", **IDS}),
        ({"finish_reason": "content_filter"}, {"finish_reason": "other"}),
        ({"done_reason": "length"}, {"finish_reason": "length"}),
        ({"stop_reason": "max_tokens"}, {"finish_reason": "length"}),
        ({"stop_reason": "end_turn", "finish_reason": None}, {"finish_reason": "stop"}),
        ({"stop_reason": 2, "finish_reason": "STOP"}, {"finish_reason": "stop"}),
        # A stop string of vLLM, of SGLang's two interfaces, of llama.cpp: there is no end of turn.
        ({"stop_reason": "###", "finish_reason": "stop"}, {"finish_reason": "other"}),
        ({"finish_reason": {"type": "stop", "matched": "###"}}, {"finish_reason": "other"}),
        ({"finish_reason": {"type": "stop", "matched": 2}}, {"finish_reason": "stop"}),
        ({"finish_reason": "stop", "matched_stop": "###"}, {"finish_reason": "other"}),
        ({"stop_type": "word", "truncated": False}, {"finish_reason": "other"}),
        ({"stop_type": "limit"}, {"finish_reason": "length"}),
        ({"truncated": True}, {"finish_reason": "length"}),
        ({"truncated": False}, {}),
        ({"status": "incomplete"}, {"finish_reason": "other"}),
        ({"status": "completed"}, {}),
        ({"prompt_ids": None, "output_ids": None, "finish_reason": None, "sampling": {"user": "Jane"}}, {}),
        *((flag, NOT_TRAINED) for flag in ({"weight": 0}, {"train": False}, {"loss": False}, {"masked": True})),
        *((flag, {}) for flag in ({"weight": 1}, {"loss": None}, {"train": [0]}, {"masked": False})),
    ],
)
def test_how_an_answer_was_made_and_whether_it_is_trained_is_kept_with_it_and_only_then(said, kept):
    turns = [*users("a"), {"role": "assistant", "content": "x", **said}]
    assert read_messages({"messages": turns}, keep_answers=True)[1] == {"role": "assistant", "content": "x", **kept}
    assert read_messages({"messages": turns}, keep_answers=False) == users("a")


def test_the_finish_reason_of_a_row_is_that_of_its_last_answer():
    answer = {"role": "assistant", "content": "x"}
    row = {"finish_reason": "length", "messages": [*users("a"), answer, *users("b"), answer]}
    _, first, _, last = read_messages(row, keep_answers=True)
    assert first == answer and last == answer | {"finish_reason": "length"}
    row["messages"][3] = answer | {"finish_reason": "stop"}
    assert read_messages(row, keep_answers=True)[3]["finish_reason"] == "stop"
    row["messages"][3] = answer | {"finish_reason": None}
    assert read_messages(row, keep_answers=True)[3]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("said", "end"),
    [
        ({"metadata": {"finish_reason": "length"}}, "length"),
        ({"truncated": True}, "length"),  # Model-Optimizer
        ({"meta_info": {"finish_reason": {"type": "length", "length": 9}}}, "length"),  # SGLang
        ({"details": {"finish_reason": "length"}}, "length"),  # TGI
        ({"response_metadata": {"finish_reason": "length"}}, "length"),  # LangChain
        ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "length"),  # OpenAI
        ({"status": "incomplete", "incomplete_details": {"reason": "content_filter"}}, "other"),
        ({"finish_reason": "stop", "stop_reason": "###"}, "other"),
    ],
)
def test_a_row_may_say_under_many_names_how_its_answer_ended(said, end):
    row = {"messages": [*users("a"), {"role": "assistant", "content": "x", "status": "incomplete"}], **said}
    assert read_messages(row, keep_answers=True)[1]["finish_reason"] == end


HISTORY = [*users("a"), {"role": "assistant", "content": "x"}, *users("b")]
COMPLETION = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "y"}, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("said", "column"),
    [
        (COMPLETION, "choices"),
        ({"response": COMPLETION}, "response"),  # LiteLLM
        ({"response": {"status_code": 200, "body": COMPLETION}, "error": None}, "response"),  # a batch of OpenAI
        ({"message": {"role": "assistant", "content": "y"}, "done_reason": "length"}, "message"),  # Ollama
        ({"content": [{"type": "text", "text": "y"}], "stop_reason": "max_tokens"}, "content"),  # Anthropic
        ({"output": {"role": "assistant", "content": "y"}}, "output"),  # Langfuse
        ({"responses": ["y", "z"]}, "responses"),  # verl
        ({"generation": None}, "generation"),  # distilabel, where the request failed
        ({"finish_reason": "length"}, "finish_reason"),
    ],
)
def test_the_answers_before_a_question_that_is_answered_elsewhere_are_not_imported(said, column):
    """They are another model's, or those of earlier requests; the row's end is not theirs."""
    with pytest.raises(Refused, match="the answer to the last question is not among the turns") as refused:
        read_messages({"messages": HISTORY, **said}, keep_answers=True)
    assert refused.value.name == column
    assert read_messages({"messages": HISTORY, **said}, keep_answers=False) == [HISTORY[0], HISTORY[2]]
    assert read_messages({"messages": HISTORY}, keep_answers=True) == HISTORY[:2]  # cut by Model-Optimizer at an error


@pytest.mark.parametrize("answer", [{"generation": "y"}, {"completion": [{"role": "assistant", "content": "y"}]}])
def test_answers_before_one_in_a_column_of_its_own_are_not_trained(answer):
    """distilabel's and TRL's rows: what comes before is the prompt."""
    _, before, _, last = read_messages({"prompt": HISTORY, **answer}, keep_answers=True)
    assert before["trained"] is False and last == {"role": "assistant", "content": "y"}


@pytest.mark.parametrize(
    ("said", "column"),
    [
        ({"status": "error", "error": "Connection error."}, "status"),  # SpecForge: with the answers of the data set
        ({"status": "skipped"}, "status"),
        ({"status": "failure", "error_str": "429"}, "status"),  # LiteLLM
        ({"error": {"code": "x"}}, "error"),
        ({"status": "success", "error": None}, None),
    ],
)
def test_the_answers_in_a_row_of_a_failed_request_are_not_imported(said, column):
    row = {"conversations": HISTORY[:2], **said}
    if column is None:
        assert read_messages(row, keep_answers=True) == HISTORY[:2]
        return
    with pytest.raises(Refused, match="row of a request that failed") as refused:
        read_messages(row, keep_answers=True)
    assert refused.value.name == column and read_messages(row, keep_answers=False) == users("a")


def test_an_answer_in_several_parts_is_refused_unless_its_ids_are_known():
    parts = [{"type": "text", "text": "Use "}, {"type": "text", "text": "it."}]
    with pytest.raises(Refused, match="answer in several parts"):
        read_messages({"messages": [*users("a"), {"role": "assistant", "content": parts}]}, keep_answers=True)
    for said in ({"content": parts} | IDS, {"content": parts[1:]}):
        assert read_messages({"messages": [*users("a"), {"role": "assistant", **said}]}, keep_answers=True)


@pytest.mark.parametrize(
    ("said", "reason"),
    [({"prompt_ids": [1]}, "only one of prompt_ids and output_ids")]
    + [
        ({"prompt_ids": ids, "output_ids": [2]}, "prompt_ids or output_ids are no list of whole numbers")
        for ids in ([], [1.5], [True], [-1], "12")
    ],
)
def test_what_cannot_be_how_an_answer_was_made_is_refused(said, reason):
    with pytest.raises(Refused, match=reason):
        read_messages({"messages": [*users("a"), {"role": "assistant", "content": "x", **said}]}, keep_answers=True)


def test_system_turns_stay_where_they_are_unless_blank_or_after_the_last_user_turn(prepare):
    system = {"role": "system", "content": "be brief"}
    blank = {"role": "system", "content": " "}
    turns = [blank, *users("a"), {"role": "assistant", "content": "x"}, system, *users("b"), system]
    ledger = prepare([{"messages": turns, "license": "MIT"}, {"messages": [*users("c"), blank], "license": "MIT"}])
    assert prepare.prompts()[0]["messages"] == [*users("a"), system, *users("b")]
    found = {"system turn after the last question left out": 1}
    assert ledger["sources"]["chats"]["found"]["reading"] == found


def test_keep_answers_refuses_what_has_no_whole_answer(prepare):
    call = {"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}
    rows = [chat("a", "x"), chat("b"), {**chat(), "messages": [*users("c"), call]}, {**chat(), "messages": [call]}]
    prepare(rows, keep_answers=True)
    parts = "turn with tool_calls next to its content"
    assert reasons(prepare) == ["no assistant turn", parts, parts]
    prepare([chat("a"), {**chat(), "messages": [*users("c"), call]}])
    assert reasons(prepare) == []


def test_a_row_that_is_no_prompt_costs_itself_alone(prepare):
    rows = [chat("a"), '{"messages": [{"ro', "", "[" * 100_000, [], {"messages": users("a", " \n")}, chat("b")]
    ledger = prepare(rows)
    assert [prompt["messages"] for prompt in prepare.prompts()] == [users("a"), users("b")]
    assert (ledger["rows"], ledger["prompts"]) == (6, 2)
    assert reasons(prepare) == [*["not a JSON object"] * 3, "empty user turn"]
    place = {"source": "chats", "file": "chats.jsonl", "line": 2}
    assert prepare.rejects()[0] == {"id": None, **place, "reason": "not a JSON object"}


def test_a_file_that_is_not_utf_8_is_refused_with_its_encoding(tmp_path):
    lines = "\n".join(json.dumps({"prompt": name}, ensure_ascii=False) for name in ("one", "Škoda", "three"))
    named = {"utf-16": "UTF-16", "utf-16-le": "UTF-16", "utf-32": "UTF-32", "cp1252": "WINDOWS-1252"}
    for encoding, name in named.items():
        (tmp_path / "windows.jsonl").write_bytes(lines.encode(encoding))
        with pytest.raises(InputError, match=rf"windows\.jsonl is .*iconv -f {name} -t UTF-8"):
            read_file(tmp_path / "windows.jsonl")


def test_ids_come_from_the_row_or_else_from_the_content(prepare):
    prepare([chat("a", id="x"), chat("b", conversation_id=7), chat("c", question_id=0), chat("d"), chat("e", id=None)])
    ids = [prompt["id"] for prompt in prepare.prompts()]
    assert ids[:3] == ["x", "7", "0"]
    assert len(set(ids)) == 5
    prepare([chat("e"), chat("d", "answered")])
    assert [prompt["id"] for prompt in prepare.prompts()] == [ids[4], ids[3]]


def test_other_prompts_with_an_id_that_is_taken_get_one_from_their_content(prepare):
    rows = [chat("a", id=1, license="GPL-3.0-only"), chat("b", id=1), chat("c", id="1"), chat("d", id=1), chat("e")]
    ledger = prepare(rows)
    first, *others, _ = [prompt["id"] for prompt in prepare.prompts()]
    assert first == "1" and all(id.startswith("1-") for id in others) and len({*others}) == 2
    assert ledger["sources"]["chats"]["found"]["reading"] == {"id of another prompt, made unique": 2}
    prepare(rows, limit=3)
    assert [prompt["id"] for prompt in prepare.prompts()] == [first, *others]
    prepare([rows[1], rows[3]])
    assert [prompt["id"] for prompt in prepare.prompts()] == [first, others[1]]


def test_an_id_or_source_that_no_file_can_hold_counts_as_missing(prepare):
    prepare([chat("a", id="\ud83d", question_id=3, source="\ud83d"), chat("b", id=" ", question_id=4, source=5)])
    assert [(prompt["id"], prompt["source"]) for prompt in prepare.prompts()] == [("3", "chats"), ("4", "chats")]


# Licences


def test_the_source_licence_counts_only_for_rows_without_one_and_a_licence_is_text(prepare):
    given = (None, "MIT", "GPL-3.0-only", [["MIT"]], "half a pair \ud83d")
    ledger = prepare([{"prompt": str(number), "licence": each} for number, each in enumerate(given)], license="ISC")
    assert [prompt["license"] for prompt in prepare.prompts()] == ["ISC", "MIT"]
    assert ledger["sources"]["chats"]["licenses"] == {"ISC": 1, "MIT": 1}
    assert reasons(prepare) == ["license not allowed: GPL-3.0-only", *["license is not text"] * 2]


def test_of_several_licences_of_a_row_each_must_be_allowed_also_after_a_choice(prepare):
    rows = [{"prompt": str(number), "license": each} for number, each in enumerate(
        [["MIT OR GPL-3.0-only", "GPL-3.0-only"], ["GPL-3.0-only", "x OR MIT"], ["MIT or GPL-3.0-only", "ISC"]]
    )]  # fmt: skip
    prepare([*rows, {"prompt": "3", "license": "Apache-2.0 OR MIT", "metadata": {"license": "GPL-3.0-only"}}])
    assert [prompt["license"] for prompt in prepare.prompts()] == ["(MIT or GPL-3.0-only) AND ISC"]


# Sources


def test_parquet_and_dataset_folders_give_the_same_prompts_as_json_lines(prepare, tmp_path):
    rows = [chat("a", "x", id="1", extra=1), chat("b", "y", id="2", extra=2)]
    prepare(rows, name="same")
    expected = (prepare.folder / "prompts.jsonl").read_bytes()
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet(tmp_path / "one.parquet")
    for folder in ("lines", "hub/data"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "lines" / "a.jsonl", rows[:1])
    write(tmp_path / "lines" / "b.jsonl", rows[1:])
    dataset.to_parquet(tmp_path / "hub/data/train-00000-of-00001.parquet")
    dataset.select([0]).to_parquet(tmp_path / "hub/data/test-00000-of-00001.parquet")
    (tmp_path / "array.json").write_text("\ufeff\n" + json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("\ufeff" + "\r\n".join(json.dumps(row) for row in rows))
    for path in ("one.parquet", "lines", "hub", "array.json", "lines.json"):
        prepare(path=str(tmp_path / path), name="same")
        assert (prepare.folder / "prompts.jsonl").read_bytes() == expected, path


def test_a_folder_from_save_to_disk_says_to_save_it_as_parquet(prepare, tmp_path):
    dataset = datasets.Dataset.from_list([chat("a")])
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train_sft=dataset).save_to_disk(tmp_path / "saved_dict")
    for path in ("saved", "saved_dict", "saved/data-00000-of-00001.arrow"):
        with pytest.raises(
            InputError, match=r"prompts\.path=.*\.arrow ends in none of .*, an Arrow file with dataset\.to_"
        ):
            prepare(path=str(tmp_path / path))


def test_data_files_of_a_folder_that_are_in_no_split_are_named(prepare, tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl", "test.jsonl"):
        write(folder / name, [chat(name)])
    datasets.Dataset.from_list([chat("parquet")]).to_parquet(folder / "c.parquet")
    write(folder / "d.log", [chat("log")])
    for name in ("e.jsonl-00000-of-00002", "f.orc", "g.TAR", "notes.txt"):
        (folder / name).touch()
    (folder / "README.md").write_text("a card")
    assert prepare(path=str(folder), split="test")["prompts"] == 1
    assert "7 data files of this folder are NOT read" in caplog.text
    assert "a.jsonl, b.jsonl, c.parquet, d.log, e.jsonl-00000-of-00002 and 2 more;" in caplog.text
    caplog.clear()
    for name in ("test.jsonl", "c.parquet", "d.log", "e.jsonl-00000-of-00002", "f.orc", "g.TAR"):
        (folder / name).unlink()
    assert prepare(path=str(folder))["prompts"] == 2
    assert "NOT read" not in caplog.text


def test_splits_that_are_not_read_are_named_unless_one_was_chosen(prepare, tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("chats_train", "chats_eval", "latest_test_run", "dev-team"):
        write(folder / f"{name}.jsonl", [chat(name)])
    assert prepare(path=str(folder))["prompts"] == 1
    assert f"prompts.path={folder}: of this folder only the split train is read, NOT " in caplog.text
    assert all(name in caplog.text for name in ("chats_eval.jsonl", "latest_test_run.jsonl", "dev-team.jsonl"))
    caplog.clear()
    prepare(path=str(folder), split="train")
    assert "only the split" not in caplog.text


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: en/part1.jsonl}
  - {split: test, path: en/part2.jsonl}
- config_name: de
  data_files: de/part1.jsonl
---
"""


@pytest.mark.parametrize("store", ["", "memory:/"])
def test_the_card_says_which_files_are_of_which_config_and_split_also_in_a_store(prepare, tmp_path, store, caplog):
    folder = f"{store}{tmp_path}/set"
    files, path = fsspec.core.url_to_fs(folder)
    for language in ("en", "de"):
        files.makedirs(f"{path}/{language}")
    rows = {f"{name}.jsonl": json.dumps(chat(name)) for name in ("en/part1", "en/part2", "de/part1")}
    files.pipe({f"{path}/{name}": content.encode() for name, content in ({"README.md": CARD} | rows).items()})
    with pytest.raises(InputError, match=r"\['en', 'de'\].*; choose one with prompts\.config=\.\.\.$"):
        prepare(path=folder)
    for config, question in {"en": "en/part1", "de": "de/part1"}.items():
        assert prepare(path=folder, config=config)["prompts"] == 1
        assert texts(prepare) == [question]
    assert "sorts its files into configs" not in caplog.text
    assert prepare(path=f"{folder}/en")["prompts"] == 2
    assert f"prompts.path={folder}/en is inside a data set whose card sorts its files into configs" in caplog.text


def test_a_card_that_cannot_be_read_ends_the_run_with_one_line(prepare, tmp_path):
    write(tmp_path / "a.jsonl", [chat("a")])
    (tmp_path / "README.md").write_text("---\nconfigs: [\n---\n")
    with pytest.raises(
        InputError, match=r"^prompts\.path=.* is not a dataset folder .*\(while parsing a flow node[^\n]*$"
    ):
        prepare(path=str(tmp_path))


def test_the_cache_of_the_hub_holds_several_revisions_of_which_one_is_read(prepare, tmp_path):
    cache = tmp_path / "datasets--org--set"
    for revision in ("r1", "r2"):
        (cache / "snapshots" / revision).mkdir(parents=True)
        write(cache / "snapshots" / revision / "a.jsonl", [chat(revision)])
    for folder in (cache, cache / "snapshots"):
        with pytest.raises(InputError, match=rf"all revisions of a data set; name one, .* {cache}/snapshots/REVISION,"):
            prepare(path=str(folder))
    assert prepare(path=str(cache / "snapshots" / "r1"))["prompts"] == 1


def test_links_to_folders_and_to_nothing_are_named_because_they_are_not_read(prepare, tmp_path, caplog):
    for name in ("set", "elsewhere"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.jsonl", [chat(name)])
    for name in ("more", ".hidden"):
        (tmp_path / "set" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "b.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "set" / "c.jsonl").symlink_to(tmp_path / "elsewhere" / "a.jsonl")
    assert prepare(path=str(tmp_path / "set"))["prompts"] == 2
    assert "are NOT read: b.jsonl, more;" in caplog.text


@pytest.mark.parametrize(
    ("names", "warning"),
    [
        (["Train/a", "Test/b"], "1 of the files that are read may be for tests: Test/b.jsonl;"),
        (["trainData", "testData"], "1 of the files that are read may be for tests: testData.jsonl;"),
        (["a", "holdout"], "1 of the files that are read may be for tests: holdout.jsonl;"),
        (["latest", "evaluate-me"], None),
    ],
)
def test_files_for_tests_that_datasets_sorts_into_no_split_are_named(prepare, tmp_path, names, warning, caplog):
    folder = tmp_path / "set"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / f"{name}.jsonl", [chat(name)])
    assert prepare(path=str(folder))["prompts"] == 2
    assert warning in caplog.text if warning else "that are read" not in caplog.text
    caplog.clear()
    prepare(path=str(folder), split="train")
    assert "that are read" not in caplog.text


def test_configurations_that_the_hub_converted_and_that_are_read_together_are_named(prepare, tmp_path, caplog):
    for config in ("de", "en"):
        (tmp_path / config / "train").mkdir(parents=True)
        datasets.Dataset.from_list([chat(config)]).to_parquet(tmp_path / config / "train/0000.parquet")
    assert prepare(path=str(tmp_path))["prompts"] == 2
    assert "2 configurations of a data set are read together: de, en; to read one, name its folder" in caplog.text


def test_files_of_several_kinds_that_are_read_together_are_named(prepare, tmp_path, caplog):
    for name in ("a.jsonl", "a.json"):
        write(tmp_path / name, [chat("a")])
    assert prepare(path=str(tmp_path))["prompts"] == 1
    assert "files of several kinds are read: a.json | a.jsonl;" in caplog.text


def test_a_file_that_is_not_read_is_named_also_if_one_of_its_name_is_read(prepare, tmp_path, caplog):
    (tmp_path / "set" / "train").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "set")
    for name in ("train/data.jsonl", "data.jsonl"):
        write(tmp_path / "set" / name, [chat(name)])
    for folder in ("set", "link"):
        assert prepare(path=str(tmp_path / folder))["prompts"] == 1
        assert f"{folder}: 1 data files of this folder are NOT read" in caplog.text


def test_a_folder_that_may_not_be_read_is_named(prepare, tmp_path, monkeypatch, caplog):
    scandir = os.scandir

    def refusing(path):  # root may read all
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "locked").mkdir()
    write(tmp_path / "a.jsonl", [chat("a")])
    monkeypatch.setattr("os.scandir", refusing)
    assert prepare(path=str(tmp_path))["prompts"] == 1
    assert "folders without the right to read them, are NOT read: locked;" in caplog.text


def test_a_local_url_is_a_path(prepare, tmp_path):
    write(tmp_path / "a.jsonl", [chat("a")])
    assert prepare(path=f"file://{tmp_path}")["prompts"] == 1


@pytest.mark.parametrize("name", ["data [v2]", "what?"])
def test_a_name_with_the_signs_of_a_pattern_is_taken_literally(prepare, tmp_path, name, caplog):
    folder = tmp_path / name / "sub [1]"
    folder.mkdir(parents=True)
    file = write(folder / "train [1].jsonl", [chat("a")])
    write(tmp_path / name / "test.jsonl", [chat("b")])
    (tmp_path / name / "README.md").write_text("---\nlicense: mit\n---\n")
    if "?" not in name:  # which DuckDB has for a query
        prepare.out_dir, prepare.folder = tmp_path / name / "out", tmp_path / name / "out" / "prompts"
    prepare(path=str(tmp_path / name))
    assert texts(prepare) == ["a"]
    prepare(path=str(file))
    assert texts(prepare) == ["a"]
    assert "data files of this folder are NOT read" not in caplog.text


def test_a_split_of_a_file_has_no_effect_and_is_said_to_have_none(prepare, tmp_path, caplog):
    path = write(tmp_path / "chats.jsonl", [chat("a"), chat("b")])
    assert prepare(path=str(path), split="test")["prompts"] == 2
    assert f"prompts.split=test has no effect on prompts.path={path}, a file, which is read whole;" in caplog.text


def test_the_current_folder_is_a_source_with_its_own_name(prepare, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    write(tmp_path / "mine" / "a.jsonl", [chat("a")])
    (tmp_path / "mine" / "state.json").write_text("{}")  # of another program: it makes no saved dataset of the folder
    monkeypatch.chdir(tmp_path / "mine")
    assert list(prepare(path=".")["sources"]) == ["mine"]


def test_many_sources_keep_their_order_names_licences_and_limits_and_may_share_ids(prepare, tmp_path):
    first = write(tmp_path / "first.jsonl", [{"question_id": i, "turns": [f"a{i}"]} for i in range(3)])
    second = write(tmp_path / "second.jsonl", [chat(id=9), *(chat(f"b{i}", id=i, source="wiki") for i in range(3))])
    entries = [{"path": str(first), "license": "ISC", "limit": 2}, {"path": str(second), "name": "two"}]
    ledger = prepare(sources=entries, limit=4)
    found = [(prompt["id"], prompt["source"], prompt["license"]) for prompt in prepare.prompts()]
    assert found[:2] == [("first/0", "first", "ISC"), ("first/1", "first", "ISC")]
    assert found[2:] == [("two/0", "wiki", "MIT"), ("two/1", "wiki", "MIT")]
    assert [(counts["rows"], counts["prompts"]) for counts in ledger["sources"].values()] == [(3, 2), (4, 2)]
    assert [(reject["id"], reject["source"], reject["reason"]) for reject in prepare.rejects()] == [
        ("first/2", "first", "past the limit of the source"),
        ("two/9", "two", "no user turn"),
        ("two/2", "two", "past prompts.limit"),
    ]
    assert ledger["sources"]["two"]["origins"] == {"wiki": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"prompts\.path=None and prompts\.sources=None: set exactly one"),
        ({"path": "x.jsonl", "sources": ["y.jsonl"]}, r"set exactly one"),
        ({"path": "no/such.jsonl"}, r"prompts\.path=no/such\.jsonl does not exist"),
        ({"sources": [{"path": "no/such.jsonl"}]}, r"prompts\.sources\[0\]\.path=no/such\.jsonl does not exist"),
        (
            {"path": "HERE/a.csv"},
            r"prompts\.path=.*a\.csv ends in none of \.jsonl.*; take it out of the folder, or rename",
        ),
        ({"path": "HERE/empty"}, r"prompts\.path=.*empty is not a dataset folder"),
        ({"path": "HERE/two"}, r"prompts\.path=.*two is not a dataset folder.*\['x', 'y'\].*prompts\.config"),
        ({"path": "HERE/good", "split": "test"}, r"prompts\.split=test is not in .*; it has: train"),
        ({"path": "HERE/bad.parquet"}, r"bad\.parquet is damaged, not what its ending says"),
        ({"path": "HERE/bad.json"}, r"bad\.json starts like one JSON .* \(line 2, column 1"),
        ({"sources": ["HERE/good/a.jsonl"] * 2}, r"prompts\.sources\[1\]\.name=a is taken"),
    ],
)
def test_a_wrong_source_is_named_with_its_config_key_and_the_fix(prepare, tmp_path, config, message):
    for folder in ("empty", "good", "two"):
        (tmp_path / folder).mkdir()
    configs = "".join(f"- config_name: {name}\n  data_files: a.jsonl\n" for name in "xy")
    (tmp_path / "two" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    bad = {"bad.parquet": ["PAR1"], "bad.json": ['[{"prompt": "a"},'], "a.csv": ["prompt", "a"]}
    for name, rows in {"two/a.jsonl": [chat("a")], "good/a.jsonl": [chat("a")], **bad}.items():
        write(tmp_path / name, rows)
    with pytest.raises(InputError, match=message):
        prepare(**json.loads(json.dumps(config).replace("HERE", str(tmp_path))))
