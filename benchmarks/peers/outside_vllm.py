"""Answers prompts with vLLM and a draft head, and counts accepted drafts; run by benchmarks/peers/outside_servers.py.

It runs in vLLM's own environment: python outside_vllm.py REQUEST.json ANSWERS.json
"""

import json
import os
import sys

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def main(request: str, answers: str) -> None:
    import vllm

    with open(request) as file:
        asked = json.load(file)
    llm = vllm.LLM(
        model=asked["target"],
        speculative_config={"method": "eagle3", "model": asked["head"], "num_speculative_tokens": asked["steps"]},
        dtype="float32",
        enforce_eager=True,
        max_model_len=asked["max_length"],
        max_num_seqs=4,
        enable_prefix_caching=False,
        disable_log_stats=False,
    )
    sampling = vllm.SamplingParams(
        temperature=0, max_tokens=asked["max_new_tokens"], stop_token_ids=asked["stop_ids"], detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling)
    counts = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode")}
    result = {
        "version": vllm.__version__,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "verifications": counts["vllm:spec_decode_num_drafts"].value,
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"].value,
    }
    with open(answers, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
