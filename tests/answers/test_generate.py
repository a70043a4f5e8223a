"""The target's own decoding loop: against Hugging Face's, alone against in company, and its sampling distribution."""

import pytest
import torch
from families import text_config
from generation import GREEDY, STOP, answer, hugging_face_greedy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BartConfig,
    BartForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Phi3ForCausalLM,
)

from eagle3.adapters.transformers import CACHE_ROOM, PreallocatedLayer, preallocated_cache
from eagle3.answers.generate import choose_tokens, sampling_probabilities


@pytest.fixture(scope="module")
def model(tiny_path):
    return AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tiny_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_path)
    questions = ["List files", "What is a tuple in Python?", "Say hi", "Compute 3 * 4.", "How do I copy a directory?"]
    texts = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in questions]
    return [tokenizer(text)["input_ids"] for text in texts]


WARM = {"temperature": 0.9, "top_p": 0.95, "top_k": 50}


def test_greedy_answers_equal_hugging_face_generate(model, prompts):
    prompts = prompts[:2]
    answers = answer(model, prompts, max_new_tokens=CACHE_ROOM + 20, **GREEDY)
    for prompt, ours in zip(prompts, answers, strict=True):
        assert ours.token_ids == hugging_face_greedy(model, prompt, CACHE_ROOM + 20, eos_token_id=STOP, pad_token_id=0)
        assert ours.finish_reason == ("stop" if ours.token_ids[-1] == STOP else "length")
    assert {ours.finish_reason for ours in answers} == {"stop", "length"}


def test_an_answer_does_not_depend_on_the_rows_that_share_the_batch(model, prompts):
    prompts = prompts * 2
    together = answer(model, prompts, **WARM)
    for seed, prompt in enumerate(prompts):
        assert answer(model, [prompt], seeds=[seed], **WARM) == [together[seed]]
    lengths = [len(ours.token_ids) for ours in together]
    assert len(set(lengths)) > 2  # rows did leave the batch at different times


BART = {"vocab_size": 4096, "d_model": 32, "init_std": 0.3, "max_position_embeddings": 128}
BART |= {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "is_encoder_decoder": False}


@pytest.mark.parametrize("build", [
    lambda: Phi3ForCausalLM(text_config("phi3_longrope", num_layers=2)),  # positions depend on the longest row
    lambda: BartForCausalLM(BartConfig(**BART, is_decoder=True)),  # positions are counted from the padding on
])  # fmt: skip
def test_a_longer_row_next_to_it_does_not_change_an_answer(build):
    torch.manual_seed(0)
    model = build().eval()
    short, long = [3, 5, 7, 9], list(range(10, 40))
    together = answer(model, [short, long], max_new_tokens=6, **GREEDY)
    assert answer(model, [short], max_new_tokens=6, **GREEDY) == together[:1]
    assert answer(model, [long], max_new_tokens=6, **GREEDY) == together[1:]


def test_an_answer_is_cut_at_max_new_tokens_or_after_its_first_stop(model, prompts):
    (cut,) = answer(model, [prompts[1]], max_new_tokens=1, **GREEDY)
    assert len(cut.token_ids) == 1 and cut.finish_reason == "length"
    (long,) = answer(model, [prompts[1]], max_new_tokens=10, **GREEDY)
    stop = long.token_ids[4]
    (stopped,) = answer(model, [prompts[1]], max_new_tokens=10, stop_ids={stop, 4000}, **GREEDY)
    assert stopped.token_ids == long.token_ids[: long.token_ids.index(stop) + 1] and stopped.finish_reason == "stop"


def test_sliding_window_layers_keep_the_models_own_cache():
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config).eval()
    kinds = [type(layer) is PreallocatedLayer for layer in preallocated_cache(model).layers]
    assert any(kinds) and not all(kinds)
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 9, 8, 7, 11, 12], [3, 3, 3, 10, 20, 30, 40]]
    for prompt, ours in zip(prompts, answer(model, prompts, max_new_tokens=15, stop_ids={50}, **GREEDY), strict=True):
        assert ours.token_ids == hugging_face_greedy(model, prompt, 15, eos_token_id=50)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.7), (5, 0.6), (100, 0.01)])
def test_top_k_and_top_p_keep_what_a_plain_loop_keeps(top_k, top_p):
    logits = torch.randn(20, 12, generator=torch.Generator().manual_seed(0)) * 2
    ours = sampling_probabilities(logits, temperature=0.8, top_p=top_p, top_k=top_k)
    for row, probabilities in zip(logits, ours, strict=True):
        softmax = (row / 0.8).softmax(dim=-1).tolist()
        order = sorted(range(12), key=lambda token: -softmax[token])[: top_k or 12]
        total = sum(softmax[token] for token in order)
        kept, mass = [], 0.0
        for token in order:
            if mass < top_p:
                kept.append(token)
            mass += softmax[token] / total
        share = sum(softmax[token] for token in kept)
        wanted = [softmax[token] / share if token in kept else 0.0 for token in range(12)]
        torch.testing.assert_close(probabilities / probabilities.sum(), torch.tensor(wanted))


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([0.3, -1.0, 2.0, 1.1, -torch.inf, 0.0])
    # An even grid of uniforms must hit each token in proportion: no luck involved.
    uniforms = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    drawn = choose_tokens(logits.expand(10_000, -1), uniforms, temperature=0.5, top_p=0.95, top_k=4)
    wanted = sampling_probabilities(logits[None], temperature=0.5, top_p=0.95, top_k=4)[0]
    frequencies = torch.bincount(drawn, minlength=6) / 10_000
    torch.testing.assert_close(frequencies, wanted / wanted.sum(), atol=2e-4, rtol=0)


def test_uniforms_at_the_edges_never_draw_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert choose_tokens(logits, uniforms, temperature=1.0, top_p=1.0, top_k=0).tolist() == [1, 2]
