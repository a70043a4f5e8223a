"""report.md and report.png for people who answer for the data: what the ledger says, as tables and a picture."""

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eagle3 import markdown
from eagle3.markdown import cell
from eagle3.prompts.output.picture import draw
from eagle3.prompts.privacy.policy import blind_spots
from eagle3.storage.files import atomic_write

PRIVACY = {
    "strict": "Identifiers, secrets and names were looked for, the latter by a model.",
    "patterns": "Identifiers and secrets were looked for, names and places only if a model is named here.",
    "off": "**Personal data was not looked for.**",
}
DUPLICATES = ("exact duplicate", "near duplicate")
LISTED_LICENSES = 12  # of a source, the commonest: data joined from many others has hundreds of combinations


def write_report(folder: Path, ledger: dict[str, Any]) -> None:
    """Write both files from the ledger alone: the report never holds text of a row."""
    with atomic_write(folder / "report.png") as file:
        draw(ledger, file)
    with atomic_write(folder / "report.md") as file:
        file.write("\n\n".join(_sections(ledger)).encode() + b"\n")


def _sections(ledger: dict[str, Any]) -> Iterable[str]:
    yield "# Prompts: what went in, what came out"
    yield (
        f"{ledger['prompts']:,} of {ledger['rows']:,} rows are prompts. Every other row is in `rejects.jsonl` with its "
        f"place and reason. This page counts and never quotes."
    )
    yield "![Rows by source and reason](report.png)"
    yield from _sources(ledger["sources"])
    yield from _licenses(ledger["attribution"])
    yield from _privacy(ledger)
    yield from _duplicates(ledger)
    yield from _leaks(ledger)
    yield from _traffic(ledger["traffic"])
    yield from _made_from(ledger)


def _sources(sources: dict[str, Any]) -> Iterable[str]:
    yield "## Rows in and out"
    yield table(
        ("source", "rows in", "prompts out", "share"),
        [
            (name, source["rows"], source["prompts"], percent(source["prompts"] / max(source["rows"], 1)))
            for name, source in sources.items()
        ],
    )
    yield "## Why rows are not prompts"
    rejected = [(name, *counted) for name, source in sources.items() for counted in source["rejected"].items()]
    yield table(("source", "reason", "rows"), rejected) if rejected else "Every row is a prompt."


def _licenses(entries: list[dict[str, Any]]) -> Iterable[str]:
    yield "## Licences of the prompts"
    yield table(
        ("source", "licence", "prompts"),
        [(entry["source"], *counted) for entry in entries for counted in _commonest(entry["licenses"])],
    )
    yield "Rows that name no licence have their source's. `attribution.txt` holds the credits that a release carries."
    yield table(
        ("source", "its licence is from", "credit"),
        [(entry["source"], entry["license_from"] or "none: its rows name theirs", _credit(entry)) for entry in entries],
    )


def _commonest(licenses: dict[str, int]) -> Iterable[tuple[str, int]]:
    counted = sorted(licenses.items(), key=lambda item: (-item[1], item[0]))
    yield from counted[:LISTED_LICENSES]
    if rest := counted[LISTED_LICENSES:]:
        yield f"{len(rest)} other combinations", sum(prompts for _, prompts in rest)


def _credit(entry: dict[str, Any]) -> str:
    if entry["missing"]:
        return "**missing**: name it in the source's `attribution`"
    return "named" if entry["attribution"] or entry["citation"] or entry["link"] else "not asked for"


def _privacy(ledger: dict[str, Any]) -> Iterable[str]:
    settings = ledger["inputs"]["rules"]["privacy"]
    model = settings["model"]
    yield "## Personal data and secrets"
    yield f"Policy `{settings['policy']}`. {PRIVACY[settings['policy']]}"
    if settings["policy"] != "off" and (spots := blind_spots(**ledger["privacy"])):
        yield f"**{spots}.**"
    yield f"Model: `{cell(model.get('path', model.get('_target_')))}`." if model else "Model: none."
    found = [
        (name, *counted)
        for name, source in ledger["sources"].items()
        for counted in source["found"].get("privacy", {}).items()
    ]
    yield table(("source", "kind", "found"), found) if found else "Nothing was found."


def _duplicates(ledger: dict[str, Any]) -> Iterable[str]:
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


def _leaks(ledger: dict[str, Any]) -> Iterable[str]:
    settings = ledger["inputs"]["rules"]["leaks"]
    yield "## Overlap with benchmarks"
    if not ledger["leaks"]:
        yield "**No benchmark is named** in `prompts.leaks.benchmarks`: overlap was not looked for."
        return
    dropped, reported = settings["dropped_words"], settings["reported_words"]
    yield table(
        (
            "benchmark",
            "texts",
            "answers",
            f"dropped: {dropped} words in a row",
            f"let through: {reported} words in a row",
        ),
        [
            (name, leak["texts"], leak["answers"], leak["dropped"], leak["reported"])
            for name, leak in ledger["leaks"].items()
        ],
    )
    for name, leak in ledger["leaks"].items():
        if leak["unread"]:
            yield f"**{leak['unread']:,} rows of {cell(name)} could not be read**: overlap with them was not seen."


def _traffic(traffic: dict[str, Any] | None) -> Iterable[str]:
    yield "## Mix"
    if traffic is None:
        yield "No target mix was asked for: every prompt that passed is kept."
        return
    sizes = traffic["effective_sample_size"]
    yield (
        f"{traffic['kept']:,} of {traffic['pool']:,} prompts were drawn to look like the target (asked for: "
        f"{traffic['size']:,}). Distance: total variation, 0 is the same mix. Effective sample size: "
        f"{sizes['before']:,} before, {sizes['after']:,} after."
    )
    for name, feature in traffic["features"].items():
        yield from _feature(name, feature)
    if traffic["unfilled"]:
        yield "### Strata that the pool could not fill"
        yield table(
            ("stratum", "wanted", "in the pool", "kept"),
            [(_stratum(row["stratum"]), row["wanted"], row["in_pool"], row["kept"]) for row in traffic["unfilled"]],
        )


def _feature(name: str, feature: dict[str, Any]) -> Iterable[str]:
    if feature["target"] is None:
        yield f"### {cell(name)}: the target says nothing about it"
    else:
        yield f"### {cell(name)}: distance {feature['distance_before']:.3f} → {feature['distance_after']:.3f}"
    mixes = [mix for mix in ("target", "before", "after") if feature[mix] is not None]
    shares = ([percent(value) for value in feature[mix]] for mix in mixes)
    yield table(("bin", *mixes), zip(feature["bins"], *shares, strict=True))


def _stratum(labels: dict[str, str]) -> str:
    return ", ".join(f"{name} {label}" for name, label in labels.items())


def _made_from(ledger: dict[str, Any]) -> Iterable[str]:
    yield "## Made from"
    yield table(
        ("source", "path", "files", "bytes"),
        [
            (source["name"], source["path"], len(source["files"]), sum(size for _, size, _ in source["files"]))
            for source in ledger["inputs"]["sources"]
        ],
    )
    yield f"`ledger.json` holds every setting. SHA-256 of `prompts.jsonl`: `{ledger['sha256']}`"


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    return markdown.table(columns, (map(written, row) for row in rows))


def written(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def percent(share: float) -> str:
    return f"{share:.1%}"
