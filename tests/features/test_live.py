"""Training with features that are made meanwhile is the training on a store of them."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from extraction import conversation, write_answers
from scripts import call_script, run_script
from serving_fixtures import environment, free_port, sglang_site, wait_until
from stores import ASSETS, open_store
from training_runs import LIGHTNING_WARNS, Run, composed, metrics

from eagle3.commands import live as live_command
from eagle3.commands.live import Placement, placed, share_of_memory
from eagle3.compose import compose_run
from eagle3.engine import capture
from eagle3.errors import InputError, Interrupted
from eagle3.features.conversation import Conversation, read_conversations
from eagle3.features.huggingface import HuggingFaceExtractor
from eagle3.features.live import LiveFeatures
from eagle3.features.sample import Sample
from eagle3.features.samples import SampleRef
from eagle3.features.task import Extractor
from eagle3.serving.check.prompts import validation_prompts
from eagle3.settings.serving import Turns
from eagle3.target.model import Target
from eagle3.target.stored import StoredTarget

pytestmark = LIGHTNING_WARNS
ALONE = "features.batch_tokens=1"  # each conversation alone in its forward pass: features do not depend on the others
LIVE = ("data=live", "features=huggingface", "target.device=cpu", ALONE)
ONE = {"ranks": 1, "micro_batches": 1}
ROWS = [conversation(number, 3 + number % 5, 2 + number * 7 % 30) for number in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Target) -> Path:
    """Answers, and a store of their features. Tests only read them."""
    folder = tmp_path_factory.mktemp("answers")
    write_answers(folder, target.identity, ROWS)
    options = (f"target.path={ASSETS}/tiny", f"out_dir={folder}", "target.device=cpu", "features=huggingface", ALONE)
    call_script("precompute", *options, "stages=[features]", "progress=false", output_dir=folder / "logs")
    return folder


@pytest.fixture(scope="module")
def stored_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("stored"), folder / "features").fit()


@pytest.fixture(scope="module")
def stored_epoch(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("epoch"), folder / "features", "trainer.max_epochs=1").fit()


def curve(run: Run) -> list[dict[str, str]]:
    timed = ("per_s", "share")
    return [{key: value for key, value in row.items() if not key.endswith(timed)} for row in metrics(run)]


def assert_same(run: Run, other: Run) -> None:
    assert curve(run) == curve(other)
    for name, weight in other.weights.items():
        assert torch.equal(weight, run.weights[name]), name


def test_it_is_the_training_on_a_store_of_the_same_features(folder: Path, stored_run: Run, tmp_path: Path) -> None:
    live = Run(tmp_path, folder / "answers", *LIVE).fit()
    assert live.recorder.batches == stored_run.recorder.batches and len(live.recorder.batches) > 20
    assert_same(live, stored_run)
    assert torch.equal(live.data.source.answer_counts, stored_run.data.source.answer_counts)
    assert live.data.source.target_config == stored_run.data.source.target_config
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.tar"), *tmp_path.rglob("*.index")]


@pytest.mark.parametrize("options", [["loss_mask=last_turn"], ["data.weights=[1.5]"], ["data.max_tokens=30"]])
def test_masks_weights_and_rules_choose_the_same_packs(folder: Path, tmp_path: Path, options: list[str]) -> None:
    options += ["trainer.max_epochs=1"]
    stored = Run(tmp_path / "stored", folder / "features", *options).fit()
    live = Run(tmp_path / "live", folder / "answers", *LIVE, *options).fit()
    assert live.recorder.batches == stored.recorder.batches
    assert_same(live, stored)


@pytest.mark.parametrize("stop_after", [4, 15, 22])
def test_a_stopped_training_continues_with_the_samples_that_it_has_not_trained(
    folder: Path, stored_run: Run, tmp_path: Path, stop_after: int
) -> None:
    first = Run(tmp_path, folder / "answers", *LIVE, signal_after=stop_after)
    with pytest.raises(Interrupted):
        first.fit()
    rest = Run(tmp_path, folder / "answers", *LIVE, f"ckpt_path={tmp_path}/checkpoints/last.ckpt").fit()
    assert first.recorder.batches + rest.recorder.batches == stored_run.recorder.batches
    assert_same(rest, stored_run)


@pytest.mark.parametrize("turns", ["all", "first"])
def test_the_held_out_prompts_of_a_head_are_read_from_the_answers(turns: Turns, folder: Path, stored_run: Run) -> None:
    origin = stored_run.module.origin
    whole: Any = {"turns": turns, "limit": None, "max_length": 99}
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
    source = LiveFeatures(path=path, target=target, settings=settings, **sizes)
    source.extractor = extractor
    return source


def size(source: LiveFeatures, refs: list[SampleRef]) -> int:
    return sum(source._size(ref) for ref in refs)


def test_samples_are_asked_for_in_their_order_as_far_as_the_limit_of_bytes(
    folder: Path, stored: StoredTarget, by_hand: ByHand
) -> None:
    refs = [*live_source(folder / "answers", stored, by_hand).samples]
    limit = size_of_ten = size(live_source(folder / "answers", stored, by_hand), refs[:10])
    source = live_source(folder / "answers", stored, by_hand, ahead_gb=size_of_ten / 1e9)
    with source.ahead(iter(refs), keep=False):
        for number, ref in enumerate(refs):
            wait_until(lambda number=number: waits_or_ended(source, refs[number:], limit))
            ahead = by_hand.asked[number:]
            assert ahead == [each.entry.id for each in refs[number : number + len(ahead)]]
            assert size(source, refs[number : number + len(ahead)]) <= limit
            assert torch.equal(source.read(ref).input_ids, by_hand.store.read(by_hand.refs[ref.entry.id]).input_ids)
    assert len(by_hand.asked) == len(refs) == 40


def waits_or_ended(source: LiveFeatures, rest: list[SampleRef], limit: int) -> bool:
    """Say whether nothing more can be asked for before a sample is read."""
    [window], asked = source.windows, sum(map(len, source.asked.values()))
    return asked == len(rest) or window.held + size(source, [rest[asked]]) > limit


def test_a_sample_larger_than_the_limit_is_asked_for_alone(folder: Path, stored: StoredTarget, by_hand: ByHand) -> None:
    source = live_source(folder / "answers", stored, by_hand, ahead_gb=1e-9)
    with source.ahead(iter(source.samples), keep=False):
        assert [source.read(ref).id for ref in source.samples] == by_hand.asked


def test_what_is_not_read_is_forgotten(source: LiveFeatures, by_hand: ByHand) -> None:
    refs = [*source.samples]
    with source.ahead(iter(refs), keep=False):
        source.read(refs[0])
    assert source.asked == {} and source.windows == []
    asked = len(by_hand.asked)
    assert source.read(refs[3]).id == by_hand.asked[asked] == refs[3].entry.id


def test_samples_to_keep_are_asked_for_once_as_far_as_they_fit(
    folder: Path, stored: StoredTarget, by_hand: ByHand
) -> None:
    refs = [*live_source(folder / "answers", stored, by_hand).samples][:8]
    room = size(live_source(folder / "answers", stored, by_hand), refs[:5])
    source = live_source(folder / "answers", stored, by_hand, val_gb=room / 1e9)
    for _ in range(3):
        with source.ahead(iter(refs), keep=True):
            assert [source.read(ref).id for ref in refs] == [ref.entry.id for ref in refs]
    assert len(source.kept) == 5 and len(by_hand.asked) == 8 + 3 + 3


def test_a_closed_source_lets_nobody_wait(folder: Path, stored: StoredTarget, by_hand: ByHand) -> None:
    source = live_source(folder / "answers", stored, by_hand, ahead_gb=1e-9)
    refs = [*source.samples]
    with source.ahead(iter(refs), keep=False), ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(source.read, refs[5])  # which is asked for once those before it are read
        wait_until(lambda: by_hand.asked)
        source.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(timeout=60)
    assert by_hand.asked == [refs[0].entry.id]


def test_an_extractor_that_ends_leaves_no_sample_to_wait_for(folder: Path, target: Target, by_hand: ByHand) -> None:
    settings = {"layers": [2, 4, 5], "dtype": torch.float32, "teachers": "answers", "batch_tokens": 1}
    with HuggingFaceExtractor(target=target, **settings) as extractor:
        conversations = read_conversations(folder / "answers", max_length=99, too_long="drop", left_out=Counter())
        asked = [extractor.ask(each) for each in conversations]
    assert len(asked) == 40 and all(each.done() for each in asked)
    assert any(each.cancelled() for each in asked)


def test_validation_samples_are_made_once(folder: Path, tmp_path: Path) -> None:
    run = Run(tmp_path, folder / "answers", *LIVE, "trainer.val_check_interval=5")
    asked = counted(run.data.source)
    run.fit()
    validated = {ref.entry.id for ref in run.data.val_samples}
    assert len(validated) == 12 and len(metrics(run)) > 5
    assert [asked.count(each) for each in validated] == [1] * 12
    assert {asked.count(ref.entry.id) for ref in run.data.train_samples} == {3}


def counted(source: Any) -> list[str]:
    asked, ask = [], source.extractor.ask

    def counting(conversation: Conversation) -> Any:
        asked.append(conversation.id)
        return ask(conversation)

    source.extractor.ask = counting
    return asked


def short_sample(run: Run) -> str:
    """The id of a sample that is never alone in its pack."""
    return min(run.data.train_samples, key=lambda ref: ref.entry.tokens).entry.id


def test_a_sample_that_the_engine_refuses_is_left_out_of_its_pack_and_counted(
    folder: Path, tmp_path: Path, by_hand: ByHand, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, folder / "answers", *LIVE, "trainer.max_epochs=1")
    refused = short_sample(run)
    run.data.source.extractor = by_hand
    by_hand.refused = {refused}
    run.fit()
    trained = [each for _, ids, _ in run.recorder.batches for each in ids]
    assert {ref.entry.id for ref in run.data.train_samples} - {*trained} == by_hand.refused
    assert f"the engine refuses sample {refused} of" in caplog.text
    assert "(it is too long); leave such samples out, e.g. with data.max_tokens; samples left out so far" in caplog.text
    by_hand.refused = {*by_hand.refs}
    every = Run(tmp_path / "all", folder / "answers", *LIVE)
    every.data.source.extractor = by_hand
    with pytest.raises(InputError, match=r"the engine refuses sample p\d+#0 of \d+ tokens \(it is too long\)"):
        every.fit()


# --- SGLang ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def sglang(tmp_path: Path) -> list[str]:
    """Options for two stand-ins of SGLang."""
    (tmp_path / "memory").mkdir()
    variables = ",".join(f"{name}:'{value}'" for name, value in environment(sglang_site(tmp_path), "").items())
    return [
        "data=live", "features=sglang", "features.batch_tokens=16", "launch.check=false", "trainer.max_epochs=1",
        f"launch.env={{{variables}}}", f"launch.port={free_port()}", f"features.engine.memory={tmp_path}/memory",
        "features.engine.memory_gb=0.5", "features.engine.servers=2", "target.device=cpu",
    ]  # fmt: skip


def test_servers_make_the_features_of_the_same_packs(
    folder: Path, stored_epoch: Run, tmp_path: Path, sglang: list[str]
) -> None:
    live = Run(tmp_path / "live", folder / "answers", *sglang).fit()
    assert live.recorder.batches == stored_epoch.recorder.batches
    for row, of_store in zip(curve(live), curve(stored_epoch), strict=True):
        losses = {key: float(value) for key, value in row.items() if "loss" in key and value}
        assert losses == pytest.approx({key: float(of_store[key]) for key in losses}, rel=2e-3)
    assert live.data.source.made_from.captured_by == "sglang"
    assert [*(tmp_path / "memory").iterdir()] == [] and not (tmp_path / "live/servers.json").exists()


class Kill(lightning.Callback):
    """Kills a server after the third batch."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.source.extractor.engines.servers[0].process.process.kill()


