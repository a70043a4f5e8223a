"""Training that starts from a head: its first validation is that head's own, what it came from is kept, and resumed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported_head import Editable, as_specforge, as_speculators, export_head, with_origin
from safetensors.torch import load_file, save_file
from stores import open_store
from training_runs import Run

from eagle3.errors import InputError
from eagle3.features.store import FeatureStore
from eagle3.head_files.format import load_head
from eagle3.head_files.record import read_record
from eagle3.serving.head.export import read_trained
from eagle3.storage.files import sha256_file
from eagle3.training.resume import read_resumed, require_checkpoint_fits

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # between Lightning and PyTorch

ONE_EPOCH = "trainer.max_epochs=1"
OPTIONS = {"EAGLE-3": ["model=eagle3"], "EAGLE-3.1": [], "one norm before fc": ["model.norm_before_fc=true"]}
LAYOUTS: dict[str, Callable[[Editable, FeatureStore], object]] = {
    "ours": lambda head, store: None,
    "SpecForge": lambda head, store: as_specforge(head),
    "speculators": lambda head, store: as_speculators(head, store.target_weights()[0]),
}


def exported(run: Run, folder: Path) -> Path:
    """The head of the end of a run, in the precision that it was trained in."""
    trained = read_trained(run.directory / "checkpoints/last.ckpt")
    as_float32 = with_origin(trained, target_config=replace(trained.target_config, dtype="float32"))
    export_head(as_float32, folder, versions={})
    return folder


def validation(run: Run) -> dict[str, float]:
    """The metrics of the latest."""
    return {key: float(value) for key, value in run.trainer.callback_metrics.items() if key.startswith("val/")}


@pytest.mark.parametrize(
    ("options", "layout"), [("EAGLE-3", "ours"), ("EAGLE-3.1", "SpecForge"), ("one norm before fc", "speculators")]
)
def test_the_first_validation_is_that_of_the_head(options, layout, train, whole_run, training_store, tmp_path):
    old = whole_run(*OPTIONS[options], ONE_EPOCH)
    head = Editable(exported(old, tmp_path / "head"))
    LAYOUTS[layout](head, open_store(training_store))
    head.save()
    new = train("new", f"init_from={head.path}", "callbacks.throughput=null")  # which counts on a training
    loaded = load_head(head.path, num_layers=8).head
    torch.testing.assert_close(new.module.head.state_dict(), loaded.state_dict(), rtol=0, atol=0)
    new.trainer.validate(new.module, datamodule=new.data, verbose=False)
    assert validation(new) == validation(old)


def test_the_record_and_a_resumed_training_keep_the_head_that_the_training_started_from(train, whole_run, tmp_path):
    head = exported(whole_run(ONE_EPOCH), tmp_path / "head")
    new = train("new", ONE_EPOCH, f"init_from={head}").fit()
    records = [read_record(folder, made_by="") for folder in (head, exported(new, tmp_path / "adapted"))]
    assert not torch.equal(new.weights["fc.weight"], load_head(head, num_layers=8).head.fc.weight)
    files = {name: sha256_file(head / name) for name in ("config.json", "model.safetensors")}
    assert [record.started_from for record in records if record] == [{}, files]

    last = new.directory / "checkpoints/last.ckpt"
    resumed, checkpoint = train("resumed", f"init_from={head}"), read_resumed(str(last))
    assert checkpoint is not None
    require_checkpoint_fits(checkpoint, resumed.data.source, resumed.module.head, resumed.module.settings)
    other = train("from_scratch")
    with pytest.raises(InputError, match=r"trained with other settings \(init_from={'config\.json'.* then, None now\)"):
        require_checkpoint_fits(checkpoint, other.data.source, other.module.head, other.module.settings)


def test_a_head_is_refused_before_anything_is_trained(train, whole_run, tmp_path):
    old = whole_run(ONE_EPOCH)
    head = exported(old, tmp_path / "head")
    with pytest.raises(InputError, match=r"model\.num_kv_heads=4 contradicts init_from=\S+/head, whose head has 2"):
        train("new", f"init_from={head}", "model.num_kv_heads=4")
    with pytest.raises(InputError, match=r"init_from=\S+/last\.ckpt: is a file; give the folder of an exported head"):
        train("new", f"init_from={old.directory}/checkpoints/last.ckpt")
    weights = load_file(head / "model.safetensors")
    weights["fc.weight"][0, 0] = torch.nan
    save_file(weights, head / "model.safetensors")
    (head / "training.json").unlink()
    with pytest.raises(InputError, match=r"init_from=\S+/head: fc\.weight holds 1 non-finite values"):
        train("new", f"init_from={head}")
