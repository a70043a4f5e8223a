"""The target as a source of prompts: samples in rounds, until enough of them pass what the prompts stage checks."""

import logging
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from eagle3.answers.build import answer_settings, answer_task, build_chat, prompt_limit, prompts_ahead
from eagle3.errors import InputError
from eagle3.prompts.licenses.terms import SourceTerms, read_card, read_card_license
from eagle3.prompts.reading.shapes import build_layout
from eagle3.prompts.reading.sources import Source
from eagle3.settings.precomputing import PrecomputeRun, Sampling
from eagle3.settings.prompts import FromTargetSettings
from eagle3.target.files import TargetFiles
from eagle3.target.identity import public_name
from eagle3.target.stored import StoredTarget
from eagle3.target_prompts.answered import answered_with
from eagle3.target_prompts.store import SOURCE, Row, SampleStore, sample_id
from eagle3.target_prompts.user_turn import require_user_turns
from eagle3.target_prompts.written import Sample, Writing
from eagle3.workers.meter import Meter
from eagle3.workers.task import Workers

log = logging.getLogger(__name__)

LICENSE = "output of the target"  # where its model card names none
# Settings that do not change a sample, only how many there are and what is said of them.
COUNTS = ("limit", "share", "license", "least_kept")
FIRST_SHARE = 0.8  # of samples that become prompts, before any is known
SPARE = 1.1
LEAST_SAMPLES = 64  # of a round
NAMED = 4  # reasons in an error


def check_target_prompts(run: PrecomputeRun, target: TargetFiles) -> None:
    """Raise InputError if this target cannot write prompts with these settings; its weights are not loaded."""
    if run.answered_by == "imported":
        raise InputError(
            "answers=imported keeps answers that prompts came with, and prompts=from_target brings none; leave one out"
        )
    own = run.prompts.from_target
    assert own is not None
    _longest_before(target, own)
    require_user_turns(build_chat(run.chat, target), own.system_prompts)


def _longest_before(target: TargetFiles, own: FromTargetSettings) -> int | None:
    try:
        return prompt_limit(target.text_config, own.max_new_tokens, None)
    except InputError as error:
        raise InputError(f"prompts.from_target.{str(error).removeprefix('sampling.')}") from None