def test_when_a_server_dies_the_others_are_asked_and_it_is_counted(
    folder: Path, stored_epoch: Run, tmp_path: Path, sglang: list[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(capture, "ROWS_S", 1.0)
    live = Run(tmp_path / "live", folder / "answers", *sglang, "data.source.ahead_gb=0.00005")
    live.trainer.callbacks.append(Kill(live.data.source))  # type: ignore[attr-defined]
    live.fit()
    assert live.recorder.batches == stored_epoch.recorder.batches
    assert "server 0 has ended" in caplog.text and " failures (" in caplog.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["huggingface", "sglang"])
def test_two_ranks_share_the_servers_and_train_what_they_would_from_a_store(
    folder: Path, tmp_path: Path, sglang: list[str], engine: str
) -> None:
    """Two processes that Lightning starts, as `python train.py trainer=ddp`."""
    own = sglang if engine == "sglang" else [*LIVE, "trainer.max_epochs=1"]
    settings = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "trainer.precision=32-true",
                "data.pack_tokens=48", "data.val_fraction=0.2", "ttt_steps=3", "progress=false"]  # fmt: skip
    weights = {}
    for name, options in {"stored": ["trainer.max_epochs=1"], "live": own}.items():
        data = folder / ("features" if name == "stored" else "answers")
        done = run_script("train", f"data.path={data}", f"hydra.run.dir={tmp_path}/{name}", *settings, *options)
        assert done.returncode == 0, done.stderr
        weights[name] = torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    tolerance = {"rtol": 0, "atol": 0} if engine == "huggingface" else {"rtol": 0.05, "atol": 0.005}
    torch.testing.assert_close(weights["live"], weights["stored"], **tolerance)
    assert [*(tmp_path / "memory").iterdir()] == []


