"""Two gloo processes on the CPU make the update that one process makes on the whole batch, whatever each rank holds.

The two processes run what `python train.py trainer=ddp` (or fsdp, with the chunked loss) runs: Hydra run,
Lightning's strategy, the store's plan. The reference is a loop in this process, over one pack that joins all samples
of an optimizer step.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from multiprocessing import set_forkserver_preload
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from heads import ttt_batch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from serving_fixtures import free_port
from stores import random_samples, write_store
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes
from training_runs import CountPerStep, Recorder

from eagle3.commands.train import build_callbacks, build_trainer, build_training
from eagle3.compose import compose_run
from eagle3.data.datamodule import FeatureData
from eagle3.data.pack import Pack
from eagle3.errors import Interrupted
from eagle3.head.loss import UnrollMetrics, accept_length
from eagle3.head.unroll import unroll
from eagle3.head_files.format import load_head, save_head
from eagle3.serving.head.export import read_trained
from eagle3.settings.training import TrainRun
from eagle3.training import callbacks
from eagle3.training.module import HeadTraining, ranks_of_machine
from eagle3.training.muon import DividedMuon, PortableMuon

pytestmark = pytest.mark.slow
RANKS, EPOCHS, CLIP = 2, 2, 0.05  # clipped in every step: the norm must be that of the whole batch's gradient
TWO_CPUS = ["trainer.accelerator=cpu", f"trainer.devices={RANKS}", "trainer.precision=32-true"]
CASES = {
    "token": ["loss.normalize=token"],
    "accumulated": ["loss.normalize=sequence", "trainer.accumulate_grad_batches=2", "kernels.layer=fused"],
    "resumed": ["loss.normalize=token"],
}
CASES = {name: ["optim=adamw", *options] for name, options in CASES.items()}  # sharded as exactly as whole; Muon is not
LOG_EVERY = 3
MUON = {"muon": ["optim=muon", "model.train_lm_head=true"]}
MOVED = {"moved": ["optim=muon", "model.train_lm_head=true"]}  # from trainer=ddp to fsdp
HALF = {"half": ["optim=adamw", "trainer.precision=bf16-mixed", "kernels.layer=fused"]}
STRATEGIES = {
    "ddp": (["trainer=ddp"], CASES | MUON),
    "fsdp": (["trainer=fsdp", "kernels.loss=chunked"], CASES | HALF | MUON | MOVED),
}
EXACT = [*((strategy, case) for strategy in STRATEGIES for case in CASES), ("ddp", "muon")]


def composed(directory: Path, case: str, *overrides: str) -> TrainRun:
    settings = [
        f"data.path={directory}/features", f"run_dir={directory}/{case}", "data.pack_tokens=48",
        "data.val_fraction=0.2", "ttt_steps=3", "optim.lr=3e-3", f"trainer.max_epochs={EPOCHS}",
        f"trainer.gradient_clip_val={CLIP}", "trainer.enable_progress_bar=false", "callbacks.progress=null",
        "callbacks.early_stopping=null", "callbacks.curves=null", f"trainer.log_every_n_steps={LOG_EVERY}",
    ]  # fmt: skip
    return compose_run("train", *settings, *overrides)


def parts(run: TrainRun) -> tuple[FeatureData, HeadTraining]:
    """Data and module in float64, so that the order of a sum decides nothing."""
    lightning.seed_everything(run.seed, verbose=False)
    data, module = build_training(run)
    prepare = data.prepare
    data.prepare = lambda pack: prepare(in_float64(pack))
    return data, module.double()


def in_float64(pack: Pack) -> Pack:
    """EAGLE-3.1 norms the captured states in their own dtype: in float32, two orders of the same sum differ by 6e-8."""
    return replace(pack, aux_hidden_states=pack.aux_hidden_states.double())


def train_rank(rank: int, directory: Path, port: int) -> None:
    """One of the processes: every strategy and case in turn; what it saw and where it ended goes to a file."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*sync_dist=True.*")  # numbers that are this rank's alone
    # The same on both ranks, so that rates differ by rows alone.
    callbacks.time = SimpleNamespace(perf_counter=count().__next__, monotonic=lambda: 0.0)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    for name, (strategy, cases) in STRATEGIES.items():
        for case, overrides in cases.items():
            run = composed(directory / name, case, *strategy, *TWO_CPUS, *overrides)
            first = {"resumed": run, "moved": composed(directory / name, case, "trainer=ddp", *TWO_CPUS, *overrides)}
            torch.save(train_case(run, rank, first.get(case)), directory / name / f"{case}-{rank}.pt")
    torch.distributed.destroy_process_group()


