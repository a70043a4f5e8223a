"""training.json beside an exported head: what it was trained on and with, and what it was measured to accept.

Hashes, paths and numbers: nothing of the text that the head learned from.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from eagle3.errors import InputError
from eagle3.head.draft_head import HeadConfig
from eagle3.storage import write_json

FILE = "training.json"
FORMAT_VERSION: Literal[1] = 1
NO_FIELDS = ("str", "list[str]", "[key]")  # in the places that pydantic names


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """The target model that the features were made from: where it lay and what it was."""

    name: str
    revision: str | None = None
    config_hash: str
    tokenizer_hash: str
    template_hash: str | None
    weights_hash: str


@dataclass(frozen=True, kw_only=True)
class StoreRecord:
    """The feature store of the training (several stores joined: their paths) and the share held out for validation."""

    path: str | list[str]
    hash: str
    val_fraction: float


@dataclass(frozen=True, kw_only=True)
class MeasuredAcceptLength:
    """An accept length by our own decoder, with the prompts and the settings that it was measured on.

    `standard_error` is over prompts, None where it is infinite. `accept_length_kept` leaves out what was made behind a
    stop token. `per_depth[d - 1]` is the share of verifications that accepted at least d drafts. `lossless` is the
    share of answers that are the target's own greedy ones, None where they were sampled. `from_validation` says that
    training held these prompts out, `left_out` how many were for what reason. `dtype` is the one computed in."""

    accept_length: float
    standard_error: float | None
    accept_length_kept: float
    per_depth: list[float]
    lossless: float | None
    tokens: int
    verifications: int
    seconds: float
    prompts: int
    prompts_from: str
    from_validation: bool
    prompts_hash: str
    left_out: dict[str, int]
    dtype: str
    max_new_tokens: int
    temperature: float
    seed: int
    steps: int
    topk: int
    draft_tokens: int | None


@dataclass(frozen=True, kw_only=True)
class HeadRecord:
    """Everything that training.json holds.

    `capture_layers` are indices into `hidden_states`; config.json counts outputs of layers, one less.
    `simulated_accept_length` maps draft steps to what validation during training simulated, as a server counts it.
    `accept_length` is measured once the target has been there. `checkpoint` is Lightning's."""

    format_version: Literal[1]
    head_config: HeadConfig
    capture_layers: list[int]
    ttt_steps: int
    simulated_accept_length: dict[int, float]
    accept_length: MeasuredAcceptLength | None
    target: TargetRecord
    store: StoreRecord
    checkpoint: str
    versions: dict[str, str]


SCHEMA = TypeAdapter(HeadRecord)


def write_record(folder: Path, record: HeadRecord) -> None:
    write_json(folder / FILE, asdict(record))


def read_record(folder: Path, *, made_by: str) -> HeadRecord | None:
    """Read training.json; None where the folder has none, because another trainer made the head.

    Raises InputError for whatever this version did not write; `made_by` is the command that makes the head again."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return SCHEMA.validate_json(path.read_bytes(), strict=True, extra="forbid")
    except ValidationError as error:
        faults = sorted(error.errors(), key=lambda fault: fault["loc"] != ("format_version",))
        raise InputError(f"{path}: {_in_words(faults[0])}, or take the file out of the folder: {made_by}") from None


def _in_words(fault: ErrorDetails) -> str:
    """What is wrong, in which field, and the way out."""
    field = ".".join(str(part) for part in fault["loc"] if part not in NO_FIELDS)
    if fault["type"] == "missing":
        return f"{field} is missing; export the head again"
    if fault["type"] == "unexpected_keyword_argument":
        return f"{field} is unknown; export the head again"
    if field == "format_version":
        return f"format_version={fault['input']!r}, this eagle3 reads {FORMAT_VERSION}; take the one that wrote it"
    given = "" if isinstance(fault["input"], dict | list | bytes) else f"={fault['input']!r}"
    place = f"{field}{given}: " if field else ""
    return f"{place}{fault['msg'].removeprefix('Value error, ')}; export the head again"
