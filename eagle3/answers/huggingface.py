"""The reference answerer: the target in this process, by Hugging Face, in batches of prompts of similar length."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, Unpack

from eagle3.adapters.transformers import require_cache
from eagle3.answers.answerer import Answerer, Conversation
from eagle3.answers.generate import alone_because, generate
from eagle3.errors import first_line
from eagle3.settings.precomputing import HuggingFaceSettings, Sampling
from eagle3.target.batches import batches_by_tokens
from eagle3.target.model import Target
from eagle3.workers.meter import Progress
from eagle3.workers.task import Take

log = logging.getLogger(__name__)


class HuggingFaceAnswerer(Answerer):
    """Keeps `window` conversations in flight; answered turn after turn, shortest prompts first."""

    name = "huggingface"

    def __init__(self, *, target: Target, sampling: Sampling, **settings: Unpack[HuggingFaceSettings]) -> None:
        require_cache(target.model, target.path)
        if reason := alone_because(target.model):
            log.info("prompts are answered one at a time, whatever answers.batch_size is: %s", reason)
        self.target, self.sampling, self.window = target, sampling, settings["window"]
        self.most = {"most_rows": settings["batch_size"], "most_tokens": settings["batch_tokens"]}

    def __call__(self, take: Take[Conversation], progress: Progress) -> Iterator[list[Conversation]]:
        while window := take(self.window):
            yield from self._answer_window(window, progress)

    def _answer_window(self, window: Sequence[Conversation], progress: Progress) -> Iterator[list[Conversation]]:
        """Yield conversations batch by batch, as soon as they have ended."""
        yield from _ended(window, progress)
        while waiting := [each for each in window if each.waiting]:
            alike: dict[Any, list[Conversation]] = {}
            for each in sorted(waiting, key=self._padded_length):
                alike.setdefault(self._sampled(each), []).append(each)
            for group in alike.values():
                for batch in batches_by_tokens(group, self._padded_length, **self.most):
                    self._answer_batch(batch, progress)
                    yield from _ended(batch, progress)

    def _padded_length(self, conversation: Conversation) -> int:
        sampling, _ = self._sampled(conversation)
        return len(conversation.prompt_ids) + sampling.max_new_tokens

    def _sampled(self, conversation: Conversation) -> tuple[Sampling, frozenset[int]]:
        """Return how the next tokens are chosen, and what ends them."""
        return conversation.sampling or self.sampling, conversation.stop_ids or self.target.stop_ids

    def _answer_batch(self, batch: list[Conversation], progress: Progress) -> None:
        """Answer one turn of each. After a failure the prompts are answered one at a time."""
        sampling, stop_ids = self._sampled(batch[0])
        try:
            answers = generate(
                self.target.model,
                [each.prompt_ids for each in batch],
                seeds=[each.seed for each in batch],
                stop_ids=stop_ids,
                pad_id=self.target.tokenizer.pad_token_id or 0,
                count_tokens=lambda tokens: progress.add(tokens=tokens),
                **asdict(sampling),
            )
        except Exception as error:  # whatever it is, the other answers must not be lost
            reason = f"{type(error).__name__} ({first_line(error)[:200]})"
        else:
            for each, answer in zip(batch, answers, strict=True):
                each.answer(answer)
            return
        if len(batch) > 1:
            log.warning("a batch of %d failed (%s); one prompt at a time (see answers.batch_size)", len(batch), reason)
            for each in batch:
                self._answer_batch([each], progress)
        else:
            batch[0].fail(reason)


def _ended(conversations: Sequence[Conversation], progress: Progress) -> Iterator[list[Conversation]]:
    if ended := [each for each in conversations if not each.waiting]:
        progress.add(ended=len(ended))
        yield ended