class TargetPrompts:
    """A `GrowingSource`; its files are in DIR/target_prompts."""

    def __init__(self, run: PrecomputeRun, target: StoredTarget, workers: Workers) -> None:
        assert run.prompts.from_target is not None
        self.own = run.prompts.from_target
        self.limit, self.workers, self.run = run.prompts.limit, workers, run
        chat = build_chat(run.chat, target)
        self.name, self.license = target.path, self.own.license or target_license(target) or LICENSE
        self.writing = Writing(
            sampling=Sampling(
                temperature=self.own.temperature,
                top_p=self.own.top_p,
                top_k=0,
                max_new_tokens=self.own.max_new_tokens,
            ),
            system_prompts=tuple(self.own.system_prompts),
            keep_system_prompts=self.own.keep_system_prompts,
            turns=self.own.turns,
            seed=self.own.seed,
            answer_seed=run.sampling.seed,
            answer_last="answers" in run.stages,
            longest_before=_longest_before(target, self.own),
        )
        settings = asdict(self.own)
        self.sampled = {key: value for key, value in settings.items() if key not in COUNTS}
        answers = answer_settings(run, chat)
        between = {**(answers.sampling or {}), "seed": answers.seed} if self.own.turns > 1 else None
        sampled_with = {
            "answers": run.answered_by, "chat": chat.settings, "prompts.from_target": self.sampled,
            "sampling": between,
        }  # fmt: skip
        identity = target.identity.with_template(chat.settings["template_hash"])
        self.store = SampleStore(run.folder, identity, sampled_with)
        self.answered_with = answered_with(identity, answers)
        self.before: int | None = None  # prompts kept before the last round of this run

    def source(self) -> Source:
        folder = str(self.store.folder.absolute())
        credit = f"Written by {public_name(self.name)} itself."
        terms = SourceTerms(
            name=SOURCE, license=self.license, license_from="config" if self.own.license else "target",
            card_license=None, known_as=(SOURCE,), attribution=credit, link=None, citation=None,
        )  # fmt: skip
        return Source(
            key="prompts.from_target",
            path=folder,
            files=[str(file.absolute()) for file in self.store.files],
            name=SOURCE,
            terms=terms,
            limit=None,
            id_prefix=f"{SOURCE}/",
            shape=build_layout(None, None),
            written_by={"target": self.name, **self.sampled},
        )

    def wanted(self, others: int) -> int:
        if self.own.share is None:
            return min(filter(None, (self.own.limit, self.limit)))
        by_share = round(others * self.own.share / (1 - self.own.share))
        return max(1, by_share if self.limit is None else min(by_share, round(self.limit * self.own.share)))

    def grow(self, kept: int, wanted: int, refused: Counter[str]) -> None:
        if not self.store.is_unfinished:
            self.store.begin(self._samples(kept, wanted, refused))
        elif not self.store.files:  # fewer prompts may be wanted than when the first round began
            self.store.shorten(first_samples(wanted))
        self.before = kept
        self._sample()

    def _samples(self, kept: int, wanted: int, refused: Counter[str]) -> int:
        """Return the size of the next round. Raises InputError if the last one brought too little."""
        if not self.store.samples:
            return first_samples(wanted)
        share = kept / self.store.samples
        if self.before is not None:
            share = (kept - self.before) / self.store.rounds[-1].samples
            if share < self.own.least_kept:
                raise self._out_of_reach(kept, wanted, share, refused)
        samples = math.ceil((wanted - kept) / max(share, self.own.least_kept) * SPARE)
        return max(LEAST_SAMPLES, min(samples, 4 * wanted))

    def _out_of_reach(self, kept: int, wanted: int, share: float, refused: Counter[str]) -> InputError:
        reasons = ", ".join(f"{reason}: {count:,}" for reason, count in refused.most_common(NAMED))
        key = "prompts.limit" if self.own.limit is None and self.own.share is None else "prompts.from_target.limit"
        fewer = f"ask for fewer ({key}={kept}), " if kept else ""
        return InputError(
            f"prompts=from_target: {wanted:,} prompts are out of reach: {kept:,} of {self.store.samples:,} samples are "
            f"prompts ({reasons}), and of the last {self.store.rounds[-1].samples:,} only {share:.1%} are new "
            f"(prompts.from_target.least_kept={self.own.least_kept:g}); {fewer}raise prompts.from_target.temperature, "
            f"give several system_prompts there, or loosen the filter that drops most; the samples are kept"
        )

    def _sample(self) -> None:
        """Make the samples of the last round that are missing."""
        numbers, failed, done = self.store.missing(), list[Row](), 0
        items = ((number, Sample(number, self.writing)) for number in numbers)
        answered = self.own.turns > 1 or self.writing.answer_last
        desc = "user turns and answers" if answered else "user turns"
        with Meter(len(numbers), desc=desc, unit="sample", of="tokens") as progress:
            for finished in self.workers(
                answer_task(self.run), items, progress, ahead=prompts_ahead(self.run), total=len(numbers)
            ):
                rows = [self._row(number, result) for number, result in finished]
                self.store.append(row for row in rows if not row["failed"])
                failed += [row for row in rows if row["failed"]]
                done += len(rows)
                if len(failed) > max(LEAST_SAMPLES, done / 2):
                    raise _no_answers(failed, done)
        if len(failed) > done / 2:
            raise _no_answers(failed, done)
        self.store.append(failed)
        rows = self.store.finish()
        reasons = Counter(row["refused"] for row in rows if row["refused"])
        log.info("user turns: round %d, %d samples, left out: %s", len(self.store.rounds), len(rows), dict(reasons))
        if ended := Counter(row["ended"] for row in rows if row["ended"]):
            log.info("user turns: conversations that end before prompts.from_target.turns: %s", dict(ended))

    def _row(self, number: Any, result: dict[str, Any]) -> Row:
        origin = {"source": SOURCE, "written_by": self.name, "seed": self.own.seed, "answered_with": self.answered_with}
        return {"id": sample_id(number), "number": number, **origin, **result}


def first_samples(wanted: int) -> int:
    """Return the size of the first round."""
    return max(LEAST_SAMPLES, math.ceil(wanted / FIRST_SHARE))


def _no_answers(failed: list[Row], done: int) -> InputError:
    reason, count = Counter(row["failed"] for row in failed).most_common(1)[0]
    return InputError(
        f"prompts=from_target: {len(failed)} of {done} samples were not answered ({count} times: {reason}); the server "
        f"must take prompts as token ids and return token ids (SGLang, or vLLM with answers=openai); what was sampled "
        f"is kept"
    )


def target_license(target: TargetFiles) -> str | None:
    """Return the licence in the target's model card."""
    return read_card_license(read_card(str(target.folder))[0])
