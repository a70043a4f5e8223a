"""docs/start/notebook.ipynb runs from top to bottom, and its calls name the key of a wrong setting."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from heads import make_head
from stores import ROOT, random_samples, write_store
from training_runs import LIGHTNING_WARNS

from eagle3 import notebook
from eagle3.errors import InputError
from eagle3.notebook import decode, make_store, open_target, train_head
from eagle3.storage.lock import hold
from eagle3.storage.records import read_sealed_json

NOTEBOOK = ROOT / "docs" / "start" / "notebook.ipynb"
# Fewer prompts and epochs than the notebook shows: the head must still draft what the target says. And more time, for a
# machine that is busy.
SHORTER = {
    "prompts.limit=250": "prompts.limit=80",
    "trainer.max_epochs=3": "trainer.max_epochs=2",
    "trainer.max_time=00:00:00:50": "trainer.max_time=00:00:10:00",
}


@pytest.mark.slow
def test_the_notebook_runs_and_its_head_drafts_what_the_target_says(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel come with the extra dev")
    nbformat = pytest.importorskip("nbformat")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    text = NOTEBOOK.read_text()
    for shown, shorter in SHORTER.items():
        assert text.count(shown) == 1
        text = text.replace(shown, shorter)
    notebook = nbformat.reads(text, as_version=4)
    where = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=where).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    said = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    [trained] = re.findall(r"(\d+) anchors", said)
    assert int(trained) > 0
    [accept_length] = re.findall(r"([\d.]+) tokens per target pass", said)
    assert float(accept_length) > 1.1
    pictures = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 4  # curves while it trains and all of them, trees, accept lengths
    assert list(tmp_path.glob("eagle3-*/page.html"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: make_store(path, "prompts.limit=0"), r"prompts\.limit=0 must be"),
        (lambda path: make_store(path, "prompt.limit=3"), r"prompt\.limit is not a key of this config"),
        (lambda path: train_head(path, path, "optim=adm"), r"optim=adm is no option; take one of .*adamw"),
        (lambda path: train_head(f"{path}/none", path), r"none/manifest\.json does not exist; make it with"),
        (lambda path: open_target(f"{path}/none"), r"target\.path=.*/none"),
        (lambda path: decode(None, None, None, steps=0), r"steps=0 must be 1 or more"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_setting_names_its_key(call, message, tmp_path):
    with pytest.raises(InputError, match=message):
        call(tmp_path)


@LIGHTNING_WARNS
def test_a_training_is_that_of_the_command_with_its_lock_and_result(tmp_path):
    store, run, steps = write_store(tmp_path / "store", random_samples(40)), tmp_path / "run", list[int]()
    settings = (
        "data.pack_tokens=48", "data.val_fraction=0.2", "ttt_steps=3", "trainer=cpu", "trainer.max_epochs=1",
        "model.draft_vocab_size=16", "trainer.log_every_n_steps=1", "callbacks.progress=null",
    )  # fmt: skip
    trained = train_head(store, run, *settings, watch=lambda step, values: steps.append(step))
    result = read_sealed_json(run / "result.json", made_by="")
    assert trained.record.checkpoint.endswith(Path(result["checkpoint"]).name) and max(steps) == result["steps"]
    with hold(run), pytest.raises(InputError, match="is being written by process"):
        train_head(store, run, *settings, "ckpt_path=auto")


def test_decoding_in_half_precision_leaves_the_trained_head_as_it_is_and_rope_in_float32(monkeypatch):
    monkeypatch.setattr(notebook, "Speculator", lambda target, head, layers: head)
    monkeypatch.setattr(notebook, "traced", lambda head, prompts, decoding: head)
    trained: Any = SimpleNamespace(head=make_head(), record=SimpleNamespace(origin=SimpleNamespace(capture_layers=[])))
    target: Any = SimpleNamespace(embedding=torch.zeros(1, dtype=torch.bfloat16))
    used: Any = decode(target, trained, None)  # type: ignore[arg-type]
    assert (used.fc.weight.dtype, used.rotary.inv_freq.dtype) == (torch.bfloat16, torch.float32)
    assert trained.head.fc.weight.dtype == torch.float64
