"""Where somebody lives: street addresses in the forms of several countries."""

import re
from collections.abc import Iterator

from eagle3.prompts.privacy.recogniser import Pattern, Recogniser, Span

CAPITALISED = r"[^\W\d_a-zß-öø-ÿ][\w'\u2019.-]{0,24}"  # a word of a name
NAME = (
    r"(?:(?:d[aeio]s?|del|de la|de los|de las|della|degli|dei|van|von|den|der|la|le|les|du|[ld]['\u2019]) ?){0,2}"
    rf"{CAPITALISED}"
)
HOUSE = r"\d{1,5} ?[A-Za-z]?(?:[-/]\d{1,4}[a-z]?)?"
STREET = (
    "Street|Avenue|Ave|Road|Boulevard|Blvd|Lane|Parkway|Pkwy|Highway|Hwy|Turnpike|Crescent|Terrace|Nagar|Marg|Colony|"
    "Vihar|Enclave|Chowk|Salai"
)
STREET_OR_MORE = (  # words that mean other things too, unless the address ends there
    "St|Rd|Ln|Dr|Drive|Ct|Court|Pl|Place|Sq|Square|Way|Circle|Cir|Close|Gardens|Grove|Row|Mews|Hill|Park|Trail|Layout"
)
END = r"(?=\.?(?:[,;\n|\"'<)]|\Z| ?#| (?:Apt|Suite|Ste|Unit|Floor|in|and|[A-Z][a-z]+,)))"
# What has a number behind it, and drives that nobody lives at.
NUMBERED = re.compile(
    r"\b(?:windows|android|ios|macos|ubuntu|office|version|chapter|step|level|figure|section|top)\s\Z", re.I
)
STORAGE = re.compile(r"\b(?:Google|Flash|Hard|Disk|Thumb|Pen|Tape|Test|External|Network|Cloud|Shared) Drive\Z")
MONTH = re.compile(
    r"\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\.?\Z"
)
YEAR = re.compile(r"(?:in|since|of|by|from|until|the|early|late)\s\Z", re.IGNORECASE)


class StreetAddress(Pattern):
    """A house number, then the name of a street: English and Indian forms."""

    entity = "STREET_ADDRESS"
    pattern = re.compile(
        rf"{HOUSE},? (?:(?:[NSEW]|NE|NW|SE|SW)\.? )?(?:(?:{CAPITALISED}|\d{{1,3}}(?:st|nd|rd|th)) ){{1,4}}"
        rf"(?:(?:{STREET})\b|(?:{STREET_OR_MORE}){END})"
    )

    def valid(self, match: re.Match[str]) -> bool:
        """Refuse years and versions: "In 2008 Wall Street" names no house, nor does "Windows 10 Google Drive"."""
        before = match.string[max(0, match.start() - 10) : match.start()]
        year = match.group()[:2] in ("19", "20") and YEAR.search(before)
        return not (year or NUMBERED.search(before) or STORAGE.search(match.group()))


class LowerCaseAddress(Pattern):
    """As people type in a chat: 12 oak street, springfield 12345."""

    entity = "STREET_ADDRESS"
    pattern = re.compile(
        r"\d{1,5} (?:[nsew]\.? )?(?:[a-z]{3,20} |\d{1,3}(?:st|nd|rd|th) ){1,2}"
        r"(?:street|st|avenue|ave|road|rd|boulevard|blvd|lane|drive|dr)\.?,? (?:(?:apt|suite|unit|#) ?\w{1,5},? )?"
        r"[a-z]{2,20},? (?:[a-z]{2} )?\d{5}\b"
    )


class FrenchAddress(Pattern):
    entity = "STREET_ADDRESS"
    pattern = re.compile(
        r"\d{1,4}(?: ?(?:bis|ter|quater|[A-D]))?,? (?:rue|avenue|av\.|boulevard|bd\.?|place|all[ée]e|chemin|impasse|"
        rf"quai|cours|route|square|passage|faubourg) {NAME}|\d{{1,4}},? (?:Rue|Avenue|Boulevard|Place|Quai) {NAME}"
    )


