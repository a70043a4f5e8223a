"""Keys and options that somebody may have meant."""

from collections.abc import Sequence
from difflib import get_close_matches

LIKE = 0.7  # difflib's ratio, from which two names are one with a slip
OTHER_NAMES = {  # what Lightning, Hugging Face and other trainers call it
    "batch_size": "data.pack_tokens",
    "per_device_train_batch_size": "data.pack_tokens",
    "num_workers": "data.readers",
    "prefetch_factor": "data.prefetch",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "learning_rate": "optim.lr",
    "warmup_ratio": "optim.warmup_fraction",
    "gpus": "trainer.devices",
    "num_gpus": "trainer.devices",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "max_grad_norm": "trainer.gradient_clip_val",
    "resume_from_checkpoint": "ckpt_path",
    "output_dir": "hydra.run.dir",
    "model_name_or_path": "target.path",
    "target_model_path": "target.path",
    "ttt_length": "ttt_steps",
    "temperature": "responses.temperature",
    "num_steps": "steps",
    "speculative_num_steps": "steps",
    "speculative_eagle_topk": "topk",
    "speculative_num_draft_tokens": "draft_tokens",
    "tensor_parallel_size": "launch.tp_size",
}


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return ` (did you mean …?)` with the nearest name, or nothing. A key without its groups finds those with it."""
    known = [key for key in known if key != given]  # a YAML file may set a key that nothing takes
    other = OTHER_NAMES.get(given.rpartition(".")[2])
    if other in known or other == "hydra.run.dir":
        return f" (did you mean {other}?)"
    if "/" in given:  # a group
        known = [key.replace(".", "/") for key in known]
    inside = [key for key in known if key.endswith(f".{given}")]
    alike = inside[:3] or get_close_matches(given, known, n=1, cutoff=LIKE) or _by_last_word(given, known)
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


def _by_last_word(given: str, known: Sequence[str]) -> list[str]:
    """Of `weight_decya`, or of a key below another group."""
    by_word = {key.rpartition(".")[2]: key for key in reversed(known)}
    return [by_word[word] for word in get_close_matches(given.rpartition(".")[2], list(by_word), n=1, cutoff=LIKE)]
