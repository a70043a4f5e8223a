"""report.md for the people responsible for the data: the ledger as tables."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3 import markdown
from eagle3.markdown import cell
from eagle3.prompts.privacy.policy import blind_spots
from eagle3.storage.files import atomic_write

PRIVACY = {
    "strict": "Identifiers, secrets and names were looked for, names by a model.",
    "patterns": "Identifiers and secrets were looked for, names and places only if a model is named here.",
    "off": "**Personal data was not looked for.**",
}
DUPLICATES = ("exact duplicate", "near duplicate")
LISTED_LICENSES = 12  # of a source, the commonest: merged data sets have hundreds of combinations


def write_report(folder: Path, ledger: dict[str, Any]) -> None:
    """Write the report from the ledger alone, so that it never contains text of a row."""
    sections = (_rows, _licenses, _privacy, _duplicates, _leaks, _traffic, _made_from)
    with atomic_write(folder / "report.md") as file:
        file.write("\n\n".join(part for section in sections for part in section(ledger)).encode() + b"\n")


def _rows(ledger: dict[str, Any]) -> Iterator[str]:
    sources = ledger["sources"]
    yield "# Prompts: rows in and out"
    yield (
        f"{ledger['prompts']:,} of {ledger['rows']:,} rows are prompts. `rejects.jsonl` has every other row's line and "
        f"reason. This page has counts and no text of a row."
    )
    yield "## Rows in and out"
    kept = [(name, each["rows"], each["prompts"]) for name, each in sources.items()]
    yield table(
        ("source", "rows in", "prompts out", "share"),
        [(name, rows, prompts, percent(prompts / max(rows, 1))) for name, rows, prompts in kept],
    )
    yield "## Why rows are not prompts"
    yield counted(("source", "reason", "rows"), _by_source(sources, "rejected"), otherwise="Every row is a prompt.")


def _licenses(ledger: dict[str, Any]) -> Iterator[str]:
    entries = ledger["attribution"]
    yield "## Licences of the prompts"
    yield table(
        ("source", "licence", "prompts"),
        [(entry["source"], *row) for entry in entries for row in _commonest(entry["licenses"])],
    )
    yield "Rows without a licence have their source's. `attribution.txt` has the credits for a release."
    yield table(
        ("source", "its licence is from", "credit"),
        [(entry["source"], entry["license_from"] or "none: its rows name theirs", _credit(entry)) for entry in entries],
    )


def _commonest(licenses: dict[str, int]) -> Iterable[tuple[str, int]]:
    ordered = sorted(licenses.items(), key=lambda item: (-item[1], item[0]))
    yield from ordered[:LISTED_LICENSES]
    if rest := ordered[LISTED_LICENSES:]:
        yield f"{len(rest)} other combinations", sum(prompts for _, prompts in rest)


def _credit(entry: dict[str, Any]) -> str:
    if entry["missing"]:
        return "**missing**: name it in the source's `attribution`"
    return "named" if entry["attribution"] or entry["citation"] or entry["link"] else "not required"


def _privacy(ledger: dict[str, Any]) -> Iterator[str]:
    settings = ledger["inputs"]["rules"]["privacy"]
    model, spots = settings["model"], blind_spots(**ledger["privacy"])
    yield "## Personal data and secrets"
    yield f"Policy `{settings['policy']}`. {PRIVACY[settings['policy']]}"
    if settings["policy"] != "off" and spots:
        yield f"**{spots}.**"
    yield f"Model: `{cell(model.get('path', model.get('_target_')))}`." if model else "Model: none."
    found = {name: each["found"] for name, each in ledger["sources"].items()}
    yield counted(("source", "kind", "found"), _by_source(found, "privacy"), otherwise="Nothing was found.")


def _duplicates(ledger: dict[str, Any]) -> Iterator[str]:
    rejected = sum((Counter(source["rejected"]) for source in ledger["sources"].values()), Counter())
    settings = ledger["inputs"]["rules"]["duplicates"]
    yield "## Duplicates"
    yield table(
        ("kind", "within a source", "of another source"),
        [(kind, rejected[kind], rejected[f"{kind} of another source"]) for kind in DUPLICATES],
    )
    yield (
        f"The earlier row stays. Near: at least {settings['threshold']:.0%} of the runs of {settings['shingle_words']} "
        f"words in common (Jaccard similarity, computed exactly)."
        if settings["near"]
        else "Near duplicates were not looked for."
    )


def _leaks(ledger: dict[str, Any]) -> Iterator[str]:
    words, leaks = ledger["inputs"]["rules"]["decontamination"]["dropped_words"], ledger["leaks"]
    yield "## Overlap with benchmarks"
    if not leaks:
        yield "**No benchmark is named** in `prompts.decontamination.benchmarks`: overlap was not looked for."
        return
    yield table(
        ("benchmark", "texts", "answers", f"dropped: {words} words in a row"),
        [(name, *(leak[key] for key in ("texts", "answers", "dropped"))) for name, leak in leaks.items()],
    )
    for name, leak in leaks.items():
        if leak["unread"]:
            yield f"**{leak['unread']:,} rows of {cell(name)} could not be read** and were not compared."


def _traffic(ledger: dict[str, Any]) -> Iterator[str]:
    traffic = ledger["traffic"]
    yield "## Mix"
    if traffic is None:
        yield "No target mix was set: every prompt that passed is kept."
        return
    yield (
        f"{traffic['kept']:,} of {traffic['pool']:,} prompts were drawn to match the target (requested: "
        f"{traffic['size']:,}). Distance: total variation; 0 is the same mix."
    )
    for name, feature in traffic["features"].items():
        yield from _feature(name, feature)
    if traffic["unfilled"]:
        yield "### Strata that the pool could not fill"
        yield table(
            ("stratum", "wanted", "in the pool", "kept"),
            [(_stratum(row["stratum"]), row["wanted"], row["in_pool"], row["kept"]) for row in traffic["unfilled"]],
        )


def _feature(name: str, feature: dict[str, Any]) -> Iterator[str]:
    distance = "not part of the target"
    if feature["target"] is not None:
        distance = f"distance {feature['distance_before']:.3f} → {feature['distance_after']:.3f}"
    yield f"### {cell(name)}: {distance}"
    mixes = [mix for mix in ("target", "before", "after") if feature[mix] is not None]
    shares = ([percent(value) for value in feature[mix]] for mix in mixes)
    yield table(("bin", *mixes), zip(feature["bins"], *shares, strict=True))


def _stratum(labels: dict[str, str]) -> str:
    return ", ".join(f"{name} {label}" for name, label in labels.items())


def _made_from(ledger: dict[str, Any]) -> Iterator[str]:
    yield "## Made from"
    yield table(
        ("source", "path", "files", "bytes"),
        [
            (source["name"], source["path"], len(source["files"]), sum(size for _, size, _ in source["files"]))
            for source in ledger["inputs"]["sources"]
        ],
    )
    yield f"`ledger.json` has every setting. SHA-256 of `prompts.jsonl`: `{ledger['sha256']}`"


def _by_source(sources: dict[str, Any], key: str) -> list[tuple[str, str, int]]:
    return [(name, *pair) for name, source in sources.items() for pair in source.get(key, {}).items()]


def counted(columns: Sequence[str], rows: list[tuple[str, str, int]], *, otherwise: str) -> str:
    return table(columns, rows) if rows else otherwise


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return markdown.table(
        columns, ([f"{value:,}" if isinstance(value, int) else value for value in row] for row in rows)
    )


def percent(share: float) -> str:
    return f"{share:.1%}"
