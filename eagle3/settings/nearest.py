"""Keys and options that somebody may have meant."""

from collections.abc import Sequence
from difflib import get_close_matches

LIKE = 0.7  # difflib's ratio, from which two names are one with a slip
OTHER_NAMES = {  # what Lightning, Hugging Face and other trainers call a key, stage or option
    "batch_size": ("data.pack_tokens", "features.batch_tokens"),
    "epochs": ("trainer.max_epochs",),
    "gradient_accumulation_steps": ("trainer.accumulate_grad_batches",),
    "kl": ("soft_cross_entropy",),
    "learning_rate": ("optim.lr",),
    "max_length": ("data.max_tokens",),
    "num_steps": ("steps",),
    "num_workers": ("data.readers", "prompts.processes"),
    "output_dir": ("out_dir", "hydra.run.dir"),
    "responses": ("sampling", "answers"),
    "resume": ("ckpt_path",),
    "temperature": ("sampling.temperature", "compare.samplings"),
    "warmup_ratio": ("optim.warmup_fraction",),
}


def did_you_mean(given: str, known: Sequence[str]) -> str:
    """Return ` (did you mean …?)` with the nearest names, or nothing: a key without its groups or in a wrong group
    finds the keys of its name."""
    known = [key for key in known if key != given]  # a YAML file may set a key that nothing takes
    dotted = given.replace("/", ".")
    word = dotted.rpartition(".")[2].lower()
    by_word = {key.rpartition(".")[2]: key for key in reversed(known)}
    same_word = [key for key in known if f".{key}".endswith(f".{word}")]
    alike = (
        [key for key in OTHER_NAMES.get(word, ()) if key in known][:1]
        or (same_word if len(same_word) <= 2 else [])
        or get_close_matches(dotted.lower(), known, n=1, cutoff=LIKE)
        or [by_word[near] for near in get_close_matches(word, list(by_word), n=1, cutoff=LIKE)]
    )
    if "/" in given and dotted not in known:  # a group, not a key
        alike = [key.replace(".", "/") for key in alike]
    return f" (did you mean {' or '.join(alike)}?)" if alike else ""
