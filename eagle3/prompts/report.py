"""report.md for the people responsible for the data, and attribution.txt for a release: the ledger as text."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from eagle3 import markdown
from eagle3.markdown import cell
from eagle3.prompts.licenses.rules import spdx_ids
from eagle3.prompts.privacy.policy import in_words
from eagle3.storage.files import atomic_write

PRIVACY = {
    "strict": "Identifiers, secrets and names were looked for, names by a model.",
    "patterns": "Identifiers and secrets were looked for, names and places only if a model is named here.",
    "off": "**Personal data was not looked for.**",
}
LISTED_LICENSES = 12  # of a source, the commonest: merged data sets have hundreds of combinations
LISTED_NAMES = 50  # of a reason
LICENSE_TEXT = "https://spdx.org/licenses/{id}.html"


def write_report(folder: Path, ledger: dict[str, Any]) -> None:
    """Write report.md and attribution.txt from the ledger alone, so that they never contain text of a row."""
    sections = (_rows, _licenses, _privacy, _duplicates, _leaks, _traffic, _made_from)
    report = "\n\n".join(part for section in sections for part in section(ledger))
    for name, text in (("report.md", report), ("attribution.txt", "\n\n".join(_credits(ledger["attribution"])))):
        with atomic_write(folder / name) as file:
            file.write(text.encode() + b"\n")


def _rows(ledger: dict[str, Any]) -> Iterator[str]:
    sources = ledger["sources"]
    yield "# Prompts: rows in and out"
    yield (
        f"{ledger['prompts']:,} of {ledger['rows']:,} rows are prompts. `rejects.jsonl` has every other row's line and "
        f"reason. This page has counts and no text of a row."
    )
    yield "## Rows in and out"
    counts = [(name, each["rows"], each["prompts"]) for name, each in sources.items()]
    shares = [(name, rows, prompts, f"{prompts / max(rows, 1):.1%}") for name, rows, prompts in counts]
    yield _table(("source", "rows in", "prompts out", "share"), shares)
    yield "## Why rows are not prompts"
    refused = {name: each["rejected"] for name, each in sources.items()}
    yield _table(("source", "reason", "rows"), _by_source(refused), empty="Every row is a prompt.")
    named = [
        (name, reason, *row)
        for name, each in sources.items()
        for reason, names in each["named"].items()
        for row in _commonest(names, LISTED_NAMES, "names")
    ]
    if named:
        yield "What these reasons are about, in the rows' own words; `rejects.jsonl` has the name of each row."
        yield _table(("source", "reason", "name", "rows"), named)
    yield "## How rows were read"
    found = {name: each["found"].get("reading", {}) for name, each in sources.items()}
    notes = _by_source(found, LISTED_NAMES, "columns and keys")
    yield _table(("source", "rows with", "rows"), notes, empty="Every row was read whole.")


def _licenses(ledger: dict[str, Any]) -> Iterator[str]:
    entries = ledger["attribution"]
    yield "## Licences of the prompts"
    licenses = {name: each["licenses"] for name, each in ledger["sources"].items()}
    yield _table(("source", "licence", "prompts"), _by_source(licenses, LISTED_LICENSES, "combinations"))
    yield "Rows without a licence have their source's. `attribution.txt` has the credits for a release."
    own = "none: its rows name theirs"
    credits = [(entry["source"], entry["license_from"] or own, _credit(entry)) for entry in entries]
    yield _table(("source", "its licence is from", "credit"), credits)


def _by_source(counts: dict[str, dict[str, int]], most: int | None = None, others: str = "") -> list[tuple]:
    return [(name, *row) for name, each in counts.items() for row in _commonest(each, most, others)]


def _commonest(counts: dict[str, int], most: int | None, of: str) -> Iterable[tuple[str, int]]:
    ordered = [*counts.items()]
    yield from ordered[:most]
    if most is not None and (rest := ordered[most:]):
        yield f"{len(rest)} other {of}", sum(number for _, number in rest)


def _credit(entry: dict[str, Any]) -> str:
    if entry["missing"]:
        return "**missing**: name it in the source's `attribution`"
    return "named" if entry["attribution"] or entry["citation"] or entry["link"] else "not required"


def _privacy(ledger: dict[str, Any]) -> Iterator[str]:
    settings = ledger["inputs"]["rules"]["privacy"]
    model, spots = settings["model"], in_words(**ledger["privacy"])
    yield "## Personal data and secrets"
    yield f"Policy `{settings['policy']}`. {PRIVACY[settings['policy']]}"
    if settings["policy"] != "off" and spots:
        yield f"**{spots}.**"
    yield f"Model: `{cell(model.get('path', model.get('_target_')))}`." if model else "Model: none."
    found = {name: each["found"].get("privacy", {}) for name, each in ledger["sources"].items()}
    yield _table(("source", "kind", "found"), _by_source(found), empty="Nothing was found.")


def _duplicates(ledger: dict[str, Any]) -> Iterator[str]:
    settings = ledger["inputs"]["rules"]["duplicates"]
    yield "## Duplicates"
    yield (
        f"The earlier row stays. Near: at least {settings['threshold']:.0%} of the runs of {settings['shingle_words']} "
        f"words in common (Jaccard similarity, computed exactly)."
        if settings["near"]
        else "Near duplicates were not looked for."
    )
    yield "Counts are above, under *Why rows are not prompts*."


def _leaks(ledger: dict[str, Any]) -> Iterator[str]:
    words, leaks = ledger["inputs"]["rules"]["decontamination"]["dropped_words"], ledger["leaks"]
    yield "## Overlap with benchmarks"
    if not leaks:
        yield "**No benchmark is named** in `prompts.decontamination.benchmarks`: overlap was not looked for."
        return
    counts = [(name, leak["texts"], leak["answers"], leak["dropped"]) for name, leak in leaks.items()]
    yield _table(("benchmark", "texts", "answers", f"dropped: {words} words in a row"), counts)
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
        yield f"### {cell(name)}: distance {feature['distance_before']:.3f} → {feature['distance_after']:.3f}"
        mixes = ("target", "before", "after")
        shares = ([f"{value:.1%}" for value in feature[mix]] for mix in mixes)
        yield _table(("bin", *mixes), zip(feature["bins"], *shares, strict=True))
    if traffic["unfilled"]:
        yield "### Strata that the pool could not fill"
        unfilled = [
            (", ".join(map(" ".join, row["stratum"].items())), row["wanted"], row["in_pool"], row["kept"])
            for row in traffic["unfilled"]
        ]
        yield _table(("stratum", "wanted", "in the pool", "kept"), unfilled)


def _made_from(ledger: dict[str, Any]) -> Iterator[str]:
    yield "## Made from"
    sources = [
        (source["name"], source["path"], len(source["files"]), sum(size for _, size, _ in source["files"]))
        for source in ledger["inputs"]["sources"]
    ]
    yield _table(("source", "path", "files", "bytes"), sources)
    yield f"`ledger.json` has every setting. SHA-256 of `prompts.jsonl`: `{ledger['sha256']}`"


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]], empty: str = "") -> str:
    """Return a table; `empty`, if it is not "", instead of one without rows."""
    shown = [[f"{value:,}" if isinstance(value, int) else value for value in row] for row in rows]
    return markdown.table(columns, shown) if shown or not empty else empty


# --- attribution.txt --------------------------------------------------------------------------------------------------


def _credits(entries: list[dict]) -> Iterator[str]:
    """Yield a paragraph for each source with prompts."""
    yield (
        "The prompts come from these sources. Only user and system turns were taken, and with prompts.tools=keep "
        "definitions, calls and results of tools; some were changed."
    )
    for entry in entries:
        if entry["prompts"]:
            yield "\n".join(line.replace("\n", "\n  ") for line in _credit_lines(entry))
    ids = sorted({id for entry in entries for license in entry["licenses"] for id in spdx_ids(license)})
    if ids:
        yield "Licence texts:" + "".join(f"\n  {id}: {LICENSE_TEXT.format(id=id)}" for id in ids)


def _credit_lines(entry: dict) -> Iterator[str]:
    yield entry["source"]
    yield f"  licence: {', '.join(f'{license} ({count} prompts)' for license, count in entry['licenses'].items())}"
    if origins := [origin for origin in entry["origins"] if origin != entry["source"]]:
        yield f"  from: {', '.join(origins)}"
    yield from (f"  {entry[key]}" for key in ("attribution", "link", "citation") if entry[key])
    if entry["missing"]:
        yield "  CREDIT MISSING: set `attribution` of the source, or list a licence that needs none in `free_of_credit`"
