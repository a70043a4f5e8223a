"""Training with features that are made meanwhile is the training on a store of them."""

import re
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from extraction import conversation, write_answers
from scripts import call_script, finished
from serving_fixtures import environment, free_port, sglang_site
from stores import ASSETS, open_store
from training_runs import LIGHTNING_WARNS, Run, composed, finished_ranks, metrics

from eagle3.commands import live as live_command
from eagle3.commands.live import placed, share_of_memory
from eagle3.compose import compose_run
from eagle3.data.plan import PlannedPack
from eagle3.engine import capture
from eagle3.errors import InputError
from eagle3.features.conversation import Conversation, read_conversations
from eagle3.features.huggingface import HuggingFaceExtractor
from eagle3.features.live import LiveFeatures
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef
from eagle3.features.task import Extractor
from eagle3.serving.check.prompts import validation_prompts
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget

pytestmark = LIGHTNING_WARNS
ALONE = "features.batch_tokens=1"  # each conversation alone in its forward pass: features do not depend on the others
LIVE = ("data=live", "features=huggingface", "target.device=cpu", ALONE)
TWICE = ("trainer.max_epochs=2", "trainer.val_check_interval=5")
ROWS = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """Answers, and a store of their features. Tests only read them."""
    return answered(tmp_path_factory.mktemp("answers"), target, ROWS)


def answered(folder: Path, target: Target, rows: list[dict[str, Any]]) -> Path:
    write_answers(folder, target.identity, rows)
    options = (f"target.path={ASSETS}/tiny", f"out_dir={folder}", "target.device=cpu", "features=huggingface", ALONE)
    call_script("precompute", *options, "stages=[features]", "progress=false", output_dir=folder / "logs")
    return folder


@pytest.fixture(scope="module")
def stored_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("stored"), folder / "features", *TWICE).fit()


def curve(run: Run) -> list[dict[str, str]]:
    timed = ("per_s", "share")
    return [{key: value for key, value in row.items() if not key.endswith(timed)} for row in metrics(run)]


def assert_same(run: Run, other: Run) -> None:
    assert curve(run) == curve(other)
    for name, weight in other.weights.items():
        assert torch.equal(weight, run.weights[name]), name


def test_it_is_the_training_on_a_store_of_the_same_features(folder, stored_run, tmp_path):
    live = Run(tmp_path, folder / "answers", *LIVE, *TWICE)
    asked = counted(live.data.source)
    live.fit()
    assert live.recorder.batches == stored_run.recorder.batches and len(live.recorder.batches) > 20
    assert_same(live, stored_run)
    assert torch.equal(live.data.source.answer_counts, stored_run.data.source.answer_counts)
    assert live.data.source.target_config == stored_run.data.source.target_config
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.tar"), *tmp_path.rglob("*.index")]
    assert {asked.count(ref.entry.id) for ref in live.data.val_samples} == {1}  # of several validations
    assert {asked.count(ref.entry.id) for ref in live.data.train_samples} == {2}


def counted(source: Any) -> list[str]:
    asked, ask = [], source.extractor.ask

    def counting(conversation: Conversation) -> Any:
        asked.append(conversation.id)
        return ask(conversation)

    source.extractor.ask = counting
    return asked


def test_several_answers_to_each_prompt_are_trained_as_from_their_stores(folder, target, tmp_path):
    """So each epoch can have answers of its own: N answers to each prompt, and one epoch."""
    other = answered(tmp_path / "other", target, [conversation(number, 3 + number % 5, 9) for number in range(40)])
    paths = {kind: f"[{folder}/{kind},{other}/{kind}]" for kind in ("answers", "features")}
    live = Run(tmp_path / "live", paths["answers"], *LIVE, "trainer.max_epochs=1").fit()
    stored = Run(tmp_path / "stored", paths["features"], "trainer.max_epochs=1").fit()
    assert live.recorder.batches == stored.recorder.batches
    assert_same(live, stored)
    assert torch.equal(live.data.source.answer_counts, stored.data.source.answer_counts)
    whole: Any = {"turns": "all", "limit": None, "max_length": 99}
    of_live, of_stores = (validation_prompts(run.module.origin, **whole).prompts for run in (live, stored))
    assert of_live == of_stores


def test_masks_weights_and_rules_choose_the_same_packs(folder, tmp_path):
    options = ["loss_mask=last_turn", "data.weights=[1.5]", "data.max_tokens=30", "trainer.max_epochs=1"]
    stored = Run(tmp_path / "stored", folder / "features", *options).fit()
    live = Run(tmp_path / "live", folder / "answers", *LIVE, *options).fit()
    assert live.recorder.batches == stored.recorder.batches
    assert_same(live, stored)


