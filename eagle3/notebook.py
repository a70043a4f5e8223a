"""The stages as calls for a notebook, with the keys of the commands as overrides: docs/start/notebook.ipynb has all.

target = open_target("tests/assets/tiny")
store = make_store("data", "target.path=tests/assets/tiny", "prompts.path=FILE.jsonl", "prompts=in_house")
trained = train_head("data/features", "run", "trainer.max_epochs=1", watch=lambda step, values: print(step, values))
traces = decode(target, trained, read_prompts(target, "held_out.jsonl", limit=8), steps=4, topk=3, draft_tokens=12)
curves = draw_curves("run")
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback, LambdaCallback

from eagle3.adapters.quiet import quiet_libraries
from eagle3.answers.build import build_chat
from eagle3.commands.precompute import precompute
from eagle3.commands.train import train_in
from eagle3.compose import compose_run
from eagle3.decoding.speculate import Speculator
from eagle3.features.concat import open_source
from eagle3.features.source import FeatureSource
from eagle3.serving.check.checks import in_dtype
from eagle3.serving.check.prompts import PromptSet, file_conversations, prompt_source, with_history
from eagle3.serving.head.export import TrainedHead, find_checkpoint, read_trained
from eagle3.serving.show.trace import Trace, traced
from eagle3.settings.serving import DecodeRun, Decoding
from eagle3.settings.training import TrainRun
from eagle3.target.model import Target, load_target
from eagle3.training.curves import draw_runs

Watch = Callable[[int, dict[str, float]], None]


def make_store(out_dir: str | Path, *overrides: str) -> FeatureSource:
    """Clean prompts, let the target answer them, store its features below `out_dir`, and open that store.

    `overrides` are those of `python precompute.py`: target.path and prompts.path must be among them."""
    run = compose_run("precompute", f"out_dir={out_dir}", *overrides)
    precompute(run)
    return open_source(run.features.path or f"{out_dir}/features")


def train_head(store: str | Path, run_dir: str | Path, *overrides: str, watch: Watch | None = None) -> TrainedHead:
    """Train a head on the store in this process, as `python train.py` does, and return the best by validation.

    `overrides` are those of `python train.py`. `watch` is called with the step and the latest values of all metrics
    after each step that is logged and after each validation."""
    run: TrainRun = compose_run("train", f"data.path={store}", f"run_dir={run_dir}", *overrides)
    if run.trainer.keys["devices"] == "auto":
        run = replace(run, trainer=run.trainer.with_keys(devices=1))  # a notebook cannot start the processes of ranks
    train_in(Path(run_dir), run, *([_watching(watch)] if watch else []))
    return read_trained(find_checkpoint(run=str(run_dir), checkpoint=None))


def open_target(path: str | Path, *overrides: str) -> Target:
    """Load a target in this process; `overrides` are keys of conf/target, e.g. "target.dtype=bfloat16"."""
    quiet_libraries()
    run = _decoding(f"target.path={path}", *overrides)
    target = load_target(**vars(run.target))
    return replace(target, stop_ids=build_chat(run.chat, target).stop_ids)


def read_prompts(
    target: Target, path: str | Path, *overrides: str, limit: int | None = None, max_new_tokens: int | None = None
) -> PromptSet:
    """Read conversations of any shape as token ids in the target's chat format: a prompt for each turn, with the turns
    before it. `overrides` are keys of conf/serve/prompts.yaml, e.g. "prompts.turns=first".

    Prompts without room for an answer of `max_new_tokens`, by default that of conf/serve, in the target's context are
    left out."""
    given = [] if max_new_tokens is None else [f"max_new_tokens={max_new_tokens}"]
    run = _decoding(f"prompts.path={path}", *given, *overrides)
    found = prompt_source(run.prompts)
    assert found is not None  # its path is given
    room = target.text_config.max_position_embeddings - run.max_new_tokens - 64  # the most steps that a draft has
    chat = build_chat(run.chat, target)
    conversations = file_conversations(chat, found, turns=run.prompts.turns, limit=limit, max_length=room)
    return with_history(target, conversations, max_new_tokens=run.max_new_tokens)


def decode(target: Target, trained: TrainedHead, prompts: PromptSet, **settings: Any) -> list[Trace]:
    """Decode each prompt speculatively and keep every round. `settings` are steps, topk, draft_tokens, max_new_tokens,
    temperature and seed, by default those of conf/serve."""
    given = [f"{key}={'null' if value is None else value}" for key, value in settings.items()]
    decoding = _decoding(*given).only(Decoding)
    head = in_dtype(trained.head, target.embedding.dtype)
    return traced(Speculator(target, head, trained.record.origin.capture_layers), prompts, decoding)


def draw_curves(*runs: str | Path) -> Any:
    """Draw the curves of a training from its metrics.csv, also while it runs, or of several; a figure of matplotlib."""
    return draw_runs([Path(run) for run in runs])


def _decoding(*overrides: str) -> DecodeRun:
    """Return a run with these keys; each call here uses some of its groups, and has the rest itself."""
    return compose_run("serve", "action=decode", "run_dir=.", "head=.", "prompts.path=.", *overrides)


def _watching(watch: Watch) -> Callback:
    def tell(trainer: lightning.Trainer, *_: Any) -> None:
        watch(trainer.global_step, {name: float(value) for name, value in trainer.callback_metrics.items()})

    def tell_logged(trainer: lightning.Trainer, *_: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            tell(trainer)

    return LambdaCallback(on_train_batch_end=tell_logged, on_validation_end=tell)