# --- what is chosen and what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "devices", "servers", "tp_size", "expected"),
    [
        (1, "auto", None, 1, Placement(1, 1, 0)),  # they share it
        (2, "auto", None, 1, Placement(1, 1, 1)),
        (8, -1, None, 1, Placement(4, 4, 4)),
        (8, "auto", 5, 1, Placement(3, 5, 3)),
        (8, "auto", None, 4, Placement(4, 1, 4)),
        (4, "auto", None, 4, Placement(4, 1, 0)),
        (8, 2, None, 2, Placement(2, 3, 2)),
        (8, [1, 3], 4, 1, Placement(2, 4, 4)),
        (8, "0,2", None, 1, Placement(2, 5, 3)),
        (2, 2, None, 1, Placement(2, 2, 0)),
    ],
)
def test_the_trainer_has_the_first_gpus_and_servers_the_others_or_they_share(
    gpus: int, devices: Any, servers: int | None, tp_size: int, expected: Placement
) -> None:
    assert placed(gpus, devices, servers, tp_size) == expected
    assert expected.shared == (expected.first_gpu == 0)


@pytest.mark.parametrize(("gpus", "devices", "servers", "tp_size"), [(2, 1, 2, 1), (4, 3, None, 2), (1, 1, 2, 1)])
def test_more_servers_than_gpus_are_refused(gpus: int, devices: Any, servers: int | None, tp_size: int) -> None:
    with pytest.raises(InputError, match=rf"trainer\.devices={devices} and .* do not fit the {gpus} GPUs"):
        placed(gpus, devices, servers, tp_size)


