"""Real tokenizers of each class that chat models use, trained on the bundled prompts in a second."""

import json
from functools import cache

from stores import ASSETS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<unk>", "<s>", "</s>"]


def texts() -> list[str]:
    lines = (ASSETS / "prompts" / "train.jsonl").read_text().splitlines()[:400]
    return [message["content"] for line in lines for message in json.loads(line)["messages"]]


def byte_level(*, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_legacy() -> Tokenizer:
    """Llama 2's and Phi-3's: a space before every piece of text, also behind a special token."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return tokenizer


def sentencepiece_plain() -> Tokenizer:
    """Gemma's: no space is put anywhere."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    return tokenizer


KINDS = {
    "byte-level": byte_level,
    "byte-level with prefix": lambda: byte_level(prefix=True),
    "SentencePiece, legacy": sentencepiece_legacy,
    "SentencePiece, plain": sentencepiece_plain,
    "Metaspace, first": lambda: metaspace("first"),
    "Metaspace, always": lambda: metaspace("always"),
    "Metaspace, never": lambda: metaspace("never"),
}


@cache
def _trained(kind: str) -> str:
    tokenizer = KINDS[kind]()
    learner = byte_level() if kind.startswith("byte-level") else Tokenizer(models.BPE(unk_token="<unk>"))
    if not kind.startswith("byte-level"):  # SentencePiece's words begin with a space, and no line goes on in the next
        lines = pre_tokenizers.Split("\n", "isolated")
        learner.pre_tokenizer = pre_tokenizers.Sequence([lines, pre_tokenizers.Metaspace()])
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind.startswith("byte-level") else map(chr, range(32, 127))
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=SPECIAL, initial_alphabet=[*alphabet, "\n", "▁"], show_progress=False
    )
    learner.train_from_iterator(texts(), trainer)
    tokenizer.model = learner.model
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer.to_str()


def build_tokenizer(kind: str, control: list[str]) -> PreTrainedTokenizerFast:
    backend = Tokenizer.from_str(_trained(kind))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens(control, special_tokens=True)
    return tokenizer
