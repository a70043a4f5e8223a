"""What a head of another trainer was trained to be, and training, decoding and SGLang do not compute."""

from collections.abc import Iterator

from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.check_config import check_model, check_norm_output, check_options
from eagle3.head_files.check_tensors import check_d2t, check_embedding, check_tensors
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.finding import Check, TargetFacts
from eagle3.head_files.format import read_kind

CHECKS: tuple[Check, ...] = (check_model, check_options, check_tensors, check_embedding, check_d2t)


def not_computed(files: HeadFiles, facts: TargetFacts, *more: Check) -> Iterator[str]:
    """Yield what is wrong by these checks, and `more`; nothing for heads of a kind of their own."""
    if read_kind(files) is EAGLE3:
        for check in (*CHECKS, *more):
            yield from (message for level, message in check(files, facts) if level == "error")


def doubtful(files: HeadFiles, facts: TargetFacts) -> Iterator[str]:
    """Yield what is not computed, and what the files leave open; nothing for heads of a kind of their own."""
    yield from not_computed(files, facts)
    if read_kind(files) is EAGLE3:
        yield from (message for _, message in check_norm_output(files, facts))