def train_case(run: TrainRun, rank: int, first: TrainRun | None) -> dict[str, Any]:
    """Train; with `first`, go on from a training of these settings that was interrupted."""
    before = []
    if first:
        recorder = Recorder(signal_after=5 if rank == 0 else None)
        with pytest.raises(Interrupted):
            fit(first, recorder)
        before = recorder.batches
        run = replace(run, ckpt_path=f"{run.run_dir}/checkpoints/last.ckpt")
    recorder, counter = Recorder(), CountPerStep()
    trainer = fit(run, recorder, *([] if first else [counter]))
    return {
        "batches": before + recorder.batches,
        "weights": trainer.strategy.lightning_module_state_dict(),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items() if not name.endswith("_s")},
        "anchors_per_s": trainer.callback_metrics["train/anchors_per_s"].item(),
        "numbers_read": torch.tensor(counter.at_start).diff().tolist(),
        "steps": int(trainer.estimated_stepping_batches),
        "optimizers": [type(each).__name__ for each in getattr(trainer.optimizers[0], "parts", [])],
        "held": sum(local(parameter).numel() for parameter in trainer.lightning_module.head.parameters()),
    }


def fit(run: TrainRun, *callbacks: lightning.Callback) -> lightning.Trainer:
    data, module = parts(run)
    trainer = build_trainer(run, [], build_callbacks(run))
    trainer.callbacks += callbacks
    trainer.fit(module, datamodule=data, ckpt_path=run.ckpt_path, weights_only=True)
    return trainer


def local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class OneProcess:
    """The same training as a plain loop: one pack of all samples of a step, in the order that the ranks saw them."""

    def __init__(self, run: TrainRun, total_steps: int) -> None:
        self.data, self.module = parts(run)
        self.ttt_steps = run.ttt_steps
        self.refs = {ref.entry.id: ref for ref in self.data.source.samples}
        self.optimizer, self.schedule = self.module.optim.build(self.module.head, total_steps)

    def whole(self, ids: list[str]) -> tuple[torch.Tensor, UnrollMetrics]:
        batch = ttt_batch([self.data.read(self.refs[name]) for name in ids], ttt_steps=self.ttt_steps)
        batch = replace(batch, pack=in_float64(batch.pack))
        hidden = unroll(self.module.head, self.module.embedding, batch, self.ttt_steps)
        return self.module.loss(self.module.head, hidden, self.module.teacher_head, batch)

    def step(self, ids: list[str]) -> dict[str, float]:
        """Return what is logged of the whole step."""
        self.optimizer.zero_grad()
        loss, metrics = self.whole(ids)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.head.parameters(), CLIP)
        self.optimizer.step()
        self.schedule.step()
        by_step = {
            f"train/loss_{step}": value for step, value in enumerate((metrics.divergence / metrics.trained).tolist())
        }
        return {"train/loss": loss.item(), "train/grad_norm": norm.item(), **by_step}


