"""A target and a head that are made larger compute what they did, up to rounding."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from exported_head import FINGERPRINT, random_head, tiny_facts, tiny_target
from stores import ASSETS, ROOT
from torch import Tensor
from torch.nn import functional

from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.head.batch import ttt_batch
from eagle3.head.unroll import unroll
from eagle3.serving.head.export import export_head
from eagle3.serving.head.format import load_head
from eagle3.target.model import load_target

SIZES = ["--times", "4", "--intermediate", "640", "--layers", "9"]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture(params=[{}, {"fc_norm": True, "norm_output": True}], ids=["EAGLE-3", "EAGLE-3.1"])
def head_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    trained = random_head(tiny_facts(tiny_target()), FINGERPRINT, **request.param)
    for parameter in trained.head.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    export_head(trained, tmp_path / "small_head", versions={})
    return tmp_path / "small_head"


def test_target_and_head_compute_what_they_did(head_path: Path, tmp_path: Path) -> None:
    import enlarge

    torch.manual_seed(0)
    enlarge.main([str(ASSETS / "tiny"), str(head_path), str(tmp_path / "large"), *SIZES])
    settings = {
        "revision": None,
        "dtype": "float32",
        "device": "cpu",
        "attention": None,
        "trust_remote_code": False,
        "check_health": True,
    }
    small, large = tiny_target(), load_target(path=str(tmp_path / "large" / "target"), **settings)
    hidden, vocab = small.text_config.hidden_size, small.text_config.vocab_size
    ids = torch.randint(vocab, (1, 50))
    with torch.no_grad():
        theirs, ours = (target.model(ids, output_hidden_states=True) for target in (small, large))
    assert large.text_config.hidden_size == 4 * hidden and len(large.layers) == 9 == len(small.layers) + 1
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for layer in range(len(small.layers)):  # what heads are given
        torch.testing.assert_close(
            ours.hidden_states[layer], beside_zeros(theirs.hidden_states[layer]), atol=1e-4, rtol=1e-4
        )

    sample = Sample(
        id="sample",
        input_ids=ids[0],
        turns=(torch.arange(50) >= 20).long(),
        aux_hidden_states=torch.cat([theirs.hidden_states[layer][0] for layer in (2, 4, 5)], 1),
        last_hidden_state=torch.zeros(31, hidden),
        teacher_argmax=torch.zeros(31, dtype=torch.long),
        has_teacher=torch.arange(50) >= 19,
    )
    widened = torch.cat([beside_zeros(part) for part in sample.aux_hidden_states.chunk(3, 1)], 1)
    larger = replace(sample, aux_hidden_states=widened)
    heads = [load_head(path, dtype=torch.float32).head for path in (head_path, tmp_path / "large" / "head")]
    outputs = [
        unroll(head, target.embedding, ttt_batch([each], ttt_steps=3), 3)
        for head, target, each in zip(heads, (small, large), (sample, larger), strict=True)
    ]
    for theirs, ours in zip(*outputs, strict=True):
        assert theirs.abs().mean() > 0.1
        torch.testing.assert_close(ours, beside_zeros(theirs), atol=1e-4, rtol=1e-4)
        theirs, ours = (head.lm_head(head.norm(x)) for head, x in zip(heads, (theirs, ours), strict=True))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def beside_zeros(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 3 * x.shape[-1]))


@pytest.mark.parametrize(
    "given, message",
    [
        (["--times", "8"], "--times=8 is no power of 4, without which norms would be rounded"),
        (["--layers", "7"], "--layers=7 is less than the 8 of .*tiny"),
        (["--intermediate", "500"], "--intermediate=500 is less than the 512 there are"),
    ],
    ids=["rounded norms", "fewer layers", "a smaller MLP"],
)
def test_what_would_not_compute_the_same_is_refused(given: list[str], message: str, tmp_path: Path) -> None:
    import enlarge

    with pytest.raises(InputError, match=message):
        enlarge.main([str(ASSETS / "tiny"), "HEAD", str(tmp_path), *SIZES, *given])
    assert not any(tmp_path.iterdir())


def test_a_folder_with_files_is_refused_before_the_work(tmp_path: Path) -> None:
    import enlarge

    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is not empty; name a new folder"):
        enlarge.main([str(ASSETS / "tiny"), "HEAD", str(tmp_path), *SIZES])
