"""The reference extractor: the target in this process, by Hugging Face.

Shapes: J teacher rows, H hidden size.
"""

from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle3.features.conversation import Conversation, filled
from eagle3.features.sample import Sample, positions_with_teacher, stored_rows
from eagle3.features.task import Extractor
from eagle3.target.batches import batches_by_tokens
from eagle3.target.capture import Capture, Features, read_logit_transform
from eagle3.target.facts import LogitTransform
from eagle3.target.model import Target

BATCHES_IN_WINDOW = 16  # samples sorted by length together, so that little of a batch is padding


def conversation_length(conversation: Conversation) -> int:
    return len(conversation.input_ids)


class HuggingFaceExtractor(Extractor):
    """Batches are formed by length, inside windows of many batches."""

    def __init__(
        self, *, target: Target, layers: list[int], dtype: torch.dtype, teachers: str, batch_tokens: int
    ) -> None:
        self.target, self.dtype, self.teachers, self.batch_tokens = target, dtype, teachers, batch_tokens
        self.capture = Capture(target, layers)
        self.left_out: Counter[str] = Counter()
        self.thread, self.asked = ThreadPoolExecutor(1), deque[tuple[Conversation, Future[Sample | str]]]()

    def __exit__(self, *error: object) -> None:
        self.thread.shutdown(cancel_futures=True)
        for _, future in self.asked:
            future.cancel()

    def logit_transform(self) -> LogitTransform:
        return read_logit_transform(self.target)

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        for window in filled(conversations, conversation_length, self.batch_tokens * BATCHES_IN_WINDOW):
            samples = dict(self._extracted(window))
            yield from (samples[number] for number in range(len(window)))

    def ask(self, conversation: Conversation) -> "Future[Sample | str]":
        future: Future[Sample | str] = Future()
        self.asked.append((conversation, future))
        self.thread.submit(self._answer)
        return future

    def _answer(self) -> None:
        """Extract together what has been asked for by now, as far as it fits a window; a later call does the rest."""
        window, tokens = list[tuple[Conversation, Future[Sample | str]]](), 0
        while self.asked and tokens < self.batch_tokens * BATCHES_IN_WINDOW:
            window.append(self.asked.popleft())
            tokens += conversation_length(window[-1][0])
        window = [each for each in window if each[1].set_running_or_notify_cancel()]
        try:
            for number, sample in self._extracted([conversation for conversation, _ in window]):
                window[number][1].set_result(sample)
        except Exception as error:
            for future in (future for _, future in window if not future.done()):
                future.set_exception(error)

    def _extracted(self, conversations: list[Conversation]) -> Iterator[tuple[int, Sample]]:
        """Yield samples with the numbers of their conversations, batch by batch."""

        def length(number: int) -> int:
            return conversation_length(conversations[number])

        by_length = sorted(range(len(conversations)), key=length)
        longest_first = batches_by_tokens(reversed(by_length), length, most_tokens=self.batch_tokens)
        for numbers in longest_first:
            numbers.reverse()
            batch = [conversations[number] for number in numbers]
            padded = pad_sequence([item.input_ids for item in batch], batch_first=True)
            captured = self.capture(padded, [len(item.input_ids) for item in batch])
            for number, item, features in zip(numbers, batch, captured, strict=True):
                yield number, self._sample(item, features)

    def _sample(self, item: Conversation, features: Features) -> Sample:
        has_teacher = positions_with_teacher(item.turns, self.teachers)
        last = features.last_hidden_state[has_teacher.to(features.last_hidden_state.device)]
        argmax = self._teacher_argmax(last)
        layers = len(self.capture.layers)
        return Sample(
            id=item.id,
            input_ids=item.input_ids,
            turns=item.turns,
            aux_hidden_states=stored_rows(features.aux_hidden_states, self.dtype, layers=layers, sample_id=item.id),
            last_hidden_state=stored_rows(last, self.dtype, layers=1, sample_id=item.id),
            teacher_argmax=argmax.cpu(),
            has_teacher=has_teacher,
        )

    @torch.no_grad()
    def _teacher_argmax(self, last: Float[Tensor, "J H"]) -> Int[Tensor, " J"]:
        """Return the argmax over the whole vocabulary, 1,024 rows at a time; no LogitTransform changes it."""
        head = self.target.lm_head
        chunks = last.to(head.device).split(1024)
        return torch.cat([torch.nn.functional.linear(chunk, head).float().argmax(-1) for chunk in chunks])