def test_a_stopped_training_continues_with_the_samples_that_it_has_not_trained(folder, stored_run, tmp_path):
    first = Run(tmp_path, folder / "answers", *LIVE, *TWICE, signal_after=18).stopped()  # in the second epoch
    rest = Run(tmp_path, folder / "answers", *LIVE, *TWICE, first.resume).fit()
    assert first.recorder.batches + rest.recorder.batches == stored_run.recorder.batches
    assert_same(rest, stored_run)


def test_the_held_out_prompts_of_a_head_are_read_from_the_answers(folder, stored_run):
    origin = stored_run.module.origin
    whole: Any = {"turns": "all", "limit": None, "max_length": 99}
    of_store = validation_prompts(origin, **whole)
    of_answers = validation_prompts(replace(origin, path=str(folder / "answers")), **whole)
    assert of_answers.prompts == of_store.prompts and len(of_store.prompts) > 5
    assert of_answers.conversations == of_store.conversations
    assert of_answers.from_validation


# --- the source ------------------------------------------------------------------------------------------------------


class ByHand(Extractor):
    """Features from a store, which are there as soon as they are asked for, unless `refused` has the sample's id."""

    def __init__(self, store: Path) -> None:
        self.store = open_store(store)
        self.refs = {ref.entry.id: ref for ref in self.store.samples}
        self.asked: list[str] = []
        self.refused: set[str] = set()

    def ask(self, conversation: Conversation) -> "Future[Sample | str]":
        self.asked.append(conversation.id)
        done: Future[Sample | str] = Future()
        sample = self.store.read(self.refs[conversation.id])
        done.set_result("it is too long" if conversation.id in self.refused else sample)
        return done

    def logit_transform(self) -> Any:
        return self.store.target_config.logit_transform


@pytest.fixture
def by_hand(folder: Path) -> ByHand:
    return ByHand(folder / "features")


@pytest.fixture
def source(folder: Path, stored: StoredTarget, by_hand: ByHand) -> LiveFeatures:
    return live_source(folder / "answers", stored, by_hand)


def live_source(path: Path, target: StoredTarget, extractor: Extractor, **changes: float) -> LiveFeatures:
    from eagle3.features.build import feature_settings

    run = composed(path, path, *LIVE)
    settings = feature_settings(live_command.of(replace(run, target=replace(run.target, path=target.path))), target)
    sizes = {"ahead_gb": 1.0, "val_gb": 1.0} | changes
    source = LiveFeatures(paths=[path], target=target, settings=settings, **sizes)
    source.extractor = extractor
    return source


def size(source: LiveFeatures, refs: list[SampleRef]) -> int:
    return sum(source._size(ref) for ref in refs)


def test_samples_are_asked_for_in_their_order_until_the_limit_of_bytes(folder, stored, by_hand):
    refs = [*live_source(folder / "answers", stored, by_hand).samples]
    limit = size(live_source(folder / "answers", stored, by_hand), refs[:10])
    source = live_source(folder / "answers", stored, by_hand, ahead_gb=limit / 1e9)
    with source.ahead(iter(refs), keep=False):
        for number, ref in enumerate(refs):
            ahead = refs[number : len(by_hand.asked)]
            assert by_hand.asked == [each.entry.id for each in refs[: number + len(ahead)]]
            assert size(source, ahead[:-1]) < limit and (len(by_hand.asked) == 40 or size(source, ahead) >= limit)
            assert torch.equal(source.read(ref).input_ids, by_hand.store.read(by_hand.refs[ref.entry.id]).input_ids)


def test_samples_that_are_read_before_their_turn_are_asked_for_once(folder, stored, by_hand):
    """Some larger than the limit, in the order of two readers, and one of them twice."""
    source = live_source(folder / "answers", stored, by_hand, ahead_gb=1e-9)
    refs = [*source.samples][:8]
    with source.ahead(iter([*refs, refs[2]]), keep=False):
        for number in (0, 4, 1, 5, 2, 3, 6, 7, 2):
            assert source.read(refs[number]).id == refs[number].entry.id
    assert Counter(by_hand.asked) == Counter([each.entry.id for each in [*refs, refs[2]]])


def test_what_is_not_read_is_forgotten(source, by_hand):
    refs = [*source.samples]
    with source.ahead(iter(refs), keep=False):
        source.read(refs[0])
    asked = len(by_hand.asked)
    assert source.read(refs[3]).id == by_hand.asked[asked] == refs[3].entry.id


def test_samples_to_keep_are_asked_for_once_as_far_as_they_fit(folder, stored, by_hand):
    refs = [*live_source(folder / "answers", stored, by_hand).samples][:8]
    room = size(live_source(folder / "answers", stored, by_hand), refs[:5])
    source = live_source(folder / "answers", stored, by_hand, val_gb=room / 1e9)
    for _ in range(3):
        with source.ahead(iter(refs), keep=True):
            assert [source.read(ref).id for ref in refs] == [ref.entry.id for ref in refs]
    assert len(source.kept) == 5 and len(by_hand.asked) == 8 + 3 + 3


