"""What is known of a target without its weights is what is known with them."""

import json

import pytest
from transformers import AutoTokenizer

from eagle3.target.files import read_target_files


@pytest.mark.parametrize("eos", [None, 7, [7, 8]])
def test_stop_ids_join_those_of_the_generation_config_and_the_tokenizer(without_weights, eos):
    if eos is not None:
        (without_weights / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    files = read_target_files(path=str(without_weights))
    assert files.stop_ids == {2, *(eos if isinstance(eos, list) else [eos])} - {None}


def test_a_tokenizer_may_have_tokens_beyond_the_embedding(without_weights):
    """As gemma-3-1b-it has: no text holds them, and the model was published so."""
    tokenizer = AutoTokenizer.from_pretrained(without_weights)
    tokenizer.add_tokens(["<image_soft_token>"])
    tokenizer.save_pretrained(without_weights)
    files = read_target_files(path=str(without_weights))
    assert len(files.tokenizer) == files.text_config.vocab_size + 1