def test_a_server_next_to_a_trainer_gets_the_memory_that_it_needs(folder: Path, stored: StoredTarget) -> None:
    capture_run = live_command.of(composed(folder, folder, *LIVE, "features.batch_tokens=16384"))
    facts = stored.facts
    cache = 4 * 16384 * 4 * facts.num_layers * facts.num_kv_heads * facts.head_dim
    needed = stored.weights_bytes + cache
    assert share_of_memory(capture_run, stored, 4 * needed) == pytest.approx(0.25, abs=0.011)
    with pytest.raises(InputError, match=r"would need 80% of a GPU .* lower features\.batch_tokens"):
        share_of_memory(capture_run, stored, int(needed / 0.8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["data.path=FOLDER/features"], r"data\.path=.*features has no answers\.jsonl, of which data=live makes"),
        (["data.path=[FOLDER/answers,FOLDER/answers]"], "data=live takes one folder of answers"),
        (["data.path=null"], "data=live takes one folder of answers; give data.path=DIR/answers"),
        (["features=sglang", "launch.python=/nowhere"], "launch.python=/nowhere cannot be run"),
        (["features.capture_layers=[2,99]"], r"features\.capture_layers=\[2, 99\] does not fit a target"),
    ],
)
def test_what_cannot_be_trained_is_told_in_one_line(
    folder: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    options = [option.replace("FOLDER", str(folder)) for option in options]
    with pytest.raises(InputError, match=message):
        Run(tmp_path, folder / "answers", *LIVE, *options)


def test_several_hosts_are_refused() -> None:
    message = r"trainer\.num_nodes=2 must be 1 with data=live: features travel through the memory of one host; for"
    with pytest.raises(InputError, match=message):
        compose_run("train", "run_dir=RUN", "data.path=DIR", "data=live", "trainer.num_nodes=2")


def test_answers_of_another_target_are_refused(folder: Path, tmp_path: Path, target: Target) -> None:
    write_answers(tmp_path, replace(target.identity, weights_hash="other"), ROWS)
    with pytest.raises(InputError, match=r"answers was made with target .*they differ in weights"):
        Run(tmp_path / "run", tmp_path / "answers", *LIVE)


def test_answers_that_change_while_they_are_trained_on_end_the_run(
    folder: Path, tmp_path: Path, target: Target
) -> None:
    write_answers(tmp_path, target.identity, ROWS)
    run = Run(tmp_path / "run", tmp_path / "answers", *LIVE)
    ids = ROWS[0]["input_ids"]
    write_answers(tmp_path, target.identity, [{**row, "input_ids": [*ids[:1], *row["input_ids"][1:]]} for row in ROWS])
    with pytest.raises(InputError, match=r"answers\.jsonl at sample p\d+#0(: damaged|.* has changed since)"):
        run.fit()


def test_a_training_is_not_resumed_on_other_answers(folder: Path, tmp_path: Path, target: Target) -> None:
    write_answers(tmp_path, target.identity, ROWS)
    first = Run(tmp_path / "run", tmp_path / "answers", *LIVE, signal_after=4)
    with pytest.raises(Interrupted):
        first.fit()
    write_answers(tmp_path, target.identity, [*ROWS, conversation(99, 5, 9)])
    last = f"ckpt_path={tmp_path}/run/checkpoints/last.ckpt"
    with pytest.raises(InputError, match=r"the answers, the target or features\.\* are not those that ckpt_path="):
        Run(tmp_path / "run", tmp_path / "answers", *LIVE, last)


def test_keys_of_a_store_are_told_to_have_no_effect(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_command, "given_keys", lambda: ["features.shard_mb", "data.path", "optim.lr"])
    live_command.with_choices(composed(tmp_path, folder / "answers", *LIVE))
    assert [record.message for record in caplog.records] == [
        "features.shard_mb has no effect with data=live, which stores nothing; leave it out"
    ]
