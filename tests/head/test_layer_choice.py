"""Which layer trains: what is named, what `auto` takes, and where float8 cannot run."""

from collections.abc import Callable

import pytest
import torch

from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead
from eagle3.head.fast.fused_layer import FusedLayer
from eagle3.head.layer import MakeLayer, PlainLayer
from eagle3.head.layer_choice import choose_layer


@pytest.fixture
def choose(make_head: Callable[..., DraftHead]) -> Callable[..., MakeLayer]:
    def run(name: str, device: torch.device, precision: str = "bf16-mixed", **changes: int) -> MakeLayer:
        return choose_layer(name, device=device, precision=precision, config=make_head(**changes).config)

    return run


@pytest.mark.parametrize("name, layer", [("plain", PlainLayer), ("fused", FusedLayer), ("auto", PlainLayer)])
def test_on_the_cpu_a_named_layer_is_taken_and_auto_takes_the_plain_one(
    name: str, layer: MakeLayer, choose: Callable[..., MakeLayer], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert choose(name, torch.device("cpu")) is layer
    assert ("layer=auto takes plain: fused pays on a GPU with Triton, this is CPU" in caplog.text) == (name == "auto")


def test_on_a_gpu_auto_takes_the_fused_layer_where_its_kernels_run(
    choose: Callable[..., MakeLayer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = torch.device("cuda")
    for installed, layer, name in ((True, FusedLayer, "fused"), (False, PlainLayer, "plain")):
        found = object() if installed else None
        monkeypatch.setattr("eagle3.head.fast.kernel_choice.find_spec", lambda _, found=found: found)
        with caplog.at_level("INFO"):
            assert choose("auto", gpu) is layer
        assert f"layer=auto takes {name}: fused pays on a GPU with Triton, this is CUDA" in caplog.text
        assert choose("fused", gpu) is FusedLayer


def test_an_unknown_layer_is_refused_with_the_way_out(choose: Callable[..., MakeLayer]) -> None:
    with pytest.raises(InputError, match=r"layer=fast is none of auto, fused, fused_fp8, plain; layer=auto"):
        choose("fast", torch.device("cpu"))


@pytest.mark.parametrize(
    "capability, precision, changes, obstacle",
    [
        ((8, 6), "bf16-mixed", {}, r"needs a GPU of compute capability 8\.9 or more, this is a GPU of 2020"),
        ((9, 0), "32-true", {}, r"is for trainer\.precision=bf16-mixed, here trainer\.precision=32-true"),
        ((9, 0), "bf16-mixed", {}, r"needs sizes that are multiples of 16, here model\.intermediate_size is 24"),
        ((9, 0), "bf16-mixed", {"intermediate_size": 32, "num_kv_heads": 1}, r"model\.num_kv_heads x .* is 8"),
        ((9, 0), "bf16-mixed", {"intermediate_size": 32}, None),
    ],
)
def test_float8_is_refused_where_it_cannot_run(
    capability: tuple[int, int],
    precision: str,
    changes: dict[str, int],
    obstacle: str | None,
    choose: Callable[..., MakeLayer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU of 2020")
    if obstacle is None:
        assert choose("fused_fp8", torch.device("cuda"), precision, **changes).func is FusedLayer
    else:
        with pytest.raises(InputError, match=rf"layer=fused_fp8 .*{obstacle}; layer=fused"):
            choose("fused_fp8", torch.device("cuda"), precision, **changes)
