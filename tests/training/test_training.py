"""Training as users run it (Hydra config, Lightning trainer) on a small store: learning, resume, errors."""

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from feature_data import feature_data
from heads import ttt_batch
from lightning.pytorch.callbacks import ModelCheckpoint
from stores import IDENTITY, ROOT, grow_store, random_samples, write_store
from torch import Tensor
from training_runs import LIGHTNING_WARNS, Run, metrics

from eagle3.errors import InputError
from eagle3.features.loss_mask import AllTurns, Everything, LastTurn
from eagle3.head.batch import TttBatch
from eagle3.head.divergence import OfLogProbabilities
from eagle3.head.fast.chunked_loss import ChunkedLoss
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.layer import PlainLayer
from eagle3.head.loss import UnrollLoss, plain_loss
from eagle3.head.simulate_decoding import simulate_rounds
from eagle3.storage.folder import LocalFolder
from eagle3.training.resume import read_resumed, require_checkpoint_fits

pytestmark = LIGHTNING_WARNS


class OtherLoss(UnrollLoss):
    """Another objective, by its name alone."""


class NanLoss(UnrollLoss):
    def __call__(self, *parts: Any) -> Any:
        loss, metrics = super().__call__(*parts)
        return loss * torch.nan, metrics


class Weightless(UnrollLoss):
    def anchor_weights(self, batch: TttBatch, dtype: torch.dtype) -> Tensor:
        return torch.zeros(len(batch.anchors), dtype=dtype)