class RomanceAddress(Pattern):
    """Spanish, Catalan, Italian and Portuguese: the kind of street, its name, the number."""

    entity = "STREET_ADDRESS"
    kinds = (
        "Calle", "C/", "Avda", "Avenida", "Av.", "Paseo", "Plaza", "Carrer", "Camino", "Ronda", "Travesía", "Via",
        "Viale",
        "Piazza", "Piazzale", "Corso", "Largo", "Vicolo", "Rua", "Alameda", "Travessa", "Praça", "Rodovia", "Estrada",
    )  # fmt: skip
    gates = tuple(kind.lower() for kind in kinds)
    pattern = re.compile(
        rf"(?:{'|'.join(map(re.escape, kinds))})\.? ?{NAME}(?: {NAME}){{0,4}}"
        r"(?:, ?| )(?:n[º°.]{1,2} ?|n[úu]mero |num\. )?\d{1,5}(?!\d|[.:]\d)"
    )
    # Via USB 3, but not Via XX Settembre 3.
    by_means_of = re.compile(
        r"Via (?:(?![IVXLC]+\b)[A-Z][A-Z\d-]+|Bluetooth|Homebrew|Wi-?Fi|Ethernet|E-?mail|Docker|Python|Windows|Android"
        r"|Chrome|Google|Telegram|Zoom|Channel|Port|Route|Flight)\b"
    )

    def valid(self, match: re.Match[str]) -> bool:
        return self.by_means_of.match(match.group()) is None


class GermanicAddress(Recogniser):
    """German and Dutch: a name that ends in the kind of street, the number."""

    entity = "STREET_ADDRESS"
    number = re.compile(r" \d{1,4}(?: ?[a-zA-Z])?(?!\w|[.:]\d)")
    kinds = (
        "straße", "strasse", "str.", "allee", "platz", "gasse", "ufer", "chaussee", "damm", "straat", "laan", "gracht",
        "plein", "singel", "kade", "Straße", "Strasse", "Str.", "Allee", "Platz", "Gasse", "Ufer", "Chaussee",
    )  # fmt: skip
    kinds_with_postcode = ("weg", "Weg", "ring", "Ring", "hof", "dijk", "steeg", "markt")
    postcode = re.compile(r",? {0,2}\n?(?:D-)?\d{5} [A-ZÄÖÜ]|,? {0,2}\n?\d{4} ?[A-Z]{2}\b")
    name = re.compile(rf"(?:{CAPITALISED}[ -]){{0,3}}[^\W\d_a-zß-öø-ÿ][\w.ß-]{{2,40}}\Z")
    dutch_postcode = re.compile(r",? {0,2}\n?\d{4} ?[A-Z]{2}\b")
    preposition = re.compile(
        r"(?:Am|An der|An den|Auf der|Im|In der|Unter den|Zum|Zur|Hinter der) [A-ZÄÖÜ][\w-]{2,25}\Z"
    )
    # A rank, a place of work, disk space: of a street the name comes before "Platz", and no unit behind the number.
    no_street = re.compile(
        r"(?:^|\b(?:Auf|Der|Die|Das|Den|Dem|Des|Eine?|Einen|Kein|An|Im|In|Vom|Zum|Zur|Um|Bis|Von|Nur|Noch|Jeder?) )"
        r"(?:Straße|Strasse|Str\.|Allee|Platz|Gasse|Ufer|Chaussee)\Z"
        r"|(?i:speicher|arbeits|park|sitz|steh|steck|stell|studien|ausbildungs|start|tabellen|schlaf|lager)platz\Z"
    )
    unit = re.compile(r" ?(?:[KMGT]i?B|km|kg|%|€|EUR|Euro|Prozent)(?!\w)")
    longest_name = 80

    def find(self, text: str) -> Iterator[Span]:
        for number in self.number.finditer(text):
            if self.unit.match(text, number.end()):
                continue
            name = self._street(text, number)
            if name is not None and not (self.no_street.search(name.group()) or MONTH.search(name.group())):
                yield Span(number.start() - len(name.group()), number.end())

    def _street(self, text: str, number: re.Match[str]) -> re.Match[str] | None:
        before = text[max(0, number.start() - self.longest_name) : number.start()]
        if before.endswith(self.kinds) or self.dutch_postcode.match(text, number.end()):
            return self.name.search(before)
        if not self.postcode.match(text, number.end()):
            return None
        return (
            self.name.search(before) if before.endswith(self.kinds_with_postcode) else self.preposition.search(before)
        )


class PostBox(Pattern):
    """Post boxes, and flats and houses by number."""

    entity = "STREET_ADDRESS"
    gates = ("box", "postfach", "flat", "house", "plot", "h.no", "door")
    pattern = re.compile(
        r"P\.? ?O\.? ?Box \d{1,6}|Postfach \d{1,3}(?: \d\d){0,2}"
        r"|(?:Flat|House|Plot|H\.|Door) ?(?:No\.?)? ?\d{1,4}[A-Z]?, ?[A-Z]"
    )
