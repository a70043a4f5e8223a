"""Other kinds of heads: a second kind, which exists only in tests, trains, is exported and decodes."""

from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, export_head, record_of, tiny_target
from fitted_head import CHAIN, LAYERS, PROMPT, TREE, small_target
from stores import random_samples, write_store
from timed_machine import settings
from two_layer_head import TwoLayerConfig, TwoLayerHead

from eagle3.decoding.speculate import measure
from eagle3.errors import InputError
from eagle3.head import registry
from eagle3.head_files.files import read_files
from eagle3.head_files.format import load_head
from eagle3.serving.head.export import TrainedHead, read_trained
from eagle3.serving.tune.candidates import decoder_gains
from eagle3.settings.serving import AnswerSettings
from tests.training.test_training import Run

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # between Lightning and PyTorch

CAPTURED = [1, 2, 3, 4]  # one layer more than EAGLE-3's


def head_for_target() -> TwoLayerHead:
    target = small_target()
    config = TwoLayerConfig.for_target(
        target.facts, num_captured_layers=len(CAPTURED), draft_vocab_size=40, fc_norm=True, norm_output=True
    )
    torch.manual_seed(0)
    head = TwoLayerHead(config, torch.arange(3, 43)).double().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def test_a_second_kind_trains_and_is_exported(tmp_path: Path) -> None:
    store = write_store(tmp_path / "features", random_samples(40), capture_layers=[2, 4, 5])
    settings = ["model.kind=two_layer", "trainer.max_epochs=1", "optim.lr=1e-2", "ttt_steps=2"]
    run = Run(tmp_path / "run", store, *settings)
    before = {name: weight.clone() for name, weight in run.weights.items()}
    run.fit()
    assert float(run.trainer.callback_metrics["val/accept_length"]) > 1
    assert not torch.equal(run.weights["second_o.weight"], before["second_o.weight"])
    trained = read_trained(tmp_path / "run/checkpoints/last.ckpt")
    export_head(trained, tmp_path / "head", versions={})
    assert read_files(tmp_path / "head").config["architectures"] == ["TwoLayerHeadForTests"]
    loaded = load_head(tmp_path / "head", num_layers=8).head
    assert type(loaded) is TwoLayerHead and loaded.config == trained.head.config
    for name, weight in trained.head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.bfloat16()), name
    again = Run(tmp_path / "again", store, *settings, f"init_from={tmp_path}/head")
    for name, weight in again.weights.items():
        assert torch.equal(loaded.get_parameter(name).float(), weight), name


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_second_kind_decodes_without_loss(shape: dict[str, int]) -> None:
    options = {"topk": 1, "draft_tokens": None} | shape
    result = measure(
        small_target(), head_for_target(), CAPTURED, [PROMPT], **options, max_new_tokens=12, temperature=0.0, seed=0,
        progress=None,
    )  # fmt: skip
    assert result.lossless == 1.0
    assert LAYERS != CAPTURED


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    target = tiny_target().facts
    head = TwoLayerHead(TwoLayerConfig.for_target(target, num_captured_layers=3, draft_vocab_size=40), torch.arange(40))
    export_head(TrainedHead(head, record_of(head, FINGERPRINT, target)), tmp_path / "head", versions={})
    return tmp_path / "head"


def test_an_exported_head_whose_kind_is_not_registered_is_not_read_as_eagle3(
    exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry._KINDS, "two_layer")
    with pytest.raises(InputError, match=r"a head of kind two_layer is none of eagle3"):
        load_head(exported, num_layers=8)


def test_trees_of_a_second_kind_are_left_to_the_server(exported: Path) -> None:
    """What `tune` replays trees with is EAGLE-3's own."""
    answering = AnswerSettings(max_new_tokens=8, temperature=0.0, seed=0)
    message = r"replays only eagle3 heads, and .*/head is of kind two_layer; .*action=bench"
    with pytest.raises(InputError, match=message):
        tiny = {"path": tiny_target().path, "device": "cpu"}
        decoder_gains(settings(), tiny, exported, [[1, 2]], answering, frozenset())
