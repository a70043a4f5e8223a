"""Answers of a target by our own generation, and by Hugging Face's."""

import torch

from eagle3.answers.generate import generate

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
STOP = 2


def answer(model, prompts, *, max_new_tokens=40, seeds=None, stop_ids=frozenset({STOP}), **sampling):
    seeds = list(range(len(prompts))) if seeds is None else seeds
    return generate(model, prompts, seeds=seeds, max_new_tokens=max_new_tokens, stop_ids=stop_ids, pad_id=0, **sampling)


def hugging_face_greedy(model, prompt, max_new_tokens, **options):
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens, **options
    )
    return whole[0, len(prompt) :].tolist()
