"""What a check of a head finds, and the table of it. The checks are in check_*.py, their list in doctor.py.

A check is a function that yields its problems; silence means that what its docstring says is so. What a message says
of SGLang was read in the source of 0.5.17: models/llama_eagle3.py, models/llama.py, configs/model_config.py,
speculative/eagle_worker_v2.py.

Shapes: V target vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from eagle3.errors import InputError
from eagle3.serving.head.files import MAKE_HEAD, HeadFiles
from eagle3.target.facts import head_facts
from eagle3.target.model import Target

Level = Literal["ok", "skipped", "warning", "error"]
MAKE_AGAIN = f"get the trainer's files again, or export again: {MAKE_HEAD}"


@dataclass(frozen=True)
class Finding:
    """`message` says what is wrong and the way out."""

    check: str
    level: Level
    message: str


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What the checks need to know of the target; `fingerprint` and `embedding` are None where it was not at hand."""

    config: dict[str, Any]  # head_facts
    dtype: str | None
    fingerprint: dict[str, str | None] | None
    embedding: Float[Tensor, "V H"] | None


Problem = tuple[Level, str]
Check = Callable[[HeadFiles, TargetFacts], Iterator[Problem]]


def target_facts(target: Target, template_hash: str | None) -> TargetFacts:
    """`template_hash` is that of the template in use, which may come from a file."""
    return TargetFacts(
        config=head_facts(target.text_config, len(target.lm_head)),
        dtype=target.checkpoint_dtype,
        fingerprint=asdict(target.identity.with_template(template_hash)),
        embedding=target.embedding,
    )


def table(findings: list[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{item.level:<8} {item.check:<{width}}  {item.message}" for item in findings)


def has_errors(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def require_no_errors(findings: list[Finding], head: str) -> None:
    """For the end of a run that has shown the table."""
    errors = [finding.check for finding in findings if finding.level == "error"]
    if errors:
        raise InputError(f"head={head} must not be served: {', '.join(errors)}: see the errors in the table above")
