"""The documented command again, after an answer failed, features were killed or a prompt was refused for good."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import call_script
from stores import ASSETS, open_store, shard_path

import eagle3.answers.huggingface
from eagle3.errors import InputError
from eagle3.features.store_writer import StoreWriter
from eagle3.storage.files import read_jsonl
from eagle3.target.model import Target

QUESTIONS = [f"How is `vfield{number}` used?" for number in range(3)]
LATE = "Explain `to_dict` from `sympy.polys.polyclasses`."
Run = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_chats(tmp_path, [*QUESTIONS, LATE])
    settings = (
        f"target.path={ASSETS}/tiny", "target.device=cpu", f"prompts.path={tmp_path}/chats.jsonl",
        f"out_dir={tmp_path}/dir", "prompts/privacy=off", "prompts.processes=1", "prompts.license=MIT",
        "answers=huggingface", "features=huggingface", "sampling.max_new_tokens=8", "progress=false",
    )  # fmt: skip
    return lambda *changes: call_script("precompute", *settings, *changes, output_dir=tmp_path / "run")


def write_chats(folder: Path, questions: list[str]) -> None:
    chats = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))


@pytest.fixture
def late_fails(target: Target, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The answer to LATE fails until `undo`."""
    generate = eagle3.answers.huggingface.generate

    def failing(model: Any, prompts: list[list[int]], **settings: Any) -> Any:
        if any("to_dict" in text for text in target.tokenizer.batch_decode(prompts)):
            raise RuntimeError("the device is lost")
        return generate(model, prompts, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(eagle3.answers.huggingface, "generate", failing)
        yield patch


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("dir/features/shard-*")}


@pytest.mark.parametrize("stages", ["stages=[prompts,answers,features]", "stages=[features]"])
def test_an_answer_that_succeeds_later_is_a_new_sample_next_to_an_untouched_shard(run, tmp_path, late_fails, stages):
    run()
    before = shards(tmp_path)
    assert open_store(tmp_path / "dir/features").manifest.samples == 3
    late_fails.undo()
    if stages == "stages=[features]":
        run("stages=[answers]")
    run(stages)
    store = open_store(tmp_path / "dir/features")
    store.verify()
    assert before.keys() >= {shard.name for shard in store.manifest.shards[:-1]}  # a training of before is continued
    assert store.manifest.samples == len({ref.entry.id for ref in store.samples}) == 4
    assert before.items() < shards(tmp_path).items()


def test_a_retried_answer_after_a_kill_in_features_costs_no_finished_shard(run, tmp_path, late_fails, monkeypatch):
    def killed(store: StoreWriter, *arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(StoreWriter, "finish", killed)
        run("features.shard_mb=0.01")
    before = shards(tmp_path)
    assert len(before) == 6 and not (tmp_path / "dir/features/manifest.json").exists()  # three shards
    late_fails.undo()
    (tmp_path / "moved").symlink_to(ASSETS / "tiny")
    run("features.shard_mb=0.01", f"target.path={tmp_path}/moved")  # the same target in another folder
    assert open_store(tmp_path / "dir/features").manifest.samples == 4 and before.items() < shards(tmp_path).items()


def test_a_copy_under_another_name_is_left_alone_and_a_shard_without_an_index_is_deleted_and_named(
    run, tmp_path, caplog
):
    run()
    folder = tmp_path / "dir/features"
    shard, copy = shard_path(folder, 0), folder / "shard-000000 (1).index"
    shutil.copy(folder / "shard-000000.index", copy)
    shutil.copy(shard, folder / "shard-000000-copied00.tar")
    before = shards(tmp_path)
    caplog.set_level("INFO", "eagle3.features.store_writer")
    run("stages=[features]")
    assert set(before) - set(shards(tmp_path)) == {"shard-000000-copied00.tar"} and copy.exists()
    assert "deleted shards without an index, of a killed run: 1, e.g. shard-000000-copied00.tar" in caplog.text


@pytest.mark.parametrize(
    ("change", "named"),
    [("sampling.temperature=0.1", "sampling.temperature=0.7 then, 0.1 now"), ("prompts", "prompts_sha256=")],
)
def test_features_of_other_sampling_or_prompts_are_another_store(run, tmp_path, change, named, error_line):
    """Also where the answers were made again: that alone makes other answers, of the same store."""
    run()
    for name in ("answers", "prompts"):
        (tmp_path / "dir" / name).rename(tmp_path / name)
    if change == "prompts":
        write_chats(tmp_path, QUESTIONS)
    before = shards(tmp_path)
    line = error_line(run, *([] if change == "prompts" else [change]))
    assert "made with settings other than this run's" in line and named in line and before == shards(tmp_path)


def test_a_refusal_that_cannot_succeed_is_not_asked_again_and_loads_no_target(
    run, tmp_path, monkeypatch, caplog, capsys
):
    write_chats(tmp_path, [*QUESTIONS, "much too long " * 40])
    run("sampling.max_prompt_tokens=60")
    [error] = read_jsonl(tmp_path / "dir/answers/errors.jsonl")
    assert "sampling.max_prompt_tokens" in error["reason"] and not error["retry"]
    manifest = (tmp_path / "dir/answers/manifest.json").read_bytes()

    def loaded(**settings: Any) -> Target:
        raise AssertionError("the target is loaded")

    with monkeypatch.context() as patch:
        patch.setattr("eagle3.answers.build.loaded_target", loaded)
        caplog.set_level("INFO", "eagle3.answers.build")
        run("sampling.max_prompt_tokens=60")
        assert "answers.jsonl is up to date" in caplog.text
        assert (tmp_path / "dir/answers/manifest.json").read_bytes() == manifest
        run("sampling.max_prompt_tokens=61")  # which does not help
        with pytest.raises(SystemExit):
            run("sampling.max_prompt_tokens=600")
        assert "AssertionError: the target is loaded" in capsys.readouterr().err
    run("sampling.max_prompt_tokens=600")
    assert open_store(tmp_path / "dir/features").manifest.samples == 4


def test_a_run_that_cannot_start_to_answer_leaves_the_answers_complete_for_features(
    run, tmp_path, late_fails, monkeypatch
):
    run()

    def loaded(**settings: Any) -> Target:
        raise InputError("no GPU is free")

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr("eagle3.answers.build.loaded_target", loaded)
        run("stages=[answers]")
    run("stages=[features]")


def test_the_log_names_the_number_of_cut_answers(run, caplog):
    caplog.set_level("INFO")
    run("sampling.max_new_tokens=2", "stages=[prompts,answers]")
    assert "answers: 4 rows, 8 answer tokens; 4 answers cut at sampling.max_new_tokens=2" in caplog.text
