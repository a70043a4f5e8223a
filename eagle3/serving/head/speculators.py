"""The layout of vLLM's speculators, written: what `vllm serve` and the speculators' Eagle3DraftModel load.

Keys and names were held against speculators 0.9.0 (models/eagle3, config.py) and vLLM 0.33.0 (models/llama_eagle3.py,
transformers_utils/configs/speculators); files.py reads it. Layers are counted as the project does: by their inputs.

Shapes: D draft vocabulary.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from eagle3.engine.draft import Draft
from eagle3.errors import InputError
from eagle3.head.draft_head import DraftHead, HeadConfig
from eagle3.head.eagle3 import EAGLE3, OPTIONS
from eagle3.head_files.files import LAYER_IDS, MODEL_TYPE, NESTED, SPECULATORS
from eagle3.head_files.format import exported_tensors
from eagle3.storage.files import atomic_write, write_json
from eagle3.target.files import DTYPES
from eagle3.target.identity import is_hub_id

VERSION = "0.9.0"  # of the speculators, whose layout this is
OLDER_ROPE = ("rope_theta", "rope_scaling")  # rope_parameters say the same to transformers 5, which both run on
IN_SGLANG = "export it with format=sglang"


def require_in_layout(kind: str, draft: Draft) -> None:
    """Raise InputError for a kind of head, or a way of drafting, that the layout has no words for."""
    if kind != EAGLE3.name:
        raise InputError(f"format=speculators: vLLM reads no heads of kind {kind} in this layout; {IN_SGLANG}")
    if draft.topk != 1:
        raise InputError(
            f"topk={draft.topk} with format=speculators: the layout holds chains, not trees; set topk=1, or {IN_SGLANG}"
        )


def save_speculators(
    directory: Path, head: DraftHead, capture_layers: list[int], dtype: str, *, target: str, steps: int
) -> None:
    """Write config.json and model.safetensors in the target's `dtype`; `steps` are the drafts in a row that vLLM takes
    where it is not told."""
    config = speculators_config(head.config, capture_layers, dtype, target=target, steps=steps)
    write_json(directory / "config.json", config)
    with atomic_write(directory / "model.safetensors") as file:
        file.write(save(speculators_tensors(head, DTYPES[dtype]), {"format": "pt"}))


def speculators_config(
    config: HeadConfig, capture_layers: list[int], dtype: str, *, target: str, steps: int
) -> dict[str, Any]:
    """Return config.json. A target on this machine's disk is left unnamed: vLLM takes a repository's name there.

    There is no `model_type`: vLLM takes the folder for this layout only without it, and speculators leaves it out."""
    elsewhere = (*OLDER_ROPE, *OPTIONS, "draft_vocab_size")
    layer = {key: value for key, value in EAGLE3.to_json(config).items() if key not in elsewhere}
    return {
        "architectures": ["Eagle3DraftModel"],
        MODEL_TYPE: SPECULATORS,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target if is_hub_id(target) else None, "architectures": []},
        },
        NESTED: layer,
        "draft_vocab_size": config.draft_vocab_size,
        LAYER_IDS: capture_layers,
        "norm_before_residual": False,  # left out, vLLM takes true
        **{option: getattr(config, option) for option in OPTIONS},
        "dtype": dtype,
    }


def speculators_tensors(head: DraftHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights by the speculators' names. Both servers share the target's embedding where there is none."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in exported_tensors(head, dtype).items()}