def test_a_closed_source_asks_for_nothing(source, by_hand):
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        source.read(source.samples[0])
    assert by_hand.asked == []


def test_an_extractor_that_ends_leaves_no_sample_to_wait_for(folder, target):
    settings = {"layers": [2, 4, 5], "dtype": torch.float32, "teachers": "answers", "batch_tokens": 1}
    with HuggingFaceExtractor(target=target, **settings) as extractor:
        conversations = read_conversations(folder / "answers", max_length=99, too_long="drop", left_out=Counter())
        asked = [extractor.ask(each) for each in conversations]
    assert len(asked) == 40 and all(each.done() for each in asked)
    assert any(each.cancelled() for each in asked)


def test_a_sample_that_the_engine_refuses_is_left_out_of_its_pack_and_counted(folder, tmp_path, by_hand, caplog):
    run = Run(tmp_path, folder / "answers", *LIVE, "trainer.max_epochs=1")
    shortest = min(run.data.train_samples, key=lambda ref: ref.entry.tokens)  # never alone in its pack
    run.data.source.extractor = by_hand
    by_hand.refused = {shortest.entry.id}
    run.fit()
    trained = [each for _, ids, _ in run.recorder.batches for each in ids]
    assert {ref.entry.id for ref in run.data.train_samples} - {*trained} == by_hand.refused
    said = rf"the engine refuses sample {shortest.entry.id} of \d+ tokens \(it is too long\); leave such samples out"
    assert re.search(rf"{said}.*; samples left out so far", caplog.text)
    run.data.source.closed = False
    with pytest.raises(InputError, match=said):
        run.data._read_all(PlannedPack((shortest,), 1.0, 1.0))


# --- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sglang(tmp_path: Path) -> list[str]:
    """Options for two stand-ins of SGLang."""
    (tmp_path / "memory").mkdir()
    variables = ",".join(f"{name}:'{value}'" for name, value in environment(sglang_site(tmp_path), "").items())
    return [
        "data=live", "features=sglang", "features.batch_tokens=16", "launch.check=false",
        f"launch.env={{{variables}}}", f"launch.port={free_port()}", f"features.engine.memory={tmp_path}/memory",
        "features.engine.memory_gb=0.5", "features.engine.servers=2", "target.device=cpu",
    ]  # fmt: skip


