"""Interface for feature extractors, and the task of a worker of the features stage: units become shards."""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Self

from eagle3.features.conversation import Conversation, WorkUnit
from eagle3.features.index import index_bytes, index_name
from eagle3.features.manifest import one_writer, read_index
from eagle3.features.sample import Sample
from eagle3.features.shards import Encoded, ShardWriter, encode
from eagle3.storage.folder import Storage
from eagle3.target.facts import LogitTransform
from eagle3.workers.meter import Progress
from eagle3.workers.task import Keyed, Take

log = logging.getLogger(__name__)

ENCODERS, CLOSERS = 4, 4  # threads


class Extractor:
    """Runs the target over conversations and keeps what training needs; ready inside `with`.

    Fatal problems raise InputError; a conversation that yields no features is counted.
    """

    left_out: Counter[str]  # conversations without a sample, by reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, conversations: Iterator[Conversation]) -> Iterator[Sample]:
        """Yield samples in the order of their conversations, taking some ahead. Called once for each run of them."""
        raise NotImplementedError

    def ask(self, conversation: Conversation) -> "Future[Sample | str]":
        """Begin to make one sample, in another thread; the result is the reason where there can be none."""
        raise NotImplementedError

    def logit_transform(self) -> LogitTransform:
        """Return what turns `lm_head` times the last hidden state into the target's logits."""
        raise NotImplementedError


@dataclass(frozen=True)
class ShardResult:
    """The result of a unit. `index`: the file next to its shard; None if no conversation gave a sample."""

    index: bytes | None
    left_out: dict[str, int]
    logit_transform: LogitTransform


class Sharding:
    """A `Task` with an extractor that has been entered. Items are units by the number of their shard."""

    def __init__(self, extractor: Extractor, storage: Storage) -> None:
        self.extractor, self.storage = extractor, storage

    def __call__(self, take: Take[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        while first := take(1):
            # The extractor takes conversations of several shards ahead, and ends when no more are there.
            yield from self._shards(chain(first, at_hand(take)), progress)

    def _shards(self, items: Iterator[Keyed], progress: Progress) -> Iterator[list[Keyed]]:
        begun, closing = deque[Shard](), deque[Future[Keyed]]()
        with ThreadPoolExecutor(CLOSERS) as threads:
            try:
                for encoded in encoded_ahead(self.extractor(self._conversations(items, begun))):
                    while encoded.sample.id not in begun[0].conversations:
                        closing.append(self._close(threads, begun.popleft(), progress))
                    while len(closing) > CLOSERS or (closing and closing[0].done()):
                        yield [closing.popleft().result()]
                    begun[0].add(encoded)
                    progress.add(ended=1, tokens=len(encoded.sample.input_ids))
                while begun:
                    closing.append(self._close(threads, begun.popleft(), progress))
                while closing:
                    yield [closing.popleft().result()]
            finally:
                for shard in begun:
                    shard.discard()

    def _conversations(self, items: Iterator[Keyed], begun: "deque[Shard]") -> Iterator[Conversation]:
        for number, unit in items:
            assert isinstance(number, int)
            begun.append(Shard(self.storage, number, unit))
            yield from unit.conversations

    def _close(self, threads: ThreadPoolExecutor, shard: "Shard", progress: Progress) -> "Future[Keyed]":
        """Let another thread wait until the shard is stored safely, while the next is written."""
        left_out, self.extractor.left_out = self.extractor.left_out, Counter()
        progress.add(ended=len(shard.conversations) - shard.samples)
        transform = self.extractor.logit_transform()
        return threads.submit(lambda: (shard.number, ShardResult(shard.finish(), dict(left_out), transform)))


def at_hand(take: Take[Keyed]) -> Iterator[Keyed]:
    """Yield the items that have arrived, without waiting for more."""
    while items := take(1, wait=False):
        yield from items


def encoded_ahead(samples: Iterable[Sample]) -> Iterator[Encoded]:
    """Yield samples as bytes, in order; other threads copy and hash the next while one is written."""
    waiting: deque[Future[Encoded]] = deque()
    with ThreadPoolExecutor(ENCODERS) as threads:
        for sample in samples:
            waiting.append(threads.submit(encode, sample))
            while len(waiting) > 2 * ENCODERS or (waiting and waiting[0].done()):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class Shard:
    def __init__(self, storage: Storage, number: int, unit: WorkUnit) -> None:
        self.storage, self.number, self.made_from = storage, number, unit.made_from
        self.conversations = {conversation.id: conversation for conversation in unit.conversations}
        self.writer: ShardWriter | None = None

    @property
    def samples(self) -> int:
        return len(self.writer.entries) if self.writer else 0

    def add(self, encoded: Encoded) -> None:
        self.writer = self.writer or ShardWriter(self.storage, self.number)
        made_of = self.conversations[encoded.sample.id]
        self.writer.add(encoded, source=made_of.source, whole=made_of.whole, answer_sha256=made_of.sha256)

    def finish(self) -> bytes | None:
        """Return the shard's index. A worker that was considered lost may have finished the same shard meanwhile."""
        if self.writer is None:
            return None
        name = index_name(self.writer.name)
        with one_writer(self.storage, name):
            try:
                return self.writer.finish(self.made_from)
            except FileExistsError:
                index = read_index(self.storage, name)
                if index.facts.made_from != self.made_from or not self.conversations.keys() >= {*index.ids()}:
                    raise
            finally:
                self.discard()
        log.warning("%s/%s exists already, from another worker or run: it is kept", self.storage.location, name)
        return index_bytes(index)

    def discard(self) -> None:
        if self.writer:
            self.writer.discard()
