"""What each step costs for a target of Llama-3.1-8B's shape on one GPU: answers, features, training.

    python benchmarks/llama8b_cost.py --out benchmarks/results/llama8b_cost.json

The weights are random (speed does not depend on them), so accept lengths are not measured here. A batch of 128 prompts
of 128 tokens is answered with 256 tokens each; those conversations are then run for features and packed for training.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from random_head import LLAMA_8B, random_head
from result import write_result
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3.answers.generate import generate
from eagle3.features.conversation import Conversation
from eagle3.features.sample import Sample, to_bytes
from eagle3.head.attention import DenseAttention
from eagle3.head.batch import TttBatch, ttt_batch
from eagle3.head.draft_head import DraftHead
from eagle3.head.loss import UnrollLoss
from eagle3.head.unroll import unroll
from eagle3.target.model import Target

PROMPT_TOKENS, ANSWER_TOKENS, PROMPTS, STEPS = 128, 256, 128, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    torch.manual_seed(0)
    target = random_target()
    results: dict[str, Any] = {}
    conversations = measure_answers(target, results)
    samples = measure_features(target, conversations, results)
    embedding, lm_head = target.embedding.float(), target.lm_head
    del target.model.lm_head, target.model.model.layers
    torch.cuda.empty_cache()
    head = random_head(LLAMA_8B).cuda()
    teacher_head = lm_head[head.draft_ids].float()
    results["head_parameters"] = sum(parameter.numel() for parameter in head.parameters())
    for pack_tokens in (4096, 16384):
        count = pack_tokens // (PROMPT_TOKENS + ANSWER_TOKENS)
        batch = ttt_batch(samples[:count], ttt_steps=STEPS).to(torch.device("cuda"))
        results[f"training_{pack_tokens}"] = measure_training(head, embedding, teacher_head, batch)
        print(json.dumps(results[f"training_{pack_tokens}"]))
    print(json.dumps(write_result(out, results), indent=1))


def random_target() -> Target:
    """Llama-3.1-8B's sizes and RoPE."""
    config = LlamaConfig(
        vocab_size=LLAMA_8B.vocab_size,
        hidden_size=LLAMA_8B.hidden_size,
        intermediate_size=LLAMA_8B.intermediate_size,
        num_hidden_layers=32,
        num_attention_heads=LLAMA_8B.num_heads,
        num_key_value_heads=LLAMA_8B.num_kv_heads,
        max_position_embeddings=LLAMA_8B.max_position_embeddings,
        rms_norm_eps=LLAMA_8B.rms_norm_eps,
        rope_parameters=dict(LLAMA_8B.rope_parameters),
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    return Target(
        model=model,
        tokenizer=None,  # type: ignore[arg-type]  # ids are random
        path="random",
        config_hash="",
        checkpoint_dtype="bfloat16",
        decoder=model.model,
    )


def measure_answers(target: Target, results: dict) -> list[Conversation]:
    prompts = torch.randint(1000, 128000, (PROMPTS, PROMPT_TOKENS)).tolist()
    settings = {"temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop_ids": frozenset(), "pad_id": 0}
    generate(target.model, prompts[:8], seeds=list(range(8)), max_new_tokens=8, **settings)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    answers = generate(target.model, prompts, seeds=list(range(PROMPTS)), max_new_tokens=ANSWER_TOKENS, **settings)
    seconds = time.perf_counter() - started
    tokens = sum(len(answer.token_ids) for answer in answers)
    results["answers"] = {"answer_tokens_per_s": round(tokens / seconds), "batch": PROMPTS, "peak_gb": peak_gb()}
    print(json.dumps(results["answers"]))
    conversations = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = torch.tensor(prompt + answer.token_ids)
        conversations.append(Conversation(str(number), ids, (torch.arange(len(ids)) >= PROMPT_TOKENS).long()))
    return conversations


def measure_features(target: Target, conversations: list[Conversation], results: dict) -> list[Sample]:
    extractor = HuggingFaceExtractor(
        target=target, layers=[2, 16, 29], dtype=torch.bfloat16, teachers="answers", batch_tokens=16384
    )
    list(extractor(iter(conversations[:40])))
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    samples = list(extractor(iter(conversations)))
    seconds = time.perf_counter() - started
    tokens = sum(len(conversation.input_ids) for conversation in conversations)
    stored = sum(len(to_bytes(sample)) for sample in samples)
    results["features"] = {
        "tokens_per_s": round(tokens / seconds),
        "bytes_per_token": round(stored / tokens),
        "answer_share": ANSWER_TOKENS / (PROMPT_TOKENS + ANSWER_TOKENS),
        "peak_gb": peak_gb(),
    }
    print(json.dumps(results["features"]))
    return samples


def measure_training(head: DraftHead, embedding: torch.Tensor, teacher_head: torch.Tensor, batch: TttBatch) -> dict:
    """Forward and backward under bf16 autocast with fp32 masters, as trainer=gpu; the optimizer step is not in it."""
    loss_of = UnrollLoss(decay=0.8, normalize="token")

    def step() -> None:
        head.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss, _ = loss_of(head, unroll(head, embedding, batch, STEPS, DenseAttention), teacher_head, batch)
        loss.backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started, repeats = time.perf_counter(), 5
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / repeats
    return {
        "tokens": len(batch.pack.input_ids),
        "documents": len(batch.pack.sample_ids),
        "answer_share": round(len(batch.anchors) / len(batch.pack.input_ids), 3),
        "tokens_per_s": round(len(batch.pack.input_ids) / seconds),
        "anchors_per_s": round(len(batch.anchors) / seconds),
        "peak_gb": peak_gb(),
    }


def peak_gb() -> float:
    return round(torch.cuda.max_memory_allocated() / 1e9, 1)


if __name__ == "__main__":
    main()
