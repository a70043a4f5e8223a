"""`action=publish`: from an exported head and its measurements to a folder that the Hugging Face hub takes as it is."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from eagle3.errors import InputError
from eagle3.head_files.files import MAKE_HEAD, HeadFiles
from eagle3.head_files.record import FILE as RECORD
from eagle3.head_files.record import HeadRecord, write_record
from eagle3.markdown import table
from eagle3.secrets import public
from eagle3.serving.head.card import FILE as CARD
from eagle3.serving.publish.results import COLUMNS, lines, read_results
from eagle3.settings.serving import PublishRun
from eagle3.storage.files import WEIGHTS, sha256_file, write_whole
from eagle3.storage.records import write_sealed_json
from eagle3.storage.replace import replacing
from eagle3.target.files import TargetFiles
from eagle3.target.identity import differences, public_name

RESULTS = "results.json"
LICENSE, TARGET_LICENSE = "LICENSE", "LICENSE-target"
WRITTEN = (RESULTS, LICENSE, TARGET_LICENSE)  # besides the files of an export


def publish(run: PublishRun, files: HeadFiles, target: TargetFiles) -> None:
    """Write the folder `run.out`, once everything that goes into it was read."""
    record = require_exported(files)
    require_trained_on(record, target)
    results = from_here(read_results(run.results, weight_file_hashes(record)))
    texts = {
        LICENSE: read_text(run.licenses.head_file, key="licenses.head_file"),
        TARGET_LICENSE: read_text(run.licenses.target_file, key="licenses.target_file"),
        CARD: card(run, files, record, results, target),
    }
    with replacing(Path(run.out)) as new:
        for name in record.files:
            shutil.copyfile(files.path / name, new / name)
        measured = record.accept_length
        if measured is not None:
            measured = replace(measured, prompts_from=from_here(measured.prompts_from))
        write_record(new, replace(record, accept_length=measured))
        write_sealed_json(new / RESULTS, {"results": results})
        for name, text in texts.items():
            write_whole(new / name, text.encode())


def require_exported(files: HeadFiles) -> HeadRecord:
    """Return what the export recorded; InputError for a head of another trainer, and for a folder made here."""
    if files.record is None:
        raise InputError(f"head={files.path} has no {RECORD}, which says where a head comes from; make it: {MAKE_HEAD}")
    if (files.path / RESULTS).exists():
        raise InputError(f"head={files.path} was made by action=publish; give the exported head, made by: {MAKE_HEAD}")
    return files.record


def require_trained_on(record: HeadRecord, target: TargetFiles) -> None:
    if differing := differences(record.origin.target, target.identity, ("config_hash", "weights_hash")):
        raise InputError(
            f"target.path={target.identity.known_as} is not the target of the training, "
            f"{record.origin.target.known_as}: they differ in {', '.join(differing)}; give the folder or the hub id of "
            f"that one"
        )


def weight_file_hashes(record: HeadRecord) -> dict[str, str]:
    """Return the sha256 of the head's files of weights, by name."""
    return {name: sha256 for name, sha256 in record.files.items() if name.endswith(".safetensors")}


def read_text(path: str, *, key: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{key}={path} cannot be read as text ({error}); give another file") from None


def from_here(value: Any) -> Any:
    """Return plain values with paths written from the working directory or the home folder, which tell nothing of this
    machine."""
    if isinstance(value, Mapping):
        return {from_here(key): from_here(part) for key, part in value.items()}
    if isinstance(value, list):
        return [from_here(part) for part in value]
    if not isinstance(value, str):
        return value
    home, shown = os.path.expanduser("~"), value.replace(f"{Path.cwd()}/", "")
    return shown.replace(f"{home}/", "~/") if home not in ("/", "~") else shown


# --- the card --------------------------------------------------------------------------------------------------------


def card(
    run: PublishRun, files: HeadFiles, record: HeadRecord, results: Sequence[Mapping[str, Any]], target: TargetFiles
) -> str:
    """Return the card of the export with the measurements before its first section, and more sections at its end."""
    found = ModelCard(read_text(str(files.path / CARD), key="head"), ignore_metadata_errors=True)
    facts = {"license": run.licenses.head.lower(), "license_name": None, "license_link": None}
    facts |= {"base_model": run.base_model} if run.base_model else {}
    for key, value in facts.items():
        found.data[key] = value
    intro, heading, rest = found.text.partition("\n## ")
    if run.base_model:  # in the first section, whose commands would not find a folder of this machine
        serve, *others = rest.split("\n## ", 1)
        serve = serve.replace(f" {public_name(record.origin.target.name)} ", f" {run.base_model} ")
        rest = "\n## ".join([serve, *others])
    parts = [
        intro,
        measurements(results, Path(run.out).name, weight_file_hashes(record)),
        heading + rest,
        f"## Use and limits\n\n{limits(record, run.notes_file)}",
        f"## Licences\n\n{licences(run)}",
        f"## How it was made\n\n```bash\n{commands(run.commands_file, results)}\n```",
        f"## Files\n\n{table(['file', 'sha256'], hashes(record, target))}",
    ]
    found.text = "\n" + "\n\n".join(part.strip() for part in parts) + "\n"
    return found.content


def measurements(results: Sequence[Mapping[str, Any]], head: str, weights: Mapping[str, str]) -> str:
    about = (
        "Accept length: tokens per pass of the target, 1 without a head, ± its standard error over prompts. Speed-up: "
        "of the time per output token over the same server without the head, with its 95 % interval. All numbers are "
        f"in {RESULTS}."
    )
    return f"## Measurements\n\n{about}\n\n{table(COLUMNS, lines(results, head, weights))}"


def limits(record: HeadRecord, notes: str | None) -> str:
    said = [
        "- The head makes the target above decode faster. It is of no use with another model. The target verifies "
        "every token, so what it can do, and its own limits, stay as they are.",
        "- The accept length depends on the texts, their language and the sampling. Measure it on your own requests.",
    ]
    if longest := record.origin.tokens_of_99_percent:
        said.append(f"- 99 % of the training texts have at most {longest} tokens. In longer ones fewer drafts pass.")
    return "\n".join(said) + (f"\n\n{read_text(notes, key='notes_file').strip()}" if notes else "")


def licences(run: PublishRun) -> str:
    return (
        f"The head: {run.licenses.head} ([{LICENSE}]({LICENSE})). It was made with the target's weights and answers, "
        f"so the target's licence applies, too: {run.licenses.target} ([{TARGET_LICENSE}]({TARGET_LICENSE}))."
    )


def commands(made: str | None, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the commands that made the head, and those of the measurements."""
    before = [from_here(public(read_text(made, key="commands_file"))).strip()] if made else []
    return "\n".join([*before, *(result["command"] for result in results)])


def hashes(record: HeadRecord, target: TargetFiles) -> list[tuple[str, str]]:
    """Return the sha256 of the head's files and of the target's weights."""
    folder = Path(target.path)
    if not folder.is_dir():
        return [
            *record.files.items(),
            (f"{target.path} {target.revision}: samples of all weights", target.identity.weights_hash),
        ]
    weights = ((f"{folder.name}/{file.name}", sha256_file(file)) for file in sorted(folder.glob(WEIGHTS)))
    return [*record.files.items(), *weights]
