"""README.md beside an exported head: the model card, with front matter as the Hugging Face Hub reads it."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eagle3.answers.store import read_responses
from eagle3.engine.draft import Draft, num_draft_tokens
from eagle3.errors import InputError
from eagle3.markdown import table
from eagle3.serving.head.record import HeadRecord
from eagle3.storage.files import atomic_write
from eagle3.storage.records import read_sealed_json
from eagle3.target.identity import is_hub_id
from eagle3.training.loggers import searchable

FILE = "README.md"
TAGS = ["eagle3", "speculative-decoding", "draft-model"]
SERVERS = {"sglang": "sglang", "speculators": "vllm"}  # by format
# What the Hub's `license` takes, of the licences that prompts may have by themselves; the table has all of them.
HUB_LICENSES = ("mit", "apache-2.0", "bsd-3-clause", "bsd-2-clause", "isc", "unlicense", "cc0-1.0", "cc-by-4.0", "pddl")
SEVERAL = "other"


@dataclass
class TrainingData:
    """What lies beside the feature stores: prompts by licence and by origin, and the text of the credits."""

    prompts: int = 0
    licenses: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    credits: list[str] = field(default_factory=list)


def write_card(
    folder: Path, record: HeadRecord, settings: dict[str, Any], draft: Draft, format: str = "sglang"
) -> None:
    """Write the card of the head in `folder`, which is in `format`; `settings` are those of its training, `draft` how
    it is best served."""
    with atomic_write(folder / FILE) as file:
        file.write(model_card(record, settings, draft, training_data(record.store.path), format).encode())


def training_data(stores: str | list[str]) -> TrainingData | None:
    """Read the ledgers of DIR/prompts beside DIR/features; None where one is missing, or of other prompts than those
    that were answered."""
    data = TrainingData()
    for folder in (Path(store).parent for store in ([stores] if isinstance(stores, str) else stores)):
        prompts = folder / "prompts"
        try:
            ledger = read_sealed_json(prompts / "ledger.json", made_by="precompute.py")
            answered = read_responses(folder / "responses")
        except (InputError, OSError):
            return None
        if ledger["sha256"] != answered.prompts_sha256:
            return None
        data.prompts += ledger["prompts"]
        for source in ledger["sources"].values():
            data.licenses.update(source["licenses"])
            data.origins.update(source["origins"])
        if (prompts / "attribution.txt").is_file():
            data.credits.append((prompts / "attribution.txt").read_text().strip())
    return data


def model_card(
    record: HeadRecord, settings: dict[str, Any], draft: Draft, data: TrainingData | None, format: str = "sglang"
) -> str:
    """Return the card. What is not known is said to be unknown."""
    name, server = record.target.name, SERVERS[format]
    told = ModelCardData(
        base_model=name if is_hub_id(name) else None,
        license=license_of(data),
        license_name="of-the-training-data" if license_of(data) == SEVERAL else None,
        license_link="README.md" if license_of(data) == SEVERAL else None,
        library_name=server,
        pipeline_tag="text-generation",
        tags=[*TAGS, server],
    )
    target = name if is_hub_id(name) else Path(name).name
    parts = [
        f"---\n{told.to_yaml()}\n---\n\n# EAGLE-3 draft head for {target}",
        f"A draft head guesses the next tokens of {target}, which checks them all in one pass: the text stays the "
        "target's own, it only comes faster. It is of no use alone, or with another target.",
        f"## Serve it\n\n{vllm_command(target, draft) if server == 'vllm' else sglang_command(target, draft)}",
        f"## Accept length\n\nTokens gained per pass of the target, 1 without a head.\n\n{accept_lengths(record)}",
        f"## Training data\n\n{about_data(data)}",
        f"## Training\n\n{table(['setting', 'value'], sorted(searchable(settings).items()))}",
        "Made with: " + ", ".join(f"{package} {version}" for package, version in record.versions.items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def license_of(data: TrainingData | None) -> str | None:
    """Return the Hub's word for the licence that all prompts have; `other` for several, which the card lists."""
    if data is None or not data.licenses:
        return None
    [*names] = {name.lower() for name in data.licenses}
    return names[0] if len(names) == 1 and names[0] in HUB_LICENSES else SEVERAL


def vllm_command(target: str, draft: Draft) -> str:
    settings = {"method": "eagle3", "model": Path(draft.head).name, "num_speculative_tokens": draft.steps}
    return f"```bash\nvllm serve {target} --speculative-config '{json.dumps(settings)}'\n```"


def sglang_command(target: str, draft: Draft) -> str:
    tokens = num_draft_tokens(draft.steps, draft.topk, draft.draft_tokens)
    return (
        "```bash\n"
        f"python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 \\\n"
        f"  --speculative-draft-model-path {Path(draft.head).name} --speculative-num-steps {draft.steps} \\\n"
        f"  --speculative-eagle-topk {draft.topk} --speculative-num-draft-tokens {tokens}\n"
        "```"
    )


def accept_lengths(record: HeadRecord) -> str:
    rows: list[tuple[Any, ...]] = [
        (f"{steps} drafts in a row", f"{length:.3f}", "validation of the training, simulated")
        for steps, length in sorted(record.simulated_accept_length.items())
    ]
    if measured := record.accept_length:
        error = "" if measured.standard_error is None else f" ± {measured.standard_error:.3f}"
        where = "held-out prompts of the training data" if measured.from_validation else "other prompts"
        how = f"{measured.prompts} {where}, decoded at temperature {measured.temperature:g} in {measured.dtype}"
        shape = f"{measured.steps} drafts in a row" if measured.topk == 1 else f"tree of {measured.draft_tokens} tokens"
        rows.append((shape, f"{measured.accept_length:.3f}{error}", how))
    return table(["drafts", "accept length", "measured on"], rows)


def about_data(data: TrainingData | None) -> str:
    answers = "The answers to the prompts are the target's own; its licence applies to them, too."
    if data is None:
        return f"No ledger of the prompts was beside the feature store: origin and licences are not known. {answers}"
    parts = [
        f"{data.prompts} prompts. {answers}",
        table(["licence", "prompts"], data.licenses.most_common()),
        table(["origin", "prompts"], data.origins.most_common()),
        *(f"```text\n{credit}\n```" for credit in data.credits),
    ]
    return "\n\n".join(parts)
