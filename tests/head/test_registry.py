"""Other kinds of heads: a second kind, which exists only in tests, trains, is exported and decodes."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported_head import export_head
from fitted_head import LAYERS, PROMPT, TREE, fitted_head, small_target
from heads import ttt_batch
from stores import random_samples, write_store
from torch import Tensor, nn
from training_runs import Run
from two_layer_head import TwoLayerHead, TwoLayers

from eagle3.decoding.batched_trees import BatchedTrees, SteppedTrees
from eagle3.decoding.replay import Answered, answer_all, record
from eagle3.decoding.speculate import Speculator, plain_greedy
from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.eagle3 import Eagle3
from eagle3.head.kind import Kind
from eagle3.head.layer import PlainLayer
from eagle3.head.registry import kind_in, kind_named, new_head
from eagle3.head_files.files import read_files
from eagle3.head_files.format import load_head
from eagle3.serving.head.export import read_trained
from eagle3.target.capture import Capture
from eagle3.training.resume import read_resumed, require_checkpoint_fits

pytestmark = pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec.*")  # between Lightning and PyTorch

CAPTURED = [1, 2, 3, 4]  # one layer more than EAGLE-3's


def head_for_target() -> TwoLayerHead:
    target = small_target()
    config = HeadConfig.for_target(
        target.facts, num_captured_layers=len(CAPTURED), draft_vocab_size=40, fc_norm=True, norm_output=True
    )
    torch.manual_seed(0)
    head = TwoLayerHead(config, torch.arange(3, 43)).double().requires_grad_(False)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def test_a_second_kind_trains_and_is_exported(tmp_path):
    store = write_store(tmp_path / "features", random_samples(40), capture_layers=[2, 4, 5])
    settings = ["model.kind=two_layer_head.TwoLayers", "trainer.max_epochs=1", "optim.lr=1e-2", "ttt_steps=2"]
    run = Run(tmp_path / "run", store, *settings)
    before = {name: weight.clone() for name, weight in run.weights.items()}
    run.fit()
    assert float(run.trainer.callback_metrics["val/accept_length"]) > 1
    assert not torch.equal(run.weights["second_o.weight"], before["second_o.weight"])
    trained = read_trained(tmp_path / "run/checkpoints/last.ckpt")
    export_head(trained, tmp_path / "head", versions={})
    assert read_files(tmp_path / "head").config["architectures"] == ["TwoLayers"]
    loaded = load_head(tmp_path / "head", num_layers=8).head
    assert type(loaded) is TwoLayerHead and loaded.config == trained.head.config
    for name, weight in trained.head.named_parameters():
        assert torch.equal(loaded.get_parameter(name), weight.bfloat16()), name
    resumed = read_resumed(str(tmp_path / "run/checkpoints/last.ckpt"))
    run.module.head.kind = "eagle3"  # of the same sizes
    with pytest.raises(InputError, match=r"kind=two_layer_head.TwoLayers then, eagle3 now"):
        require_checkpoint_fits(resumed, run.data.source, run.module.head, run.module.settings)
    again = Run(tmp_path / "again", store, *settings, f"init_from={tmp_path}/head")
    for name, weight in again.weights.items():
        assert torch.equal(loaded.get_parameter(name).float(), weight), name


def test_a_second_kind_decodes_without_loss_and_its_trees_are_replayed_as_they_are_decoded():
    target, head = small_target(), head_for_target()
    speculator = Speculator(target, head, CAPTURED)
    [answered] = answer_all(
        target, [PROMPT], max_new_tokens=12, beyond=3, seed=0, batch_size=1, progress=None, temperature=0.0, top_p=1.0,
        top_k=0,
    )  # fmt: skip
    recording = record(speculator, [answered], steps=3, topks=[1, 3])
    for shape in ({"steps": 3, "topk": 1, "draft_tokens": 4}, TREE, {"steps": 2, "topk": 3, "draft_tokens": 5}):
        [rounds] = recording.replay_each(**shape)
        decoded = speculator.decode(PROMPT, **shape, max_new_tokens=12)
        assert decoded.token_ids == plain_greedy(target, PROMPT, 12)
        assert rounds.verifications == decoded.verifications
        assert sum(rounds.gained) == sum(decoded.accepted)


class OtherResidualHead(DraftHead):
    kind = f"{__name__}.OtherResidual"

    def output(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return super().output(self.midlayer.hidden_norm(hidden), attended)


class OtherResidual(Eagle3):
    def new_head(self, config: HeadConfig, draft_ids: Tensor) -> DraftHead:
        return OtherResidualHead(config, draft_ids)


def test_stepped_trees_are_those_of_eagle3_also_with_a_layer_of_ones_own():
    target, capture = small_target(), Capture(small_target(), LAYERS)
    text = PROMPT + plain_greedy(target, PROMPT, 12)
    roots, found = range(len(PROMPT), len(text) - 3), []
    head = fitted_head(target, PROMPT)
    own = OtherResidualHead(head.config, head.draft_ids).to(head.fc.weight.dtype)
    own.load_state_dict(head.state_dict())
    for each in (head, own.requires_grad_(False)):
        speculator = Speculator(target, each, LAYERS)
        for topk, window in ((1, None), (3, None), (3, 6)):
            expected = BatchedTrees(speculator, capture, text, window=window).places(roots, topk, 3)
            assert torch.equal(SteppedTrees(speculator, capture, text, window=window).places(roots, topk, 3), expected)
            found.append(expected)
    assert any(not torch.equal(*pair) for pair in zip(found[:3], found[3:], strict=True))
    shape, answer = {"steps": 3, "topk": 1, "draft_tokens": 4}, text[len(PROMPT) :]
    [rounds] = record(
        speculator, [Answered(PROMPT, answer[:9], answer[9:], stopped=False)], steps=3, topks=[1]
    ).replay_each(**shape)
    assert rounds.verifications == speculator.decode(PROMPT, **shape, max_new_tokens=9).verifications


def test_a_layer_of_ones_own_trains_without_the_kernels_that_compute_eagle3s(tmp_path, monkeypatch):
    store = write_store(tmp_path / "features", random_samples(20))
    monkeypatch.setattr("eagle3.head.kernels.triton_obstacle", lambda device: None)  # as on a GPU
    for kind, is_plain in (("eagle3", False), (f"{__name__}.OtherResidual", True)):
        module = Run(tmp_path / kind, store, "ttt_steps=2", f"model.kind={kind}").module
        module.choose_kernels(torch.device("cpu"), "32-true")
        assert (module.kernels.layer is PlainLayer) is is_plain
    module.kernel_settings = replace(module.kernel_settings, layer="fused")
    with pytest.raises(InputError, match="fused computes EAGLE-3's layer, not that of OtherResidualHead; "):
        module.choose_kernels(torch.device("cpu"), "32-true")


@pytest.mark.parametrize("name", ["two_layer", "nowhere.Kind", "two_layer_head.TwoLayerHead", "a..b"])
def test_a_kind_that_cannot_be_imported_is_one_line(name):
    with pytest.raises(InputError, match=rf"^model\.kind={name} .*--config-dir\)$"):
        kind_named(name)


def test_a_kind_is_a_class_or_an_instance_and_a_module_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "instances.py").write_text("from two_layer_head import TwoLayers\n\nTWO = TwoLayers()\n")
    assert kind_named("instances.TWO").name == "instances.TWO"
    (tmp_path / "failing_kind.py").write_text("import nothing_at_all\n")
    with pytest.raises(InputError, match=r"model\.kind=failing_kind\.Kind cannot be imported .*nothing_at_all"):
        kind_named("failing_kind.Kind")


class Unfinished(Kind):
    def new_head(self, config: HeadConfig, draft_ids: Tensor) -> DraftHead:
        return DraftHead(config, draft_ids)


class OtherHead(TwoLayers):
    def new_head(self, config: HeadConfig, draft_ids: Tensor) -> TwoLayerHead:
        head = TwoLayerHead(config, draft_ids)
        head.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size)  # with a bias
        return head

    def cached(self, *arguments: Any, **settings: Any) -> Any:
        return None


class Decode(SimpleNamespace):
    """A decode with functions for methods."""


@dataclass(frozen=True, kw_only=True)
class WithSize(HeadConfig):
    size: int


def test_what_a_kind_lacks_is_one_line():
    with pytest.raises(InputError, match=r"Unfinished lacks unroll, cached, config_type, a subclass of .*HeadSizes"):
        kind_named(f"{__name__}.Unfinished")
    kind, head = kind_named(f"{__name__}.OtherHead"), head_for_target()
    with pytest.raises(InputError, match=r"OtherHead: the losses need other modules .*bias=False"):
        new_head(kind, head.config, head.draft_ids)
    with pytest.raises(InputError, match=r"OtherHead: its cached returns NoneType; return .*confirm, root and step"):
        kind.drafting(head, torch.zeros(3), 1)
    with pytest.raises(InputError, match=r"model\.size is not set; WithSize has no default"):
        WithSize.for_target(small_target().facts, num_captured_layers=3, draft_vocab_size=40)


def test_what_an_own_part_returns_wrong_is_one_line(tmp_path, monkeypatch):
    run = Run(tmp_path / "run", write_store(tmp_path / "features", random_samples(20)), "ttt_steps=2")
    module, kind = run.module, type(run.module.kind)
    module.choose_kernels(torch.device("cpu"), "32-true")
    batch = ttt_batch([run.data.read(run.data.train_samples[0])], ttt_steps=2)
    states = module.kind.unroll(module.head, module.embedding, batch, 2, module.kernels)
    returned: Any
    for returned, said in (
        (torch.stack(states), r"its unroll returns Tensor\(2, \d+, \d+\); return a list of 2 tensors of shape \("),
        (states[:1], r"its unroll returns list\(Tensor\(\d+, \d+\)\); return"),
        ([each[:1] for each in states], r"its unroll returns list\(Tensor\(1, \d+\), "),
        ([*states, None], r"its unroll returns list\(.*, NoneType\); return"),
        ([(each, each) for each in states], r"its unroll returns list\(tuple\(Tensor.*; return"),
        ([], r"its unroll returns list\(\); return"),
        (None, r"its unroll returns NoneType; return"),
        ([each.detach() for each in states], r"what its unroll returns has no gradient"),
    ):
        monkeypatch.setattr(kind, "unroll", lambda *_, returned=returned: returned)
        with pytest.raises(InputError, match=rf"^model\.kind=eagle3: {said}"):
            module.compute_loss(batch)
    monkeypatch.setattr(kind, "unroll", lambda *_: states)
    loss, metrics = module.compute_loss(batch)
    for returned, said in (
        (loss, r"returns Tensor\(\); return the loss, .*, and UnrollMetrics"),
        ((None, metrics), r"returns tuple\(NoneType, UnrollMetrics\); return"),
        ((loss[None], metrics), r"returns tuple\(Tensor\(1,\), UnrollMetrics\); return"),
        ((loss.detach(), metrics), r"returns a loss without gradient"),
    ):
        module.loss = lambda *_, returned=returned: returned
        with pytest.raises(InputError, match=rf"^loss=function {said}"):
            module.compute_loss(batch)


def test_what_a_step_of_a_decode_returns_wrong_is_one_line(monkeypatch):
    head = head_for_target()
    speculator = Speculator(small_target(), head, CAPTURED)
    states, path = torch.zeros(1, head.config.hidden_size).double(), (torch.zeros(1, 3),)
    returned: Any
    for method, returned, said in (
        ("step", states, r"Tensor\(1, \d+\); return the states, of shape \(1, \d+\), and the path"),
        ("step", None, "NoneType; return the states"),
        ("step", [], r"list\(\); return the states"),
        ("step", (states,), r"tuple\(Tensor\(1, \d+\)\); return the states"),
        ("step", (states, path, path), r"tuple\(Tensor.*; return the states"),
        ("step", (states, path[0]), r"tuple\(Tensor.*, Tensor\(1, 3\)\); return .* a tuple of tensors whose"),
        ("step", (states, (path[0][:0],)), r"tuple\(.*, tuple\(Tensor\(0, 3\)\)\); return"),
        ("step", (states[:, 1:], path), r"tuple\(Tensor.*; return"),
        ("confirm", states[0], r"Tensor\(\d+,\); return the state of the last row, of shape \(1, \d+\)"),
        ("confirm", None, "NoneType; return the state"),
        ("root", path[0], r"Tensor\(1, 3\); return a tuple of tensors"),
        ("root", None, "NoneType; return a tuple of tensors"),
    ):
        methods = {"confirm": states, "root": path, "step": (states, path), method: returned}
        decode = Decode(**{name: lambda *_, value=value: value for name, value in methods.items()})
        monkeypatch.setattr(TwoLayers, "cached", lambda *_, decode=decode, **__: decode)
        with pytest.raises(InputError, match=rf"^model\.kind=two_layer_head\.TwoLayers: its Decode\.{method} .*{said}"):
            speculator.decode(PROMPT, steps=2, max_new_tokens=4)


def test_a_class_that_has_changed_since_the_training_is_one_line(tmp_path, monkeypatch):
    store = write_store(tmp_path / "features", random_samples(20))
    run = Run(tmp_path / "run", store, "model.kind=two_layer_head.TwoLayers", "trainer.max_epochs=1", "ttt_steps=2")
    run.fit()
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    run.module.head.second_o = nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"has another head than this run \(head\.second_o\.bias of another shape"):
        require_checkpoint_fits(read_resumed(str(checkpoint)), run.data.source, run.module.head, run.module.settings)
    make = TwoLayers.new_head

    def changed(kind: TwoLayers, config: HeadConfig, draft_ids: Tensor) -> TwoLayerHead:
        head = make(kind, config, draft_ids)
        head.added = nn.Linear(2, 2)
        return head

    monkeypatch.setattr(TwoLayers, "new_head", changed)
    with pytest.raises(InputError, match=r"model\.kind=two_layer_head\.TwoLayers has changed .*added\.weight"):
        read_trained(checkpoint)


@pytest.mark.parametrize("place", ["head", "outputs/head"])
def test_a_module_that_came_with_a_head_is_not_imported(place, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / place
    folder.mkdir(parents=True)
    for name in ("__init__.py", "evil.py"):
        (folder / name).write_text("raise SystemExit('code of the head has run')\n")
    module = place.replace("/", ".")
    for name in (module, f"{module}.evil", f"{module}.evil.Kind"):
        with pytest.raises(InputError, match="which could run any code"):
            kind_in(folder, name)