class Kill(lightning.Callback):
    """Kills a server after the third batch."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.source.extractor.engines.servers[0].process.process.kill()


def test_servers_make_the_features_of_the_same_packs_also_when_one_of_them_dies(
    folder, stored_run, tmp_path, sglang, caplog,
    monkeypatch,
):  # fmt: skip
    monkeypatch.setattr(capture, "ROWS_S", 1.0)
    live = Run(tmp_path / "live", folder / "answers", *sglang, *TWICE, "data.source.ahead_gb=0.00005")
    live.trainer.callbacks.append(Kill(live.data.source))  # type: ignore[attr-defined]
    live.fit()
    assert live.recorder.batches == stored_run.recorder.batches
    losses, of_store = ([float(row["train/loss"] or 0) for row in metrics(run)] for run in (live, stored_run))
    assert losses == pytest.approx(of_store, rel=2e-3) and max(losses) > 0
    assert "server 0 has ended" in caplog.text and " failures (" in caplog.text
    assert live.data.source.made_from.captured_by == "sglang"
    assert [*(tmp_path / "memory").iterdir()] == [] and not (tmp_path / "live/servers.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_share_the_servers_and_train_what_they_would_from_a_store(folder, tmp_path, sglang):
    """Two processes that Lightning starts, as `python train.py trainer=ddp`, or that torchrun does."""
    settings = ["trainer=ddp", "trainer.max_epochs=1", "trainer.accelerator=cpu", "trainer.devices=2",
                "trainer.precision=32-true", "data.pack_tokens=48", "data.val_fraction=0.2", "ttt_steps=3",
                "callbacks.curves=null", "progress=false"]  # fmt: skip
    weights = {}
    runs = {"stored": ("features", ()), "huggingface": ("answers", LIVE), "sglang": ("answers", sglang)}
    for name, (data, options) in runs.items():
        command = (f"data.path={folder}/{data}", f"hydra.run.dir={tmp_path}/{name}", *settings, *options)
        if name == "sglang":
            finished("train", *command)
        else:
            finished_ranks(*command, ranks=2, log=tmp_path / f"{name}.log")
        weights[name] = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(weights["huggingface"], weights["stored"], rtol=0, atol=0)
    torch.testing.assert_close(weights["sglang"], weights["stored"], rtol=0.05, atol=0.005)
    assert [*(tmp_path / "memory").iterdir()] == []


# --- what is chosen and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "devices", "servers", "tp_size", "expected"),
    [
        (1, "auto", None, 1, (1, 1, 0)),  # they share it
        (8, -1, None, 1, (4, 4, 4)),
        (8, "auto", 5, 1, (3, 5, 3)),
        (8, "auto", None, 4, (4, 1, 4)),
        (8, 2, None, 2, (2, 3, 2)),
        (8, [1, 3], 4, 1, (2, 4, 4)),
        (8, "0,2", None, 1, (2, 5, 3)),
        (2, 2, None, 1, (2, 2, 0)),
    ],
)
def test_the_trainer_has_the_first_gpus_and_servers_the_others_or_they_share(gpus, devices, servers, tp_size, expected):
    assert placed(gpus, devices, servers, tp_size) == expected


@pytest.mark.parametrize(("gpus", "devices", "servers", "tp_size"), [(2, 1, 2, 1), (4, 3, None, 2)])
def test_more_servers_than_gpus_are_refused(gpus, devices, servers, tp_size):
    with pytest.raises(InputError, match=rf"trainer\.devices={devices} and .* do not fit the {gpus} GPUs"):
        placed(gpus, devices, servers, tp_size)


def test_servers_see_the_gpus_that_do_not_train(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("eagle3.engine.versions.count_gpus", lambda launch: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")
    on_all = ("trainer.accelerator=auto", "trainer.devices=auto")
    run = composed(folder, folder / "answers", "data=live", "features=sglang", "launch.env={A: 1}", *on_all)
    run = live_command.on_gpus(run)
    assert run.launch is not None and run.launch.env == {"A": 1, "CUDA_VISIBLE_DEVICES": "6,7"}
    assert run.features.engine.servers == run.trainer.keys["devices"] == 2  # type: ignore[union-attr]
    assert live_command.on_gpus(run) is run


def test_a_server_next_to_a_trainer_gets_the_memory_that_it_needs(folder, stored):
    capture_run = live_command.of(composed(folder, folder, *LIVE, "features.batch_tokens=16384"))
    facts = stored.facts
    cache = 4 * 16384 * 4 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    needed = stored.weights_bytes + cache
    assert share_of_memory(capture_run, stored, 4 * needed) == pytest.approx(0.25, abs=0.011)
    with pytest.raises(InputError, match=r"would need 80% of a GPU .* lower features\.batch_tokens"):
        share_of_memory(capture_run, stored, int(needed / 0.8))


def test_what_cannot_be_trained_is_told_in_one_line(folder, tmp_path, monkeypatch, caplog):
    run = composed(tmp_path, folder / "answers", *LIVE[:1], "features=sglang", "launch.python=/nowhere")
    for path, message in [
        (f"{folder}/features", r"data\.path=.*features has no answers\.jsonl"),
        ([f"{folder}/answers", f"{folder}/features"], r"data\.path=.*features has no answers\.jsonl"),
        (None, r"data\.path is not set; .* data\.path=DIR/answers"),
        (f"{folder}/answers", "launch.python=/nowhere cannot be run"),
    ]:
        with pytest.raises(InputError, match=message):
            live_command.with_choices(replace(run, data=run.data.with_keys(path=path)))
    monkeypatch.setattr(live_command, "given_keys", lambda: ["features.shard_mb", "data.path", "optim.lr"])
    assert run.features is not None
    live_command.with_choices(replace(run, features=replace(run.features, engine=None)))
    [line] = caplog.messages
    assert line.startswith("features.shard_mb has no effect with data=live")


def test_several_hosts_are_refused():
    with pytest.raises(InputError, match=r"trainer\.num_nodes=2 must be 1 with data=live"):
        compose_run("train", "run_dir=RUN", "data.path=DIR", "data=live", "trainer.num_nodes=2")


def test_answers_of_another_target_and_a_resume_on_other_answers_are_refused(tmp_path, target):
    write_answers(tmp_path, target.identity, ROWS)
    first = Run(tmp_path / "run", tmp_path / "answers", *LIVE, signal_after=4).stopped()
    write_answers(tmp_path, target.identity, [*ROWS, conversation(99, 5, 9)])
    with pytest.raises(InputError, match=r"the answers, the target or features\.\* are not those that ckpt_path="):
        Run(tmp_path / "run", tmp_path / "answers", *LIVE, first.resume)
    with pytest.raises(InputError, match=r"data\.path names the same answers twice, .* and .*; leave one"):
        Run(tmp_path / "run", f"[{tmp_path}/answers,{tmp_path}/answers]", *LIVE)
    write_answers(tmp_path, replace(target.identity, weights_hash="other"), ROWS)
    with pytest.raises(InputError, match=r"answers was made with target .*they differ in weights"):
        Run(tmp_path / "run", tmp_path / "answers", *LIVE)