def optimizer_steps(ranks: list[list], accumulate: int) -> Iterator[list]:
    """The batches of all ranks that make each optimizer step; an epoch's last may be short."""
    for epoch in range(EPOCHS):
        own = [[batch for batch in batches if batch[0] == epoch] for batches in ranks]
        for first in range(0, len(own[0]), accumulate):
            yield [batch for batches in own for batch in batches[first : first + accumulate]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    for name in STRATEGIES:
        write_store(directory / name / "features", random_samples(60))
    in_ranks(train_rank, directory, free_port(), ranks=RANKS)
    return directory


def results(directory: Path, case: str) -> list[dict]:
    return [torch.load(directory / f"{case}-{rank}.pt", weights_only=True) for rank in range(RANKS)]


def assert_same_as_one_process(directory: Path, case: str) -> None:
    run, ranks = composed(directory, case, "trainer=cpu", *(CASES | MUON)[case]), results(directory, case)
    reference = OneProcess(run, total_steps=ranks[0]["steps"])
    ragged, told = 0, []
    for step in optimizer_steps([rank["batches"] for rank in ranks], run.trainer.keys["accumulate_grad_batches"]):
        ragged += len({rows for _, _, rows in step}) > 1
        told.append(reference.step([name for _, ids, _ in step for name in ids]))
    assert ragged > 6, "where ranks hold as many rows as one another this shows nothing"
    expected = {f"head.{name}": value for name, value in reference.module.head.state_dict().items()}
    torch.testing.assert_close(ranks[0]["weights"], expected, rtol=1e-6, atol=1e-8)
    with torch.no_grad():
        loss, metrics = reference.whole([ref.entry.id for ref in reference.data.val_samples])
    for rank in ranks:
        length = accept_length(metrics.alive, metrics.anchors).item()
        assert rank["metrics"]["val/accept_length"] == pytest.approx(length, rel=1e-6)
        assert rank["metrics"]["val/loss"] == pytest.approx(loss.item(), rel=1e-6)
        of_step = told[len(told) // LOG_EVERY * LOG_EVERY - 1]
        logged = {name: rank["metrics"][name] for name in of_step}
        assert logged == pytest.approx(of_step, rel=1e-6), "the whole step's, not one part's"


@pytest.mark.parametrize(("strategy", "case"), EXACT)
def test_two_ranks_make_the_update_of_one_process_on_the_whole_batch(trained, strategy, case):
    assert_same_as_one_process(trained / strategy, case)


def test_shards_stay_wide_where_products_are_bf16_and_end_near_the_float64_training(trained):
    half, wide = (results(trained / "fsdp", case)[0] for case in ("half", "token"))
    assert {weight.dtype for name, weight in half["weights"].items() if "draft_ids" not in name} == {torch.float64}
    assert half["metrics"]["val/loss"] == pytest.approx(wide["metrics"]["val/loss"], rel=0.01)
    assert half["metrics"]["val/loss"] != pytest.approx(wide["metrics"]["val/loss"], rel=1e-6)


def test_ranks_divide_the_products_of_muon_where_each_has_all_weights(trained):
    ddp, fsdp = (results(trained / strategy, "muon")[0]["optimizers"][0] for strategy in ("ddp", "fsdp"))
    assert (ddp, fsdp) == ("DividedMuon", "PortableMuon")


def in_ranks(function: Any, *arguments: Any, ranks: int) -> None:
    """Run a function in processes, forks of one that has imported the large libraries."""
    set_forkserver_preload(["lightning", "transformers"])
    start_processes(function, arguments, nprocs=ranks, start_method="forkserver")


@contextmanager
def joined(rank: int, port: int, ranks: int) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    yield
    torch.distributed.destroy_process_group()


def test_each_machine_divides_among_its_own_ranks():
    in_ranks(require_ranks_of_machine, free_port(), 4, ranks=4)


def require_ranks_of_machine(rank: int, *group: int) -> None:
    ddp, sharded = DDPStrategy(), ModelParallelStrategy()
    with joined(rank, *group):
        ranks = ranks_of_machine(SimpleNamespace(num_devices=2, strategy=ddp))  # type: ignore[arg-type]
        first = rank // 2 * 2
        assert torch.distributed.get_process_group_ranks(ranks) == [first, first + 1]
        for num_devices, strategy in ((1, ddp), (2, sharded)):
            assert ranks_of_machine(SimpleNamespace(num_devices=num_devices, strategy=strategy)) is None  # type: ignore[arg-type]


def test_divided_muon_is_muon_also_with_fewer_matrices_than_ranks_and_without_some_gradients():
    in_ranks(compare_with_muon, free_port(), 3, ranks=3)


def compare_with_muon(rank: int, *group: int) -> None:
    with joined(rank, *group):
        for shapes in ([(8, 8)], [(8, 8), (16, 4), (4, 32), (6, 6)]):
            generator = torch.Generator().manual_seed(0)
            own = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
            expected = [torch.nn.Parameter(each.detach().clone()) for each in own]
            ranks: Any = torch.distributed.group.WORLD
            optimizers = DividedMuon(own, ranks=ranks, lr=0.1, weight_decay=0.1), PortableMuon(expected, lr=0.1)
            for step in range(4):
                for number, (one, other) in enumerate(zip(own, expected, strict=True)):
                    grad = torch.randn(one.shape, generator=generator)
                    one.grad, other.grad = (None, None) if step % 2 and number == 2 else (grad, grad.clone())
                for optimizer in optimizers:
                    optimizer.step()
            for one, other in zip(own, expected, strict=True):
                assert torch.equal(one, other)
                momenta, wanted = (optimizers[0].state[one], optimizers[1].state[other])
                assert torch.equal(momenta["momentum_buffer"], wanted["momentum_buffer"])


def test_muon_on_shards_ends_near_muon_on_whole_weights(trained):
    """It multiplies in bf16: the products of shards are rounded in other places."""
    sharded, whole = (results(trained / strategy, "muon")[0] for strategy in ("fsdp", "ddp"))
    torch.testing.assert_close(sharded["weights"], whole["weights"], rtol=0, atol=5e-4)
    assert sharded["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=1e-3)
    adamw = results(trained / "fsdp", "token")[0]["metrics"]["val/loss"]
    assert sharded["metrics"]["val/loss"] != pytest.approx(adamw, rel=1e-3)


@pytest.mark.parametrize(("strategy", "case"), [("ddp", "resumed"), ("fsdp", "resumed"), ("fsdp", "moved")])
def test_a_training_continues_with_the_batches_that_it_has_not_seen(trained, strategy, case):
    resumed, whole = (results(trained / strategy, each) for each in (case, "token"))
    assert [rank["batches"] for rank in resumed] == [rank["batches"] for rank in whole]


def test_a_training_continues_where_shards_are_elsewhere(trained):
    """Each weight with its own momentum, though the optimizer's groups have another order than the head."""
    moved, whole = (results(trained / "fsdp", case)[0] for case in ("moved", "muon"))
    torch.testing.assert_close(moved["weights"], whole["weights"], rtol=0, atol=5e-4)
    assert moved["metrics"]["val/loss"] == pytest.approx(whole["metrics"]["val/loss"], rel=1e-3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rates_are_those_of_all_ranks(trained, strategy):
    one, other = (rank["anchors_per_s"] for rank in results(trained / strategy, "token"))
    assert one == pytest.approx(other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_rank_waits_for_its_gpu_but_where_it_logs(trained, strategy):
    for rank in results(trained / strategy, "token"):
        of_first_epoch = rank["numbers_read"][: sum(epoch == 0 for epoch, _, _ in rank["batches"]) - 1]
        assert len(of_first_epoch) > 2 * LOG_EVERY
        assert {step % LOG_EVERY for step, numbers in enumerate(of_first_epoch, start=1) if numbers} <= {0}


def test_a_rank_holds_its_share_of_the_weights(trained):
    whole = results(trained / "ddp", "token")[0]["held"]
    assert sum(rank["held"] for rank in results(trained / "fsdp", "token")) == whole
    assert results(trained / "fsdp", "token")[0]["held"] < 0.6 * whole


def test_a_checkpoint_of_shards_exports_like_any_other(trained, tmp_path):
    exported = read_trained(trained / "fsdp" / "token" / "checkpoints" / "last.ckpt")
    weights = {f"head.{name}": value.double() for name, value in exported.head.state_dict().items()}
    expected = {name: value.double() for name, value in results(trained / "fsdp", "token")[0]["weights"].items()}
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    save_head(tmp_path / "head", exported.head, exported.record.origin.capture_layers, exported.dtype)
    assert load_head(tmp_path / "head", num_layers=8).head.config == exported.head.config
