"""Sanity check: the loaded target predicts plain English far better than chance.

Shapes: T tokens, V target vocabulary."""

import logging
import math

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eagle3.target.checkpoint_files import WrongWeights

log = logging.getLogger(__name__)
TEXT = (
    "The train was late again, so we had coffee at the station and talked about the weather. It had rained all night, "
    "and the river was higher than anyone could remember. When the doors opened at last, an old man with a small dog "
    "asked us whether this was the right way to the city. Yes, we said, it is the second stop after the bridge. He "
    "thanked us, sat down by the window and began to read his newspaper."
)
# Untrained weights give a loss of ln V nats per token or more; chance cannot explain a gap this large over some hundred
# tokens. A trained model is better by half of ln V, the small one of the tests by 3.7 of 8.3.
LEAST_GAIN = 1.0


@torch.inference_mode()
def require_health(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Raise InputError unless the model predicts ordinary text better than an untrained one; log what was found."""
    embedding: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    if (largest := int(ids.max())) >= len(embedding):
        raise WrongWeights(
            f"target.path={path}: its tokenizer writes id {largest} in ordinary English text, and its embedding has "
            f"{len(embedding)} rows; put tokenizer and weights of one model into the folder"
        )
    ids = ids.to(embedding.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()  # (T - 1, V)
    loss = float(functional.cross_entropy(logits, ids[0, 1:].to(logits.device)))  # nats per token
    vocab_size = logits.shape[-1]
    untrained = math.log(vocab_size)
    found = (
        f"{loss:.2f} nats per token on ordinary English text (untrained, vocabulary of {vocab_size}: {untrained:.2f})"
    )
    if not loss < untrained - LEAST_GAIN:
        raise WrongWeights(
            f"target.path={path}: {found}: its weights are not what was trained (a quantisation, a damaged file, "
            f"another tokenizer), or it does not know the language; target.check_health=false accepts it anyway"
        )
    log.info("target: %s", found)
