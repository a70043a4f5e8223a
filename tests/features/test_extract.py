"""The features stage on the bundled target: what is stored is what the target computes; resume; refusals."""

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from extraction import conversation, extract_by, write_answers
from object_stores import new_folder, running_store
from stores import assert_same_samples, flip_a_bit, open_store
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3.answers.chat import ids_in_text
from eagle3.answers.store import read_answers
from eagle3.errors import InputError
from eagle3.features.build import STORED
from eagle3.features.concat import open_source
from eagle3.features.conversation import Conversation
from eagle3.features.huggingface import HuggingFaceExtractor
from eagle3.features.index import ShardIndex, index_bytes, index_name
from eagle3.features.manifest import Manifest, read_index, read_manifest
from eagle3.features.sample import Sample, scaled
from eagle3.features.shards import ShardWriter
from eagle3.features.store_writer import StoreWriter
from eagle3.features.turns import teacher_positions
from eagle3.storage.folder import LocalFolder, open_folder
from eagle3.storage.prefault import sha256_bytes
from eagle3.storage.records import sealed_bytes
from eagle3.target.capture import Capture, Features
from eagle3.target.model import Target

Run = Callable[..., Manifest]
CAPTURE = [2, 4, 5]  # [2, N//2, N-3] of 8 layers


@pytest.fixture
def answered(tmp_path: Path, target: Target) -> Path:
    rows = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(24)]
    write_answers(tmp_path, target.identity, rows)
    return tmp_path


@pytest.fixture
def run(target: Target) -> Run:
    def extract_with(out_dir: Path, **changes: Any) -> Manifest:
        settings = {
            "path": None, "capture_layers": None, "dtype": "float32", "max_length": 64, "too_long": "truncate",
            "reasoning": None, "teachers": "answers", "batch_tokens": 128, "shard_mb": 512, "target_dtype": "float32",
        }  # fmt: skip
        settings |= changes
        layers = settings.pop("capture_layers") or CAPTURE
        parts = {"dtype": STORED[settings["dtype"]], "batch_tokens": settings.pop("batch_tokens")}
        extractor = HuggingFaceExtractor(target=target, layers=layers, teachers=settings["teachers"], **parts)
        return extract_by(extractor, target, out_dir, captured_by="huggingface", capture_layers=layers, **settings)

    return extract_with


def test_stored_features_are_the_targets_own(answered, run, target):
    manifest = run(answered)
    assert manifest.made_from.capture_layers == CAPTURE
    store = open_store(answered / "features")
    assert [ref.entry.id for ref in store.samples] == [f"p{number}#0" for number in range(24)]
    for ref in store.samples:
        sample = store.read(ref)
        with torch.no_grad():
            output = target.model(input_ids=sample.input_ids[None].long(), output_hidden_states=True)
        aux = torch.cat([output.hidden_states[layer][0] for layer in CAPTURE], dim=-1)
        torch.testing.assert_close(sample.aux_hidden_states, aux, rtol=1e-4, atol=1e-4)
        rows = teacher_positions(sample.turns)
        torch.testing.assert_close(sample.last_hidden_state, output.hidden_states[-1][0][rows], rtol=1e-4, atol=1e-4)
        logits = output.logits[0][rows]
        assert torch.equal(sample.teacher_argmax.long(), logits.argmax(-1))
    embedding, lm_head = store.target_weights()
    assert torch.equal(embedding, lm_head) and torch.equal(embedding, target.embedding)
    assert (answered / "features" / "target.safetensors").stat().st_size < 1.2 * embedding.nbytes  # tied: stored once


