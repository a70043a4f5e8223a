"""Findings of the checks of an exported head, and their table. All checks are listed in checks.py.

A check is a function that yields its problems; silence means that what its docstring says is so. What a message says
of SGLang was read in the source of 0.5.17: models/llama_eagle3.py, models/llama.py, configs/model_config.py,
speculative/eagle_worker_v2.py.

Shapes: V target vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from eagle3.errors import InputError, escaped
from eagle3.head_files.files import MAKE_HEAD, HeadFiles
from eagle3.target.facts import TargetConfig
from eagle3.target.identity import TargetIdentity
from eagle3.target.model import Target

Level = Literal["ok", "skipped", "warning", "error"]
MAKE_AGAIN = f"get the trainer's files again, or export again: {MAKE_HEAD}"


@dataclass(frozen=True)
class Finding:
    """`message` says what is wrong and how to fix it."""

    check: str
    level: Level
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", escaped(self.message))  # it may quote a file


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Facts about the target that the checks need; None: unavailable.

    `launch_dtype` is that of the server that is about to start; None: no server starts now."""

    config: TargetConfig
    dtype: str | None
    identity: TargetIdentity | None
    embedding: Float[Tensor, "V H"] | None
    launch_dtype: str | None = None


Problem = tuple[Level, str]
Check = Callable[[HeadFiles, TargetFacts], Iterator[Problem]]


def target_facts(target: Target, template_hash: str | None) -> TargetFacts:
    """Gather the facts of a loaded target; `template_hash` is of the template in use, which may come from a file."""
    return TargetFacts(
        config=target.facts,
        dtype=target.checkpoint_dtype,
        identity=target.identity.with_template(template_hash),
        embedding=target.embedding,
    )


def findings_table(findings: list[Finding]) -> str:
    width = max(len(finding.check) for finding in findings)
    return "\n".join(f"{item.level:<8} {item.check:<{width}}  {item.message}" for item in findings)


def has_errors(findings: list[Finding]) -> bool:
    return any(finding.level == "error" for finding in findings)


def require_no_errors(findings: list[Finding], head: str) -> None:
    """Raise InputError if there is an error, at the end of a run that has shown the table."""
    errors = dict.fromkeys(finding.check for finding in findings if finding.level == "error")
    if errors:
        raise InputError(f"head={head} must not be served: {', '.join(errors)}: see the errors in the table above")
