"""What we use of transformers' private parts and no other test shows: tests/decoding has its caches."""

from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, Gemma3nTextConfig, LlamaForCausalLM

from eagle3.adapters.quiet import quiet_libraries
from eagle3.adapters.transformers import keeps_keys_and_values
from eagle3.errors import InputError
from tests.stores import ASSETS

RELEASE = f"transformers {transformers.__version__}"


def test_a_forward_that_names_the_cache_differently_is_one_line(monkeypatch):
    def forward(self: Any, input_ids: Tensor, past: Any = None) -> None: ...

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(InputError, match=r"takes no cache as an argument cache or past_key_values; transform"):
        quiet_libraries()  # which commands call before they load anything


def test_layers_that_share_keys_and_values_have_a_layer_that_we_know():
    """An unknown class would be taken for a state, which is verified token by token."""
    config = Gemma3nTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_kv_shared_layers=2, sliding_window=8,
    )  # fmt: skip
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    model: Any = SimpleNamespace(config=config)
    assert keeps_keys_and_values(model), f"{RELEASE}: layers without keys are one of {kinds}"


def test_a_template_is_rendered_without_the_newline_after_a_block():
    """The clock is pinned by a macro in front of the template, whose newline must not be rendered."""
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
    template = "{% macro day() %}1{% endmacro %}\n{{ day() }}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    assert text == "1", f"{RELEASE}: Jinja's trim_blocks is off"
