"""The head against its arithmetic written out from the weights of a state dict: what a server computes."""

from dataclasses import asdict

import pytest
import torch
from heads import EMBEDDING, make_head, ttt_batch
from stores import random_sample
from torch import Tensor
from torch.nn import functional

from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.head.head import RMSNorm
from eagle3.head.unroll import unroll

THETA, EPS, CHANNELS = 100.0, 1e-5, 8


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, position: int) -> Tensor:
    """RoPE of one head: channel i and i + C/2 turn by position · θ^(-2i/C)."""
    half = CHANNELS // 2
    angles = torch.tensor([position * THETA ** (-2 * i / CHANNELS) for i in range(half)], dtype=x.dtype)
    low, high = x[:half], x[half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])


def written_out(w: dict[str, Tensor], embeds: Tensor, aux: Tensor, *, options: dict) -> tuple[Tensor, Tensor]:
    """Un-normed output and logits of every row of one sequence at step 0."""
    if "fc_norm" in options:
        parts = aux.chunk(3, dim=-1)
        aux = torch.cat([norm(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], dim=-1)
    if "norm_before_fc" in options:
        aux = norm(aux, w["input_norm.weight"])
    hidden = aux @ w["fc.weight"].T
    x = torch.cat(
        [norm(embeds, w["midlayer.input_layernorm.weight"]), norm(hidden, w["midlayer.hidden_norm.weight"])], dim=-1
    )
    q, k, v = (x @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    rows, num_heads, num_kv_heads = len(x), q.shape[1] // CHANNELS, k.shape[1] // CHANNELS
    attended = torch.zeros_like(q)
    for row in range(rows):
        for head in range(num_heads):
            group = head // (num_heads // num_kv_heads)
            mine, theirs = (
                slice(head * CHANNELS, (head + 1) * CHANNELS),
                slice(group * CHANNELS, (group + 1) * CHANNELS),
            )
            query = rotate(q[row, mine], row)
            scores = torch.stack([query @ rotate(k[past, theirs], past) for past in range(row + 1)])
            attended[row, mine] = (scores / CHANNELS**0.5).softmax(0) @ v[: row + 1, theirs]
    hidden = hidden + attended @ w["midlayer.self_attn.o_proj.weight"].T
    normed = norm(hidden, w["midlayer.post_attention_layernorm.weight"])
    gated = functional.silu(normed @ w["midlayer.mlp.gate_proj.weight"].T) * (
        normed @ w["midlayer.mlp.up_proj.weight"].T
    )
    hidden = hidden + gated @ w["midlayer.mlp.down_proj.weight"].T
    return hidden, norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T


@pytest.mark.parametrize(
    "options", [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"num_kv_heads": 4}, {"num_kv_heads": 1}], ids=str
)
def test_the_head_computes_what_its_weights_say(options):
    head = make_head(**options)
    sample = random_sample([1] * 9)
    batch = ttt_batch([sample], ttt_steps=1)
    hidden = unroll(head, EMBEDDING, batch, 1)[0]
    expected, logits = written_out(
        head.state_dict(), EMBEDDING[sample.input_ids.roll(-1)], sample.aux_hidden_states, options=options
    )
    torch.testing.assert_close(hidden, expected[batch.anchors])
    torch.testing.assert_close(head.logits(hidden), logits[batch.anchors])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_half_precision_are_computed_in_float32_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    layer, x = RMSNorm(64, EPS), torch.randn(9, 64, generator=generator).to(dtype)
    layer.weight.data = torch.randn(64, generator=generator)
    expected = norm(x.double(), layer.weight.double()).detach()
    assert layer(x).dtype == dtype
    assert ((layer(x).double() - expected).abs() <= torch.finfo(dtype).eps / 2 * expected.abs() * 1.01).all()


def test_norm_output_feeds_the_normed_state_back():
    hidden = torch.randn(3, 16, dtype=torch.double)
    assert torch.equal(make_head().feedback(hidden), hidden)
    head = make_head(norm_output=True)
    torch.testing.assert_close(head.feedback(hidden), norm(hidden, head.norm.weight))


def test_the_state_dict_has_the_names_of_a_served_checkpoint():
    attention = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"]
    mlp = [f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = [f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    expected = {"fc.weight", "norm.weight", "lm_head.weight", *attention, *mlp, *norms}
    assert {name for name, _ in make_head().named_parameters()} == expected
    with_norms = {name for name, _ in make_head(fc_norm=True).named_parameters()}
    assert with_norms == expected | {f"fc_norm.{number}.weight" for number in range(3)}
    assert {name for name, _ in make_head(norm_before_fc=True).named_parameters()} == expected | {"input_norm.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, r"model\.num_kv_heads=3"),
        ({"head_dim": 7}, r"model\.head_dim=7"),
        ({"fc_norm": True, "norm_before_fc": True}, r"model\.norm_before_fc=true and model\.fc_norm=true .* set one"),
    ],
)
def test_sizes_that_do_not_fit_name_the_key(change, message):
    settings = asdict(make_head().config) | change
    with pytest.raises(InputError, match=message):
        HeadConfig(**settings)
