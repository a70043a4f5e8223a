"""A head that a few steps on answers of the bundled target have taught to draft for it."""

import json
from functools import cache
from pathlib import Path

import torch
from exported_head import LAYERS, random_head, tiny_chat, tiny_facts, tiny_target, with_origin
from fitted_head import sample_with_features
from stores import ASSETS, open_store, write_store
from torch.nn import functional

from eagle3.answers.generate import generate
from eagle3.data.pack import pack_samples
from eagle3.features.sample import Sample
from eagle3.head.eagle3 import EAGLE3
from eagle3.head.kernels import KernelPlan
from eagle3.serving.head.export import TrainedHead

NEW_TOKENS, STEPS = 24, 3


def held_out_prompts() -> list[list[int]]:
    rows = map(json.loads, (ASSETS / "prompts/heldout.jsonl").read_text().splitlines()[:8])
    return [tiny_chat().prompt_ids(row["messages"][:1])[-40:] for row in rows]


def answered(prompts: list[list[int]], *, temperature: float) -> list[Sample]:
    """Prompts with the target's answers of NEW_TOKENS, then a second turn, and their features."""
    target = tiny_target()
    found = generate(
        target.model, prompts, seeds=[*range(len(prompts))], pad_id=0, max_new_tokens=NEW_TOKENS,
        stop_ids=frozenset(), temperature=temperature, top_p=1.0, top_k=0,
    )  # fmt: skip
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, found, strict=True)):
        ids = torch.tensor([*prompt, *answer.token_ids, *prompt[:3], *answer.token_ids[:4]])
        turns = torch.tensor([0] * len(prompt) + [1] * NEW_TOKENS + [0] * 3 + [2] * 4)
        samples.append(sample_with_features(target, LAYERS, ids, turns, f"p{number}#0"))
    return samples


@cache
def taught_samples() -> list[Sample]:
    return answered(held_out_prompts(), temperature=1.0)


@cache
def taught_head() -> TrainedHead:
    """It accepts 2.6 to 3.6 tokens a round of these samples, in chains of 3."""
    target, samples = tiny_target(), taught_samples()
    draft_ids = torch.cat([sample.input_ids[sample.turns > 0] for sample in samples]).unique()
    made = random_head(tiny_facts(target), target.identity, draft_ids)
    batch = EAGLE3.prepare(pack_samples(samples, anchors_in_step=1, samples_in_step=1), STEPS)
    step = torch.arange(STEPS)[:, None]
    tokens = batch.pack.input_ids[(batch.anchors + 2 + step).clamp(max=len(batch.pack.input_ids) - 1)]
    wanted = torch.searchsorted(draft_ids, tokens).masked_fill(step >= batch.anchor_steps, -100)
    optimizer = torch.optim.AdamW(made.head.parameters(), lr=3e-3)
    for _ in range(12):
        outputs = EAGLE3.unroll(made.head, target.embedding, batch, STEPS, KernelPlan())
        loss = functional.cross_entropy(made.head.logits(torch.stack(outputs)).flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    made.head.requires_grad_(False)
    return made


def with_store(head: TrainedHead, samples: list[Sample], store: Path) -> TrainedHead:
    """The head with a record of training on these samples, all of them held out."""
    write_store(store, samples, dtype="float32", target_config=head.target_config)
    return with_origin(head, path=str(store), hash=open_store(store).fingerprint, val_fraction=1.0)