def test_values_that_the_stored_dtype_cannot_hold_are_refused_by_sample(answered, run, monkeypatch):
    capture = Capture.__call__

    def large(*args: Any) -> list[Features]:
        return [Features(aux * 1e6, last) for aux, last in capture(*args)]

    monkeypatch.setattr(Capture, "__call__", large)
    with pytest.raises(InputError, match=r"features\.dtype=float16: hidden states of sample p\d+#0 are not finite"):
        run(answered, dtype="float16")
    run(answered, dtype="bfloat16")


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_killed_run_resumes_at_the_shard_and_gives_the_same_store(answered, run, monkeypatch, where):
    expected, whole = run(answered, shard_mb=0.2), open_store(answered / "features")
    assert len(expected.shards) > 3
    add, added = ShardWriter.add, []

    def add_until_killed(writer: ShardWriter, sample: Any, **facts: Any) -> None:
        if len(added) == 13:
            raise KeyboardInterrupt
        added.append(sample.sample.id)
        add(writer, sample, **facts)

    with running_store() if where == "bucket" else nullcontext():
        path = new_folder() if where == "bucket" else str(answered / "killed")
        folder = open_folder(path, setting="features.path")
        monkeypatch.setattr(ShardWriter, "add", add_until_killed)
        with pytest.raises(KeyboardInterrupt):
            run(answered, shard_mb=0.2, path=path)
        monkeypatch.undo()
        names = folder.names("*")
        assert "manifest.json" not in names and not list(answered.glob("killed/.*tmp"))
        finished = {name: folder.version(name) for name in names if name.startswith("shard")}
        assert finished
        resumed = run(answered, shard_mb=0.2, path=path)
        assert {name: folder.version(name) for name in finished} == finished
        store = open_source(path)
        store.verify()
        assert [ref.entry.id for ref in store.samples] == [ref.entry.id for ref in whole.samples]
        assert_same_samples(whole, store, tolerance=1e-4)
    assert resumed.answer_counts == expected.answer_counts


def test_a_finished_store_has_no_leftovers_of_kills(answered, run):
    folder = answered / "features"
    folder.mkdir()
    LocalFolder(folder).create("shard-000000-12345678.tar").file.close()  # killed while it was written
    (folder / "shard-000001-12345678.tar").write_bytes(b"before its index")
    assert len(list(folder.iterdir())) == 2
    made = run(answered)
    names = {path.name for path in folder.iterdir()}
    shards = {name for shard in made.shards for name in (shard.name, index_name(shard.name))}
    assert names == {"manifest.json", "target.safetensors", *shards}


def test_damaged_shards_are_named_and_only_what_was_deleted_is_made_again(answered, run):
    first, folder = run(answered, shard_mb=0.2), answered / "features"
    ids = sorted(ref.entry.id for ref in open_store(folder).samples)
    damaged = [shard.name for shard in first.shards[1:3]]
    indices = [name.replace(name[12:], ".index") for name in damaged]
    kept = {path.name: path.read_bytes() for path in folder.glob("shard-*") if path.name not in (*damaged, *indices)}
    for name in damaged:
        flip_a_bit(folder / name, 1000)
    with pytest.raises(InputError) as refused:
        open_store(folder).verify()
    for name, index in zip(damaged, indices, strict=True):
        assert f"{folder}/{name} has sha256" in str(refused.value)
        assert f"delete it and {folder}/{index} and run: python precompute.py" in str(refused.value)
        (folder / name).unlink()
    (folder / indices[0]).unlink()  # the other shard is as if it had got lost
    run(answered, shard_mb=0.2)
    open_store(folder).verify()
    assert sorted(ref.entry.id for ref in open_store(folder).samples) == ids
    assert {name: (folder / name).read_bytes() for name in kept} == kept


def test_features_in_fp8_are_those_of_float32_packed(answered, run):
    run(answered)
    run(answered, dtype="fp8", path=str(answered / "fp8"))
    plain, packed, cpu = open_store(answered / "features"), open_store(answered / "fp8"), torch.device("cpu")
    for one, other in zip(plain.samples, packed.samples, strict=True):
        rows, fp8 = plain.read(one), packed.read(other)
        assert torch.equal(fp8.aux_hidden_states.to(cpu), scaled(rows.aux_hidden_states, 3).to(cpu))
        assert torch.equal(fp8.last_hidden_state.to(cpu), scaled(rows.last_hidden_state, 1).to(cpu))
    assert torch.equal(packed.target_weights()[0], plain.target_weights()[0].bfloat16())


def test_a_folder_of_another_stage_is_named_and_nothing_of_it_is_to_be_deleted(answered, run):
    """Its manifest is of answers, which took hours; the store may be next to it, or in the folder that was meant."""
    answers, store = answered / "answers", answered / "features"
    before = (answers / "manifest.json").read_bytes()
    with pytest.raises(InputError, match=r"answers/manifest\.json is of another stage, .* DIR/features"):
        open_store(answers)
    with pytest.raises(InputError, match="is of another stage"):
        run(answered, path=str(answers))
    assert (answers / "manifest.json").read_bytes() == before
    run(answered)
    for other in (answered, answered / "prompts"):
        with pytest.raises(InputError, match=f"{other} is no feature store, {store} is one; give that"):
            open_store(other)
    with pytest.raises(InputError, match=r"features/manifest\.json is of another stage, .* answers, DIR/answers"):
        read_answers(store)


