"""Everything private that we use of transformers, by name: a release that changes one of them fails its test here."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, Gemma3nTextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eagle3 import cli
from eagle3.adapters.transformers import (
    DynamicLayer,
    cache_argument,
    has_file,
    keeps_keys_and_values,
    knows_quantization,
    next_logits,
    preallocated_cache,
    text_part,
    tokenizer_json,
)
from eagle3.errors import InputError
from tests.stores import ASSETS

RELEASE = f"transformers {transformers.__version__}"
TINY = ASSETS / "tiny"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()


def test_forward_takes_the_cache_by_a_name_that_we_know(model: PreTrainedModel) -> None:
    assert cache_argument(model), f"{RELEASE}: LlamaForCausalLM.forward names the cache differently"


def test_a_forward_that_names_the_cache_differently_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Tensor, past: Any = None) -> None: ...

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(InputError, match=r"takes no cache as an argument cache or past_key_values; transform"):
        cli.quiet_libraries()  # which commands call before they load anything


def test_a_forward_adds_its_tokens_to_the_cache(model: PreTrainedModel) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    cache = preallocated_cache(model)
    assert isinstance(cache.layers, list), f"{RELEASE}: DynamicCache.layers is not a list"
    first = next_logits(model, cache, last=1, input_ids=ids[:, :3])
    second = next_logits(model, cache, last=2, input_ids=ids[:, 3:])
    whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole[:, 2:])
    assert cache.get_seq_length() == 5, f"{RELEASE}: a cache asks its layers for their length in another way"


def test_a_layer_starts_without_keys() -> None:
    layer = DynamicLayer()
    assert layer.is_initialized is False, f"{RELEASE}: DynamicLayer.is_initialized says something else"
    assert layer.keys is None and layer.values is None, f"{RELEASE}: DynamicLayer has keys from the start"


def test_layers_that_share_keys_and_values_have_a_layer_that_we_know() -> None:
    """An unknown class would be taken for a state, which is verified token by token."""
    config = Gemma3nTextConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_kv_shared_layers=2, sliding_window=8,
    )  # fmt: skip
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
    assert keeps_keys_and_values(_WithConfig(config)), f"{RELEASE}: layers without keys are one of {kinds}"


class _WithConfig:
    def __init__(self, config: Any) -> None:
        self.config = config


def test_a_decoder_layer_reads_hidden_states_first(model: PreTrainedModel) -> None:
    """Capture takes the first positional argument, or `hidden_states`."""
    read: list[Tensor] = []
    handle = model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: read.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    ids = torch.tensor([[1, 2, 3]])
    reported = model(input_ids=ids, output_hidden_states=True).hidden_states
    handle.remove()
    assert torch.equal(read[0], reported[0]), f"{RELEASE}: a decoder layer gets its input in another argument"


def test_a_folder_is_asked_for_a_file_without_an_error() -> None:
    assert has_file(str(TINY), "config.json", None), f"{RELEASE}: cached_file does not find a file of a folder"
    assert not has_file(str(TINY), "adapter_config.json", None), f"{RELEASE}: cached_file finds what is not there"
    assert not has_file("nobody/nothing", "config.json", None), f"{RELEASE}: cached_file finds what is not there"


def test_quantization_methods_are_listed_by_name() -> None:
    assert knows_quantization("gptq"), f"{RELEASE}: AUTO_QUANTIZATION_CONFIG_MAPPING has other keys"
    assert not knows_quantization("no_such_method")


def test_a_fast_tokenizer_gives_its_json() -> None:
    content = tokenizer_json(AutoTokenizer.from_pretrained(TINY))
    assert content and "model" in content, f"{RELEASE}: a tokenizer's backend has no to_str of tokenizer.json"


def test_a_template_is_rendered_without_the_newline_after_a_block() -> None:
    """The clock is pinned by a macro in front of the template, whose newline must not be rendered."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    template = "{% macro day() %}1{% endmacro %}\n{{ day() }}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    assert text == "1", f"{RELEASE}: Jinja's trim_blocks is off"


def test_the_text_part_of_a_config_can_be_read() -> None:
    assert text_part(LlamaConfig(hidden_size=64)).hidden_size == 64
