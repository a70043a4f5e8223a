"""README.md of an exported head: the model card, with front matter as the Hugging Face Hub reads it."""

import json
import shlex
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from eagle3.answers.store import read_answers
from eagle3.engine.command import Draft, command_words, draft_flags
from eagle3.errors import InputError
from eagle3.head.eagle3 import EAGLE3
from eagle3.head_files.files import HeadFiles
from eagle3.head_files.format import read_kind
from eagle3.head_files.record import HeadRecord
from eagle3.head_files.servers import LLAMA_CPP, SGLANG, VLLM, obstacles, summary
from eagle3.markdown import table
from eagle3.serving.report import with_error
from eagle3.settings.flat import searchable
from eagle3.storage.files import write_whole
from eagle3.storage.records import read_sealed_json
from eagle3.target.identity import is_hub_id, public_name

FILE = "README.md"
TAGS = ["speculative-decoding", "draft-model"]
# Licences of prompts that the Hub's `license` takes; the card's table has all.
HUB_LICENSES = ("mit", "apache-2.0", "bsd-3-clause", "bsd-2-clause", "isc", "unlicense", "cc0-1.0", "cc-by-4.0", "pddl")
SEVERAL = "other"


@dataclass
class TrainingData:
    """The ledgers next to the feature stores: prompts by licence and by origin, the text of the credits, and how the
    target was sampled for prompts that it wrote itself, with their number. Prompts that were answered several times are
    counted once."""

    prompts: int = 0
    answers: int = 0  # to all prompts together
    licenses: Counter[str] = field(default_factory=Counter)
    origins: Counter[str] = field(default_factory=Counter)
    credits: list[str] = field(default_factory=list)
    written: list[tuple[int, dict[str, Any]]] = field(default_factory=list)


def write_card(files: HeadFiles, settings: dict[str, Any], draft: Draft) -> None:
    """Write the card of an exported head; `settings` are those of its training, `draft` how it is best served."""
    assert files.record is not None  # an export writes one
    card = model_card(files, settings, draft, training_data(files.record.origin.path))
    write_whole(files.path / FILE, card.encode())


def training_data(stores: str | list[str]) -> TrainingData | None:
    """Read the ledgers of DIR/prompts next to DIR/features; None where one is missing, or is not of the prompts that
    were answered."""
    data, counted = TrainingData(), set()
    for folder in (Path(store).parent for store in ([stores] if isinstance(stores, str) else stores)):
        prompts = folder / "prompts"
        try:
            ledger = read_sealed_json(prompts / "ledger.json", made_by="precompute.py")
            answered = read_answers(folder / "answers")
        except (InputError, OSError):
            return None
        if ledger["sha256"] != answered.prompts_sha256:
            return None
        data.answers += ledger["prompts"]
        if ledger["sha256"] in counted:
            continue
        counted.add(ledger["sha256"])
        data.prompts += ledger["prompts"]
        for source in ledger["sources"].values():
            data.licenses.update(source["licenses"])
            data.origins.update(source["origins"])
        for source in ledger["inputs"]["sources"]:
            if how := source.get("written_by"):
                data.written.append((ledger["sources"][source["name"]]["prompts"], how))
        if (prompts / "attribution.txt").is_file():
            data.credits.append((prompts / "attribution.txt").read_text().strip())
    return data


def model_card(files: HeadFiles, settings: dict[str, Any], draft: Draft, data: TrainingData | None) -> str:
    record = files.record
    assert record is not None
    name, license, kind = record.origin.target.name, hub_license(data), read_kind(files)
    front_matter = ModelCardData(
        base_model=name if is_hub_id(name) else None,
        license=license,
        license_name="of-the-training-data" if license == SEVERAL else None,
        license_link="README.md" if license == SEVERAL else None,
        library_name="sglang" if kind.sglang_algorithm else None,
        pipeline_tag="text-generation",
        tags=[*(["eagle3"] if kind is EAGLE3 else []), *TAGS, *(["sglang"] if kind.sglang_algorithm else [])],
    )
    target = public_name(name)
    parts = [
        f"---\n{front_matter.to_yaml()}\n---\n\n# {'EAGLE-3 draft' if kind is EAGLE3 else 'Draft'} head for {target}",
        f"A draft head guesses the next tokens of {target}, which verifies all of them in one pass. The output is the "
        "target's own; it arrives sooner. (In bf16 near-ties flip, so texts can differ.) The head is of no use alone, "
        "or with another target.",
        f"## Serve it\n\n{summary(files)}. `HEAD` is this folder.\n\n{commands(files, target, draft)}".rstrip(),
        f"## Accept length\n\nTokens per pass of the target; 1 without a head.\n\n{accept_lengths(record)}",
        f"## Training data\n\n{about_data(data)}",
        f"## Training\n\n{table(['setting', 'value'], sorted(searchable(settings).items()))}",
        "Made with: " + ", ".join(f"{package} {version}" for package, version in record.versions.items()) + ".",
    ]
    return "\n\n".join(parts) + "\n"