def test_a_manifest_that_another_process_writes_meanwhile_is_kept(answered, run, monkeypatch):
    manifest, take = answered / "features" / "manifest.json", StoreWriter.take
    monkeypatch.setattr(StoreWriter, "take", lambda *made: (take(*made), manifest.write_text("another's")))
    with pytest.raises(InputError, match=r"manifest\.json has been written by another process"):
        run(answered)
    assert manifest.read_text() == "another's"


@pytest.mark.parametrize(("too_long", "samples", "too_short"), [("truncate", 3, 2), ("drop", 1, 1)])
def test_samples_over_the_limit_are_truncated_or_dropped_and_all_that_are_left_out_counted(
    tmp_path, run, target, too_long, samples, too_short
):
    sizes = [(4, 6), (4, 30), (10, 6), (20, 5), (4, 1)]  # of prompt and answer; one answer begins past the limit
    write_answers(tmp_path, target.identity, [conversation(number, *size) for number, size in enumerate(sizes)])
    manifest = run(tmp_path, max_length=12, too_long=too_long)
    assert manifest.samples == samples
    assert manifest.left_out == {
        f"longer than features.max_length=12: {too_long}": 3, "no answer of two tokens or more": too_short
    }  # fmt: skip
    assert max(ref.entry.tokens for ref in open_store(tmp_path / "features").samples) <= 12
    write_answers(tmp_path / "all", target.identity, [conversation(0, 4, 1)])
    with pytest.raises(InputError, match=r"two tokens within features\.max_length=64.*or sampling\.max_new_tokens"):
        run(tmp_path / "all")


def test_the_index_says_where_a_prompt_came_from_and_whether_an_answer_was_cut(tmp_path, target, run):
    rows = [conversation(number, 4, 6 + 3 * number) for number in range(4)]
    for row, source, ends in zip(
        rows, ["code", "maths", "code", "code"], ["stop", "stop", "length", "stop"], strict=True
    ):
        row |= {"source": source, "finish_reasons": [ends]}
    write_answers(tmp_path, target.identity, rows)
    run(tmp_path, max_length=16)
    entries = {ref.entry.id: ref.entry for ref in open_store(tmp_path / "features").samples}
    assert {name: entry.source for name, entry in entries.items()} == {
        "p0#0": "code", "p1#0": "maths", "p2#0": "code", "p3#0": "code"
    }  # fmt: skip
    assert {name for name, entry in entries.items() if entry.whole} == {"p0#0", "p1#0"}  # the last is over 16 tokens


def test_missing_or_unfinished_answers_and_another_targets_are_refused(answered, run, target):
    with pytest.raises(InputError, match=r"manifest\.json does not exist; make it with: python precompute\.py"):
        run(answered / "none")
    rows = [conversation(0, 4, 5)]
    write_answers(answered, replace(target.identity, weights_hash="other"), rows)
    with pytest.raises(InputError, match="differ in weights"):
        run(answered)
    write_answers(answered, target.identity, rows, complete=False)
    with pytest.raises(InputError, match=r"answers is not complete; finish it with: python precompute\.py"):
        run(answered)


def test_features_made_with_other_or_bad_settings_are_refused(answered, run):
    with pytest.raises(InputError, match=r"features\.capture_layers"):
        run(answered, capture_layers=[5, 4, 2])
    run(answered)
    with pytest.raises(InputError, match=r"capture_layers=\[2, 4, 5\] then, \[1, 2, 3\] now"):
        run(answered, capture_layers=[1, 2, 3])
    with pytest.raises(InputError, match=r"made with settings other .*\(target_dtype=float32 then, bfloat16 now\)"):
        run(answered, target_dtype="bfloat16")
    (answered / "features" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"\(another target, target\.dtype, template"):
        run(answered, target_dtype="bfloat16")


