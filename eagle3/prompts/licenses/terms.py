"""The terms of a source: licence, names and credits, from its configuration or its dataset card."""

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass

import fsspec

from eagle3.secrets import without_query

log = logging.getLogger(__name__)

CARD = "README.md"
CARD_BYTES = 1_000_000  # read of a card
PARENTS = 3  # folders above a source in which a card may be
HOME = re.compile(r"/(?:home|Users)/[^/]+")  # names a user, not the data
FRONT_MATTER = re.compile(r"\ufeff?---[^\S\n]*\n(.*?)^---[^\S\n]*$", re.MULTILINE | re.DOTALL)
CITATION = re.compile(
    r"^#{1,6} [^\n]*\bcitation\b[^\n]*\n(.*?)(?=^#{1,6} |\Z)", re.IGNORECASE | re.MULTILINE | re.DOTALL
)
CHOICE = re.compile(r"(?<![\w-])or(?![\w-])", re.IGNORECASE)  # not in GPL-2.0-or-later
# The Hub's id in a path: of its local cache, a URL, or an fsspec path.
HUB_ID = re.compile(
    r"(?:datasets--([\w.-]+?)--([\w.-]+)/snapshots|(?:hf:/|huggingface\.co)/datasets/([\w.-]+)/([\w.-]+))"
)


@dataclass(frozen=True, kw_only=True)
class SourceTerms:
    name: str
    license: str | None  # of rows without one: an SPDX expression or named terms
    license_from: str | None  # "config" or "card"
    card_license: str | None
    known_as: tuple[str, ...]  # names to compare with the forbidden sources
    attribution: str | None  # the text to credit with, from the configuration
    link: str | None
    citation: str | None

    def credit(self) -> list[str | None]:
        """Return the terms that affect the ledger and attribution.txt but no prompt."""
        return [self.license_from, self.attribution, self.link, self.citation]


def source_terms(*, name: str, path: str, license: str | None, attribution: str | None) -> SourceTerms:
    """Return the terms of the source `name` at `path`, a file, a dataset folder or an fsspec URL.

    A licence from the configuration takes precedence over the card's; the ledger shows both.
    """
    card, citation = nearest_card(path)
    card_license = read_card_license(card)
    hub_id = hub_id_in(path)
    names = (name, *names_in(path), _text(card.get("pretty_name")), *_texts(card.get("source_datasets")))
    return SourceTerms(
        name=name,
        license=license or card_license,
        license_from="config" if license else "card" if card_license else None,
        card_license=card_license,
        known_as=tuple(dict.fromkeys(known for known in names if known)),
        attribution=attribution,
        link=f"https://huggingface.co/datasets/{hub_id}" if hub_id else _text(card.get("homepage")),
        citation=citation,
    )


def nearest_card(path: str) -> tuple[dict, str | None]:
    """Return the card in the source's folder or the nearest folder above: data are often in DATASET/data."""
    folder = path.rstrip("/")
    for _ in range(1 + PARENTS):
        card, citation = read_card(folder)
        if card or "/" not in folder.partition("://")[2 if "://" in folder else 0].lstrip("/"):
            break
        folder = folder.rpartition("/")[0]
    return card, citation


def read_card(folder: str) -> tuple[dict, str | None]:
    """Return the metadata and the citation of the Hugging Face dataset card in `folder`, if there is one."""
    try:
        files, path = fsspec.core.url_to_fs(folder)
        if not files.isfile(f"{path.rstrip('/')}/{CARD}"):
            return {}, None
        text = files.read_block(f"{path.rstrip('/')}/{CARD}", 0, CARD_BYTES).decode("utf-8", errors="replace")
    except (OSError, ValueError):  # the reader of the rows reports the path
        return {}, None
    citation = CITATION.search(text)
    return _front_matter(text, folder), _text(citation[1]) if citation else None


def _front_matter(text: str, folder: str) -> dict:
    import yaml

    found = FRONT_MATTER.match(text)
    try:
        metadata = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        log.warning("the front matter of %s/%s is not valid YAML and is ignored", folder, CARD)
        return {}
    return metadata if isinstance(metadata, dict) else {}


def read_card_license(card: dict) -> str | None:
    """Return `license:` of a card's metadata, a list joined by AND; `other` stands for `license_name`."""
    own = _text(card.get("license_name"))
    return join_licenses(own if own and id.lower() == "other" else id for id in _texts(card.get("license"))) or None


def join_licenses(licenses: Iterable[str]) -> str:
    """Return an expression that needs all of these licences; AND binds more tightly than an OR in one of them."""
    parts = list(licenses)
    return " AND ".join(f"({part})" if len(parts) > 1 and CHOICE.search(part) else part for part in parts)


def names_in(path: str) -> list[str]:
    """Return the names in a path: each folder, the file, and the Hub's id."""
    parts = without_query(HOME.sub("", path, count=1)).split("/")
    return [*filter(None, [hub_id_in(path), *parts])]


def hub_id_in(path: str) -> str | None:
    found = HUB_ID.search(path)
    return "/".join(part for part in found.groups() if part) if found else None


def _text(value: object) -> str | None:
    return value.strip() or None if isinstance(value, str) else None


def _texts(value: object) -> list[str]:
    """Return the texts of a list, or of one text."""
    return [text for each in (value if isinstance(value, list) else [value]) if (text := _text(each))]