def hub_license(data: TrainingData | None) -> str | None:
    """Return the Hub's name of the licence that all prompts have; `other` for several, which the card lists."""
    if data is None or not data.licenses:
        return None
    [*names] = {name.lower() for name in data.licenses}
    return names[0] if len(names) == 1 and names[0] in HUB_LICENSES else SEVERAL


def commands(files: HeadFiles, target: str, draft: Draft) -> str:
    head = "HEAD"
    flags = shlex.join(command_words(draft_flags(replace(draft, head=head))))
    speculative = json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": draft.steps})
    lines = {
        SGLANG: f"python -m sglang.launch_server --model-path {target} \\\n  {flags}",
        VLLM: f"vllm serve {target} --speculative-config '{speculative}'",
        LLAMA_CPP: f"python convert_hf_to_gguf.py {target} --outfile target.gguf\n"
        f"python convert_hf_to_gguf.py {head} --target-model-dir {target} --outfile head.gguf\n"
        f"llama-server -m target.gguf -md head.gguf --spec-type draft-eagle3 --spec-draft-n-max {draft.steps}",
    }
    able = [server for server, reasons in obstacles(files).items() if not reasons]
    return "\n\n".join(f"{server}:\n\n```bash\n{lines[server]}\n```" for server in able)


def accept_lengths(record: HeadRecord) -> str:
    """Return the table: first what was decoded, then what validation simulated on other answers, longer ones."""
    rows: list[tuple[Any, ...]] = []
    if measured := record.accept_length:
        where = "held-out prompts of the training data" if measured.from_validation else "other prompts"
        talks = f" of {measured.conversations} conversations" if measured.conversations is not None else ""
        how = (
            f"{measured.prompts} {where}{talks}, up to {measured.max_new_tokens} tokens each, decoded at temperature "
            f"{measured.temperature:g} in {measured.dtype}"
        )
        shape = f"{measured.steps} drafts in a row" if measured.topk == 1 else f"tree of {measured.draft_tokens} tokens"
        shape += f", window of {measured.draft_window}" if measured.draft_window else ""
        rows.append((shape, with_error(measured.accept_length, measured.standard_error), how))
    for steps, length in sorted(record.simulated_accept_length.items()):
        rows.append(
            (
                f"{steps} drafts in a row",
                f"{length:.3f}",
                "validation of the training, simulated along whole answers as sampled for it",
            )
        )
    return table(["drafts", "accept length", "measured on"], rows)


def about_data(data: TrainingData | None) -> str:
    answers = "The answers to the prompts are the target's own; its licence applies to them, too."
    if data is None:
        return (
            f"There was no ledger of the prompts next to the feature store: origin and licences are unknown. {answers}"
        )
    several = f", answered {data.answers} times in all" if data.answers > data.prompts else ""
    parts = [
        f"{data.prompts} prompts{several}. {answers}",
        *(in_words(prompts, how) for prompts, how in data.written),
        table(["licence", "prompts"], data.licenses.most_common()),
        table(["origin", "prompts"], data.origins.most_common()),
        *(f"```text\n{credit}\n```" for credit in data.credits),
    ]
    return "\n\n".join(parts)


def in_words(prompts: int, how: dict[str, Any]) -> str:
    """Say how the target wrote prompts, without their system prompts, which may be a team's own."""
    steered = f", steered by {count} system prompts" if (count := len(how["system_prompts"])) else ""
    return (
        f"{prompts} of these prompts the target wrote itself: its chat template, up to where a user's text begins, was "
        f"continued at temperature {how['temperature']:g} and top_p {how['top_p']:g} with seed {how['seed']}, up to "
        f"{how['turns']} user turns each{steered}."
    )