@pytest.mark.parametrize("change", ["token", "source", "row"])
def test_an_answer_that_is_another_than_the_one_in_a_finished_shard_is_named(answered, run, target, change):
    run(answered, shard_mb=0.2)
    rows = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(24)]
    before = {path.name: path.read_bytes() for path in (answered / "features").iterdir()}
    if change == "token":
        rows[7]["input_ids"][-1] ^= 1
    elif change == "source":
        rows[7]["source"] = "another"
    else:
        del rows[7]
    write_answers(answered, target.identity, rows)
    named = r"1 of 24 samples were made of other answers than .*answers\.jsonl has now, e\.g\. p7#0; bring .* or delete"
    with pytest.raises(InputError, match=named) as refused:
        run(answered, shard_mb=0.2)
    assert {path.name: path.read_bytes() for path in (answered / "features").iterdir()} == before
    [shard] = re.findall(r"shard-\d+-\w+\.tar", str(refused.value))
    for name in (shard, index_name(shard)):
        (answered / "features" / name).unlink()
    assert run(answered, shard_mb=0.2).samples == len(rows)


def test_rows_are_compared_with_their_shards_whatever_is_left_out_of_them(answered, run, target):
    settings = {"max_length": 12, "too_long": "truncate"}
    first = run(answered, **settings)
    assert first.left_out
    assert run(answered, **settings) == first
    rows = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(24)]
    write_answers(answered, target.identity, [*rows[::-1], conversation(24, 4, 6)])  # in another order, and one more
    assert run(answered, **settings).samples == first.samples + 1


def test_a_store_of_an_earlier_version_is_read_and_not_continued(answered, run):
    run(answered)
    folder = answered / "features"
    samples = [open_store(folder).read(ref) for ref in open_store(folder).samples]
    index = read_index(LocalFolder(folder), "shard-000000.index")
    columns = {name: column for name, column in index.columns.items() if name != "answer_sha256"}
    old = index_bytes(ShardIndex(replace(index.facts, format_version=7), columns))
    (folder / "shard-000000.index").write_bytes(old)
    manifest = read_manifest(LocalFolder(folder))
    shards = [replace(manifest.shards[0], index_sha256=sha256_bytes(memoryview(old)))]
    (folder / "manifest.json").write_bytes(sealed_bytes(replace(manifest, format_version=7, shards=shards)))
    store = open_store(folder)
    store.verify()
    for ref, sample in zip(store.samples, samples, strict=True):
        assert torch.equal(store.read(ref).aux_hidden_states, sample.aux_hidden_states)
    with pytest.raises(InputError, match=r"format_version=7.*can be trained on, but not continued: choose another out"):
        run(answered)


class Refusing(HuggingFaceExtractor):
    """An engine that refuses some conversations, and stops after some samples."""

    stops_after = 99

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        samples = 0
        for each in conversations:
            if samples == self.stops_after:
                raise InputError("killed")
            if int(each.id[1:-2]) % 5 == 0:
                self.left_out["refused by the engine: too long"] += 1
            else:
                samples += 1
                yield from super().__call__(iter([each]))


def test_conversations_that_the_engine_refused_are_counted_after_a_resume_too(answered, target, monkeypatch):
    def extract() -> Manifest:
        extractor = Refusing(target=target, layers=CAPTURE, dtype=torch.float32, teachers="answers", batch_tokens=128)
        settings: dict[str, Any] = {"max_length": 64, "too_long": "truncate", "reasoning": None, "teachers": "answers"}
        settings |= {"captured_by": "sglang", "target_dtype": "float32", "dtype": "float32", "capture_layers": CAPTURE}
        return extract_by(extractor, target, answered, path=None, shard_mb=0.05, **settings)

    with monkeypatch.context() as patch, pytest.raises(InputError, match="killed"):
        patch.setattr(Refusing, "stops_after", 9)
        extract()
    assert [*(answered / "features").glob("shard-*.index")]
    for _ in range(2):
        manifest = extract()
        assert (manifest.samples, manifest.left_out) == (19, {"refused by the engine: too long": 5})


def test_reasoning_markers_are_the_ids_that_stand_inside_an_answer():
    vocabulary = {token: index for index, token in enumerate(["<unk>", *"▁<>/thinkx\n"])}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert tokenizer.convert_ids_to_tokens(ids_in_text(tokenizer, "<think>")) == [*"<think>"]
    tokenizer.add_tokens(["<think>"])
    assert ids_in_text(tokenizer, "<think>") == [tokenizer.convert_tokens_to_ids("<think>")]