class WithoutSlopes(OfLogProbabilities):
    """A divergence of which only the value is known."""

    def rows(self, draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (draft.exp() * (draft - target)).sum(-1)


class WrongSign(WithoutSlopes):
    def slopes(self, draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -super().slopes(draft, target)


@dataclass(frozen=True, kw_only=True)
class LossWithTerms(UnrollLoss):
    """Keeps a term of its own for a callback, as docs/how-to/own-loss.md says."""

    terms: dict[str, torch.Tensor] = field(default_factory=dict)

    def __call__(self, *parts: Any) -> Any:
        loss, metrics = super().__call__(*parts)
        self.terms["doubled"] = 2 * loss.detach()
        return loss, metrics


class LogsTerms(lightning.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        module.log("train/doubled", module.loss.terms["doubled"], batch_size=1)


class DiesAtBatch(lightning.Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.batch:
            raise RuntimeError("killed")


def test_training_in_bf16_lowers_the_loss_and_writes_metrics_and_checkpoints(train):
    options = ("trainer.precision=bf16-mixed", "trainer.max_epochs=6", "callbacks.early_stopping=null")
    done = train("run", *options).fit()
    rows = metrics(done)
    losses = [float(row["val/loss"]) for row in rows if row["val/loss"]]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    assert {weight.dtype for weight in done.weights.values()} == {torch.float32}
    assert done.trainer.checkpoint_callback.best_model_score >= 1
    assert (done.directory / "checkpoints" / "last.ckpt").is_file()
    assert {"train/anchors_per_s", "train/data_wait_share", "val/accuracy_2", "val/accept_length"} <= set(rows[0])


@pytest.mark.shapes
@pytest.mark.parametrize(
    ("kernels", "layer", "loss"),
    [("kernels=plain", PlainLayer, plain_loss), ("kernels.layer=fused", FusedLayer, ChunkedLoss)],
)
def test_the_loss_curve_is_the_golden_one_with_the_kernels_of_the_config(train, kernels, layer, loss, tmp_path):
    """A refactor that should not change numbers must not; new numbers: write them down here with their reason."""
    store = write_store(tmp_path / "features", random_samples(60))
    settings = ("model=eagle3", "model.train_lm_head=true", "optim=adamw", "loss.decay=0.8", "trainer.max_epochs=2")
    done = train("run", *settings, f"data.path={store}", kernels).fit()
    golden = json.loads((ROOT / "tests" / "golden" / "training.json").read_text())
    losses = [float(row["train/loss"]) for row in metrics(done) if row["train/loss"]]
    assert losses == pytest.approx(golden["train_loss"], rel=2e-3)
    chosen = done.module.kernels
    assert getattr(chosen.layer, "func", chosen.layer) is layer and loss in (chosen.loss, type(chosen.loss))


def test_all_validations_see_the_same_packs(train):
    settings = ["trainer.val_check_interval=0.25", "trainer.max_epochs=1", "optim.lr=1e-20", "data.val_fraction=0.5"]
    done = train("run", *settings, "+trainer.limit_val_batches=2", "trainer.num_sanity_val_steps=1").fit()
    assert len(list(done.data.val_dataloader())) > 3
    for column in ("val/loss", "val/accept_length", "val/served_accept_length_3"):
        seen = [float(row[column]) for row in metrics(done) if row[column]]
        assert len(seen) >= 4
        assert seen == pytest.approx([seen[0]] * len(seen), rel=1e-6)


@pytest.mark.parametrize(("normalize", "tokens"), [("token", 30), ("sequence", 300)])
def test_a_validation_logs_what_its_samples_have_one_by_one_however_they_are_packed(train, normalize, tokens):
    settings = (f"loss.normalize={normalize}", f"data.pack_tokens={tokens}", "data.val_fraction=0.5")
    done = train("run", "trainer.max_epochs=1", *settings).fit()
    total = weights = 0.0
    counts, correct, trained = torch.zeros(4), torch.zeros(3), torch.zeros(3)
    for ref in done.data.val_samples:
        batch = ttt_batch([done.data.read(ref)], ttt_steps=3)
        loss, found = done.module.compute_loss(batch)
        weight = batch.num_anchors if normalize == "token" else 1
        total, weights = total + weight * loss.item(), weights + weight
        counts += torch.tensor(simulate_rounds(found.accepted.numpy(), batch.anchors.numpy(), steps=3))
        correct, trained = correct + found.correct, trained + found.trained
    logged = {name: float(value) for name, value in done.trainer.callback_metrics.items()}
    assert logged["val/loss"] == pytest.approx(total / weights, rel=1e-5)
    shares = [float(counts[depth:].sum() / counts.sum()) for depth in (1, 2, 3)]
    assert shares[0] > 0
    assert [logged[f"val/served_reach_{depth}"] for depth in (1, 2, 3)] == pytest.approx(shares)
    assert logged["val/served_accept_length_3"] == pytest.approx(1 + sum(shares))
    assert [logged[f"val/accuracy_{step}"] for step in range(3)] == pytest.approx((correct / trained).tolist())


def test_gradients_are_clipped_by_norm_or_value_and_logged_before(train):
    settings = ["trainer.max_epochs=1", "trainer.gradient_clip_val=0.001"]
    by_norm = train("norm", *settings).fit()
    by_value = train("value", *settings, "+trainer.gradient_clip_algorithm=value").fit()
    assert any(not torch.equal(weight, by_value.weights[name]) for name, weight in by_norm.weights.items())
    for done in (by_norm, by_value):
        norms = [float(row["train/grad_norm"]) for row in metrics(done) if row["train/loss"]]
        assert len(norms) == 6 and min(norms) > 0.01


def test_rates_are_logged_with_the_loss_and_the_learning_rate_is_that_of_the_step_and_one_for_all_groups(train):
    done = train("run", "trainer.log_every_n_steps=4", "trainer.accumulate_grad_batches=2").fit()
    rows = metrics(done)
    assert [bool(row["train/anchors_per_s"]) for row in rows] == [bool(row["train/loss"]) for row in rows]
    total, optim = int(done.trainer.estimated_stepping_batches), done.module.optim
    rates = {int(row["step"]): float(row["train/lr"]) for row in rows if row["train/lr"]}
    assert rates == pytest.approx({step: optim.lr * optim.scale(step, total) for step in range(3, total, 4)})
    groups = done.trainer.optimizers[0].param_groups
    assert len(groups) == 2 and len({group["lr"] for group in groups}) == 1


def test_the_loss_of_a_step_is_what_the_loss_sums_without_its_weights(train):
    one = metrics(train("one", "ttt_steps=1", "loss.decay=0.5", "trainer.max_epochs=1").fit())
    for stage in ("train", "val"):
        of_step = [float(row[f"{stage}/loss_0"]) for row in one if row[f"{stage}/loss"]]
        assert of_step == pytest.approx([float(row[f"{stage}/loss"]) for row in one if row[f"{stage}/loss"]], rel=1e-5)
    settings = ("loss.normalize=sequence", "data.val_fraction=1e-9", "trainer.max_epochs=1")  # one sample validates
    logged = train("sequence", "ttt_steps=1", *settings).fit().trainer.callback_metrics
    assert float(logged["val/loss_0"]) == pytest.approx(float(logged["val/loss"]), rel=1e-5)


def test_the_loss_of_a_step_of_several_packs_is_that_of_all_of_them(train):
    """Six packs are an epoch: other packs in each epoch, but the same samples."""
    settings = ("trainer.accumulate_grad_batches=6", "optim.lr=1e-20", "trainer.max_epochs=2")
    first, second = [float(row["train/loss"]) for row in metrics(train("run", *settings).fit()) if row["train/loss"]]
    assert first == pytest.approx(second, rel=1e-5)


def test_a_training_without_an_end_is_refused(train):
    with pytest.raises(InputError, match=r"trainer\.max_epochs=-1 leaves the learning rate's schedule without an end"):
        train("run", "trainer.max_epochs=-1", "trainer.max_time='00:01:00:00'").fit()


def test_an_own_loss_trains_without_a_gradient_of_its_own_and_a_callback_logs_its_terms(train):
    own = (f"loss._target_={__name__}.LossWithTerms", f"+loss.divergence._target_={__name__}.WithoutSlopes")
    callback = f"+callbacks.terms={{_target_: {__name__}.LogsTerms}}"
    settings = (*own, callback, "trainer.max_epochs=1", "model.train_lm_head=true")
    rows, plain = (metrics(train(each, *settings, f"kernels.loss={each}").fit()) for each in ("chunked", "plain"))
    for column in ("train/loss", "val/loss"):
        one, other = ([float(row[column]) for row in each if row[column]] for each in (rows, plain))
        assert one == pytest.approx(other, rel=1e-4)
    logged = [(float(row["train/doubled"]), float(row["train/loss"])) for row in rows if row["train/loss"]]
    assert logged and all(doubled == pytest.approx(2 * loss) for doubled, loss in logged)


def test_a_divergence_whose_derivative_is_wrong_is_refused_at_the_start(train):
    wrong = train("run", f"+loss.divergence._target_={__name__}.WrongSign")
    with pytest.raises(InputError, match=r"loss\.divergence=WrongSign has another gradient .* differs by .*`slopes`"):
        wrong.fit()
    assert not list(wrong.directory.glob("checkpoints/*"))


def test_each_epoch_trains_each_sample_once_in_an_order_of_its_own(whole_run):
    done = whole_run()
    per_epoch = [sorted(ref.entry.id for ref in done.data.train_samples)] * 3
    seen = [name for _, ids, _ in done.recorder.batches for name in ids]
    size = len(per_epoch[0])
    epochs = [seen[start : start + size] for start in range(0, len(seen), size)]
    assert [sorted(epoch) for epoch in epochs] == per_epoch
    assert epochs[0] != epochs[1] != epochs[2]


def test_over_two_stores_a_prompt_is_on_the_side_where_each_alone_has_it(train, two_stores):
    alone, joined = (train("run", f"data.path={path}").data for path in (two_stores[0], f"[{','.join(two_stores)}]"))
    sides = []
    for side in ("train_samples", "val_samples"):
        sides.append([ref.entry.id for ref in getattr(alone, side)])
        assert [ref.entry.id for ref in getattr(joined, side)] == 2 * sides[-1]
    assert len({*sides[0], *sides[1]}) == len(sides[0]) + len(sides[1]) == 30
    limited = train("run", f"data.path=[{','.join(two_stores)}]", "data.limit_samples=40").data
    assert len(limited.train_samples) + len(limited.val_samples) == 40


def test_of_a_few_prompts_one_validates_whatever_the_fraction(tmp_path):
    data = Run(tmp_path / "run", write_store(tmp_path / "few", random_samples(4)), "data.val_fraction=1e-9").data
    assert (len(data.train_samples), len(data.val_samples)) == (3, 1)
    with pytest.raises(InputError, match=r"data\.val_fraction=1e-09 leaves none of the 1 samples .*: the only one val"):
        Run(tmp_path / "run", write_store(tmp_path / "one", random_samples(1)), "data.val_fraction=1e-9")


IN_MIDDLE = ["trainer.val_check_interval=2", "callbacks.early_stopping=null"]
STOPS: list[tuple[int, int | None, list[str]]] = [  # after which batch, where the step counts the one that was saved
    *((stop, None, [f"trainer.accumulate_grad_batches={size}"]) for stop, size in [(1, 2), (6, 4), (12, 1)]),
    *((stop, saved, IN_MIDDLE) for stop, saved in [(2, 3), (6, 6)]),  # a validation that is due comes first
    (6, 6, ["trainer.max_steps=15"]),  # at the end of an epoch, which Lightning would begin again without a batch
    (8, 9, ["+trainer.check_val_every_n_epoch=null", "trainer.val_check_interval=4"]),  # every fourth of all epochs
    (4, None, ["data.path=TWO", "data.weights=[1.5,0.5]", "trainer.max_epochs=2"]),
]


@pytest.mark.parametrize(("stop_after", "saved_after", "options"), STOPS)
def test_resuming_mid_epoch_repeats_nothing_skips_nothing_and_ends_with_the_same_weights(
    train, whole_run, two_stores, stop_after, saved_after, options
):
    options = [option.replace("TWO", f"[{','.join(two_stores)}]") for option in options]
    whole = whole_run(*options)
    first = train("parts", *options, signal_after=stop_after).stopped()
    assert len(first.recorder.batches) < len(whole.recorder.batches)
    saved = read_resumed(f"{first.directory}/checkpoints/last.ckpt")
    assert saved is not None and saved_after in (None, saved.global_step)
    rest = train("parts", *options, f"ckpt_path={saved.path}").fit()
    assert_continues(rest, whole, first.recorder.batches)
    assert rest.trainer.checkpoint_callback.best_model_score == whole.trainer.checkpoint_callback.best_model_score


def assert_continues(rest: Run, whole: Run, before: list[tuple[int, tuple[str, ...], int]]) -> None:
    """The batches before, those of `rest`, and its numbers are those of a training without a break."""
    assert before + rest.recorder.batches == whole.recorder.batches
    for column in ("step", "train/loss", "val/loss", "val/served_accept_length_3"):
        assert [row[column] for row in metrics(rest)] == [row[column] for row in metrics(whole)]
    for name, weight in whole.weights.items():
        assert torch.equal(weight, rest.weights[name]), name


def test_a_training_whose_store_has_gained_samples_continues_with_those_that_it_had(train, whole_run, tmp_path, caplog):
    options = ["trainer.max_epochs=2", "model.draft_vocab_size=20"]  # which the answers of the store decide
    store = write_store(tmp_path / "grown", random_samples(26))
    other = write_store(tmp_path / "other", random_samples(30)[26:])
    options += [f"data.path=[{store},{other}]"]
    whole = whole_run(*options)
    first = train("parts", *options, signal_after=4).stopped()
    grow_store(store, random_samples(40)[30:])
    saved = read_resumed(f"{first.directory}/checkpoints/last.ckpt")
    rest = train("parts", *options, f"ckpt_path={saved.path}")
    require_checkpoint_fits(saved, rest.data.source, rest.module.head, rest.module.settings)
    assert_continues(rest.fit(), whole, first.recorder.batches)
    assert "has 10 samples more than the " in caplog.text and "has changed since" not in caplog.text


@pytest.mark.parametrize("ended_by", ["max_steps=2", "max_steps=9", "max_epochs=1"])  # of 6 steps
def test_a_run_that_a_bound_ended_continues_with_what_is_left(train, whole_run, ended_by):
    options = ["trainer.val_check_interval=2", "optim.warmup_fraction=0", "optim.final_lr_fraction=1"]  # a flat rate
    whole, first = whole_run(*options), train("parts", *options, f"trainer.{ended_by}").fit()
    rest = train("parts", *options, first.resume).fit()
    assert_continues(rest, whole, first.recorder.batches)


class Diverges(lightning.Callback):
    """Spoils the weights, or all further gradients, after a batch of the first epoch."""

    def __init__(self, after: int, gradient: bool) -> None:
        self.after, self.gradient = after, gradient

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weight = module.head.fc.weight
        if batch_idx == self.after and self.gradient:
            weight.register_hook(lambda gradient: gradient * torch.inf)
        elif batch_idx == self.after:
            weight.data[0, 0] = torch.nan


def test_an_own_loss_that_is_nan_is_named(train):
    run = train("run", f"loss._target_={__name__}.NanLoss")
    with pytest.raises(InputError, match=r"the training has diverged.*, or correct NanLoss, which is your own$"):
        run.fit()


def test_a_loss_that_weights_nothing_is_named(train, caplog):
    train("run", f"loss._target_={__name__}.Weightless", "trainer.max_epochs=1").fit()
    assert "train/loss=0: loss=Weightless gives no token a weight there" in caplog.text


SELDOM = ["data.pack_tokens=24", "trainer.log_every_n_steps=10", "callbacks.last.every_n_steps=0"]
AT_STEP, NORM = r"train/(loss|grad_norm)=(nan|inf) at step 6", r"norm of the weights=nan at step \d+"
DIVERGED: dict[str, tuple[Diverges, list[str], int | None, str, int | None]] = {
    "gradient": (Diverges(4, True), ["callbacks.last.every_n_steps=3"], None, AT_STEP, 3),
    "between logged steps, by step": (Diverges(4, False), [*SELDOM, "callbacks.last.every_n_steps=3"], None, NORM, 3),
    "at the end": (Diverges(4, False), [*SELDOM, "trainer.max_steps=7", "trainer.val_check_interval=4"], None, NORM, 4),
    "on a signal": (Diverges(4, False), SELDOM, 7, NORM, None),
}


@pytest.mark.parametrize(("diverges", "settings", "signal_after", "message", "kept"), DIVERGED.values(), ids=DIVERGED)
def test_a_training_that_has_diverged_ends_before_a_checkpoint_has_its_weights(
    train, diverges, settings, signal_after, message, kept
):
    run = train("run", *settings, signal_after=signal_after)
    run.trainer.callbacks.insert(0, diverges)
    with pytest.raises(InputError, match=rf"{message}: the training has diverged.* a lower optim\.lr"):
        run.fit()
    saved = [read_resumed(str(path)) for path in run.directory.glob("checkpoints/*.ckpt")]
    assert [each.global_step for each in saved if each] == ([kept] if kept else [])
    assert all(each.weights["head.fc.weight"].isfinite().all() for each in saved if each)


def test_checkpoints_are_at_least_min_seconds_apart(train):
    run = train("run", "callbacks.last.every_n_steps=3", "callbacks.last.min_seconds=3600")
    run.trainer.callbacks.append(DiesAtBatch(10))
    with pytest.raises(RuntimeError, match="killed"):
        run.fit()
    assert not (run.directory / "checkpoints" / "last.ckpt").exists()


def test_a_kill_after_an_epochs_last_step_loses_no_epoch(train, whole_run):
    whole = whole_run()
    first = train("parts", "callbacks.last.every_n_steps=6")
    first.trainer.callbacks.append(DiesAtBatch(8))
    with pytest.raises(RuntimeError, match="killed"):
        first.fit()
    rest = train("parts", first.resume).fit()
    assert_continues(rest, whole, whole.recorder.batches[:6])


def test_a_resumed_run_drops_the_best_checkpoints_that_a_kill_left_and_keeps_its_own(train):
    first = train("run", signal_after=8).stopped()
    folder = first.directory / "checkpoints"
    [best] = folder.glob("best-*.ckpt")
    stale, users = folder / "best-step99-accept9.000.ckpt", folder / "mine.ckpt"
    for copy in (stale, users):
        shutil.copy(best, copy)
    unfinished = [LocalFolder(folder).create(name) for name in ("last.ckpt", best.name)]
    for each in unfinished:
        each.file.close()
    rest = train("run", f"ckpt_path={folder}/last.ckpt").fit()
    assert not stale.exists() and users.exists() and not any(each.temporary.exists() for each in unfinished)
    assert [Path(rest.trainer.checkpoint_callback.best_model_path)] == list(folder.glob("best-*.ckpt"))


def test_a_score_whose_checkpoint_is_gone_keeps_no_later_one_from_being_saved(train):
    def run(*overrides: str) -> ModelCheckpoint:
        started = train("run", "callbacks.best.monitor=val/loss", "callbacks.best.mode=min", *overrides)
        started.trainer.checkpoint_callback.mode = "max"  # the loss falls: the first validation is the best
        return started.fit().trainer.checkpoint_callback

    first = run("trainer.max_epochs=1")
    gone = Path(first.best_model_path)
    gone.unlink()  # a better one replaced it, then a kill cost the steps of that one
    best = run(f"ckpt_path={gone.parent}/last.ckpt")
    assert list(gone.parent.glob("best-*.ckpt")) == [Path(best.best_model_path)] != [gone]
    assert best.best_model_score < first.best_model_score


@pytest.mark.filterwarnings("ignore:The dirpath has changed.*")
def test_a_run_deletes_no_best_checkpoints_of_a_folder_that_it_does_not_resume(train, tmp_path):
    best = tmp_path / "second" / "checkpoints" / "best-step99-accept9.000.ckpt"
    best.parent.mkdir(parents=True)
    best.write_bytes(b"of another run")
    first = train("first", "trainer.max_epochs=1").fit()
    train("second", "trainer.max_epochs=2", first.resume).fit()
    assert best.read_bytes() == b"of another run"
    train("second", "trainer.max_epochs=1").fit()
    assert best.read_bytes() == b"of another run"


def test_a_run_whose_folder_has_moved_keeps_its_best_checkpoint(train, tmp_path):
    first = train("run", "trainer.max_epochs=2").fit()
    best = Path(first.trainer.checkpoint_callback.best_model_path)
    moved = shutil.move(first.directory, tmp_path / "moved") / "checkpoints"
    rest = train("moved", "trainer.max_epochs=3", f"ckpt_path={moved}/last.ckpt").fit()
    kept = Path(rest.trainer.checkpoint_callback.best_model_path)
    assert kept.parent == moved and kept.is_file()
    assert rest.trainer.checkpoint_callback.best_model_score >= first.trainer.checkpoint_callback.best_model_score
    assert best.name == kept.name or not (moved / best.name).exists()


def test_early_stopping_ends_a_run_for_good_unless_it_is_resumed_with_more_patience(train, caplog):
    caplog.set_level("INFO", "eagle3")
    settings = ("optim.lr=1e-9", "trainer.max_epochs=20", "callbacks.early_stopping.patience=1")
    first = train("run", *settings).fit()
    assert first.trainer.current_epoch < 10
    assert "callbacks.early_stopping: no better val/served_accept_length_3 in 1 validations" in caplog.text
    again = train("run", *settings, first.resume).fit()
    assert again.trainer.global_step == first.trainer.global_step
    patient = train("run", *settings[:2], "callbacks.early_stopping.patience=3", first.resume).fit()
    assert patient.trainer.current_epoch == first.trainer.current_epoch + 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.path=null", r"data\.path is not set"),
        ("data.min_tokens=999", r"\(\d+ by data\.min_tokens=999\); relax"),
        ("data.pack_tokens=10", r"data\.pack_tokens=10 .* tokens\); set data\.pack_tokens=2\d or more"),
        ("model.num_heads=5", r"model\.num_heads=5 does not divide the target's hidden size of 16"),
    ],
)
def test_bad_input_names_the_key_the_value_and_the_fix(train, override, message):
    with pytest.raises(InputError, match=message):
        train("run", override)


def test_a_mask_that_leaves_nothing_is_refused(tmp_path):
    samples = [replace(sample, input_ids=torch.full_like(sample.input_ids, 7)) for sample in random_samples(6)]
    store = write_store(tmp_path / "store", samples, reasoning_ids=[[7], [8]])
    with pytest.raises(InputError, match="loss_mask=WithoutReasoning leaves nothing to train"):
        Run(tmp_path / "run", store, "loss_mask=without_reasoning")


OTHERS: list[tuple[list[str], list[str]]] = [
    (["data.path=OTHER"], [r"ckpt_path=.*they differ in config"]),
    (
        ["model.draft_vocab_size=40", "model.norm_output=false"],
        [r"draft_vocab_size=50 then, 40 now, norm_output=True then, False now"],
    ),
    (
        ["seed=1", "optim.lr=1e-5", "optim=adamw", "kernels.loss_chunk=64", "data.readers=1", "loss.decay=0.5",
         f"loss._target_={__name__}.OtherLoss", "model.train_lm_head=true"],
        [r"seed=0 then, 1 now, .*optim\._target_=.*, optim\.lr=0\.003 then, 1e-05 now",
         r"loss\._target_=.*UnrollLoss then, .*OtherLoss now, loss\.decay=0\.6 then",
         r"model\.train_lm_head=False then, True now"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "messages"), OTHERS, ids=["target", "head", "settings"])
def test_a_checkpoint_continues_only_with_its_target_its_head_and_the_settings_that_decide_its_training(
    train, whole_run, tmp_path, overrides, messages
):
    other = write_store(tmp_path / "other", random_samples(60), target=replace(IDENTITY, name="other", config_hash="x"))
    second = train("second", *(each.replace("OTHER", str(other)) for each in overrides))
    last = read_resumed(f"{whole_run().directory}/checkpoints/last.ckpt")
    with pytest.raises(InputError) as refused:
        require_checkpoint_fits(last, second.data.source, second.module.head, second.module.settings)
    assert all(re.search(message, str(refused.value)) for message in messages)
    assert not re.search("loss_chunk|readers", str(refused.value))


def test_a_checkpoint_of_other_draft_tokens_is_refused(train, whole_run):
    second, last = train("second"), read_resumed(f"{whole_run().directory}/checkpoints/last.ckpt")
    second.module.head.draft_ids[0] = second.module.head.draft_ids[1]
    with pytest.raises(InputError, match=r"another head .*other tokens in the draft vocabulary"):
        require_checkpoint_fits(last, second.data.source, second.module.head, second.module.settings)


def test_a_checkpoint_from_before_heads_had_a_setting_continues_with_its_default(train, whole_run):
    second, last = train("second"), read_resumed(f"{whole_run().directory}/checkpoints/last.ckpt")
    config = {key: value for key, value in last.record.head_config.items() if key != "norm_before_residual"}
    older = replace(last, record=replace(last.record, head_config=config))
    require_checkpoint_fits(older, second.data.source, second.module.head, second.module.settings)


@pytest.mark.parametrize("mask", [LastTurn(), AllTurns(), Everything()])
def test_the_normaliser_counts_the_rows_that_the_mask_leaves(tmp_path, mask):
    store = write_store(tmp_path / "features", random_samples(60, stored="all"), teachers="all")
    for pack in feature_data(str(store), loss_mask=mask).val_dataloader():
        prompts_too = len(pack.pack.input_ids) - 2 * len(pack.pack.sample_ids)
        assert pack.pack.anchors_in_step == pack.num_anchors <= prompts_too
        assert (pack.num_anchors == prompts_too) is isinstance(mask, Everything)
