"""Credits for a release of the prompts, or of a head trained on them: ledger entries and attribution.txt."""

from collections.abc import Mapping, Set

from eagle3.prompts.licenses.rules import spdx_ids
from eagle3.prompts.licenses.terms import SourceTerms

LICENSE_TEXT = "https://spdx.org/licenses/{id}.html"


def attribution_entry(
    terms: SourceTerms, *, licenses: Mapping[str, int], origins: Mapping[str, int], free_of_credit: Set[str]
) -> dict:
    """Return the ledger's entry for one source.

    licenses, origins: the number of kept prompts by licence and by `source`; free_of_credit: licences, in lower case,
    that require no credit. `missing` is true if a licence requires credit and there is none: no `attribution` in the
    configuration, no link and no citation from a card.
    """
    owing = [license for license in licenses if license.lower() not in free_of_credit]
    credit = terms.attribution or terms.citation or terms.link
    return {
        "source": terms.name,
        "prompts": sum(licenses.values()),
        "licenses": dict(sorted(licenses.items())),
        "license_from": terms.license_from,
        "card_license": terms.card_license,
        "origins": dict(sorted(origins.items())),
        "attribution": terms.attribution,
        "link": terms.link,
        "citation": terms.citation,
        "missing": bool(owing) and not credit,
    }


def attribution_text(entries: list[dict]) -> str:
    """Return the content of attribution.txt: a paragraph for each source with prompts."""
    paragraphs = [_paragraph(entry) for entry in entries if entry["prompts"]]
    heading = "The prompts come from these sources. Only user and system turns were taken, some of them changed."
    return "\n\n".join([heading, *paragraphs, _license_texts(entries)]) + "\n"


def _paragraph(entry: dict) -> str:
    licenses = ", ".join(f"{license} ({count} prompts)" for license, count in entry["licenses"].items())
    origins = [origin for origin in entry["origins"] if origin != entry["source"]]
    lines = [entry["source"], f"  licence: {licenses}"]
    if origins:
        lines.append(f"  from: {', '.join(origins)}")
    lines += [f"  {entry[key]}" for key in ("attribution", "link", "citation") if entry[key]]
    if entry["missing"]:
        lines.append("  CREDIT MISSING: this licence requires it; set `attribution` of the source")
    return "\n".join(line.replace("\n", "\n  ") for line in lines)


def _license_texts(entries: list[dict]) -> str:
    ids = sorted({id for entry in entries for license in entry["licenses"] for id in spdx_ids(license)})
    return "Licence texts:" + "".join(f"\n  {id}: {LICENSE_TEXT.format(id=id)}" for id in ids)
