"""Keys and options that somebody may have meant."""

from collections.abc import Sequence
from difflib import get_close_matches

LIKE = 0.7  # difflib's ratio, from which two names are one with a slip
OTHER_NAMES = {  # of a key, stage or option: what Lightning, Hugging Face and other trainers call it
    "callbacks.last.every_n_steps": ("save_steps",),
    "checkpoint": ("ckpt_path",),
    "ckpt_path": ("resume", "resume_from_checkpoint"),
    "data.max_tokens": ("max_length", "max_seq_length"),
    "data.only_sources": ("sources",),
    "data.pack_tokens": ("batch_size", "per_device_train_batch_size"),
    "data.prefetch": ("prefetch_factor",),
    "data.readers": ("num_workers",),
    "draft_tokens": ("speculative_num_draft_tokens",),
    "draft_window": ("speculative_draft_window_size",),
    "head": ("draft_model", "draft_model_path", "speculative_draft_model_path"),
    "huggingface": ("hf", "transformers"),
    "launch.tp_size": ("tensor_parallel_size", "tp"),
    "openai": ("vllm",),
    "optim.lr": ("learning_rate",),
    "optim.warmup_fraction": ("warmup_ratio", "warmup_steps"),
    "out_dir": ("output_dir",),
    "sampling": ("responses",),
    "sampling.temperature": ("temperature",),
    "soft_cross_entropy": ("kl", "cross_entropy"),
    "steps": ("num_steps", "speculative_num_steps"),
    "target.path": ("model_name_or_path", "target_model_path"),
    "topk": ("speculative_eagle_topk",),
    "trainer.accumulate_grad_batches": ("gradient_accumulation_steps",),
    "trainer.devices": ("gpus", "num_gpus"),
    "trainer.gradient_clip_val": ("max_grad_norm",),
    "trainer.log_every_n_steps": ("logging_steps",),
    "trainer.max_epochs": ("epochs", "num_epochs", "num_train_epochs"),
    "trainer.precision": ("bf16", "fp16"),
    "trainer.val_check_interval": ("eval_steps",),
    "ttt_steps": ("ttt_length",),
    # where the key above with the same other name is not known
    "answers": ("responses",),
    "compare.samplings": ("temperature", "temperatures", "top_p", "top_k"),
    "features.batch_tokens": ("batch_size",),
    "prompts.processes": ("num_proc", "num_workers"),
    "hydra.run.dir": ("output_dir",),
}


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return ` (did you mean …?)` with the nearest name, or nothing. A key without its groups finds those with it; a
    key in a wrong group finds the one or two of its name."""
    known = [key for key in known if key != given]  # a YAML file may set a key that nothing takes
    if "/" in given:  # a group
        if (key := given.replace("/", ".")) in known:
            return f" (did you mean {key}?)"
        known = [key.replace(".", "/") for key in known]
    word = given.rpartition(".")[2]
    inside, named = ([key for key in known if key.endswith(f".{end}")] for end in (given, word))
    alike = (
        _by_another_name(word.lower(), known)
        or inside[:3]
        or (named if len(named) <= 2 else [])
        or get_close_matches(given, known, n=1, cutoff=LIKE)
        or get_close_matches(given.lower(), known, n=1, cutoff=LIKE)
        or _by_last_word(word, known)
    )
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""


def _by_another_name(word: str, known: Sequence[str]) -> list[str]:
    return [key for key, others in OTHER_NAMES.items() if word in others and key in known][:1]


def _by_last_word(word: str, known: Sequence[str]) -> list[str]:
    """Find the key that `weight_decya` means, in whatever group."""
    by_word = {key.rpartition(".")[2]: key for key in reversed(known)}
    return [by_word[word] for word in get_close_matches(word, list(by_word), n=1, cutoff=LIKE)]
