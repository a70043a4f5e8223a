"""National and tax ids of persons, and passports.

what is found                                  example                       from
a number in a form that chance rarely makes    536-90-4399                   CLEAR, and python-stdnum's check
a valid number near its name in the country    BSN 111222333                 NAMES, and python-stdnum's check
a number that somebody calls theirs            my national id is 12 34 56    ANY, no check
a passport number near a word for it           passport C01X00T47            `passports`
"""

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module

from eagle3.prompts.privacy.recogniser import Pattern, Span, has_context, longest_runs, stands_alone, text_before, words

# python-stdnum's modules of personal numbers → their names, as an expression that ignores case.
NAMES = {
    "ar.cuit": "cui[tl]", "ar.dni": "dni|documento", "at.vnr": r"sozialversicherungs\w*|sv-?(?:nr|nummer)|vsnr",
    "au.tfn": "tfn|tax file", "be.bis": "bis[- ]?(?:nummer|number)", "be.nn": r"rijksregister\w*|registre national",
    "bg.egn": "егн|egn", "br.cpf": r"cpf|cadastro de pessoas? f[íi]sicas?|contribuinte\w{0,12}|documento",
    "ca.bc_phn": "phn|personal health", "ca.sin": "sin|social insurance",
    "ch.ssn": r"ahv\w*|avs|sozialversicherungs\w*", "cl.rut": "ru[tn]", "cn.ric": r"\w*身份证[^\W\d]*|resident id\w*",
    "co.nit": "nit|c[ée]dula", "cr.cpf": "c[ée]dula", "cu.ni": "carn[ée]", "cz.rc": "rodn[ée] [čc][íi]slo|rč",
    "de.idnr": r"steuer ?(?:id\w{0,24}|nummer|nr)|steuerliche \w{1,30}|id ?nr|idnummer|identifikationsnummer|finanzamt",
    "de.stnr": r"steuer ?(?:nummer|nr)|st\.? ?nr|finanzamt", "dk.cpr": "cpr|personnummer", "do.cedula": "c[ée]dula",
    "ec.ci": "c[ée]dula", "ee.ik": "isikukood", "es.dni": "dni|nif|documento|identidad",
    "es.nie": "nie|nif|documento|identidad", "fi.hetu": r"hetu|henkil[öo]tunnus\w*",
    "fr.nif": r"num[ée]ro fiscal|fiscale?|spi|imp[ôo]ts?", "fr.nir": r"nir|s[ée]cu\w*",
    "gb.nhs": "nhs|patients?|health|medical|gp", "gb.nino": "nino|ni|insurance (?:number|no)",
    "gb.utr": r"utr|unique tax\w{0,6}|hmrc|self assessment", "gr.amka": "αμκα|amka", "gr.vat": "αφμ|afm",
    "hr.oib": "oib", "id.nik": "nik|ktp", "ie.pps": r"pps\w?", "il.idnr": r"teudat\w*|תעודת",
    "in_.aadhaar": r"aadh?aa?r|uidai|uid|आधार", "in_.epic": "epic|voter id",
    "in_.pan": "pan|permanent account|income tax", "in_.vid": "vid", "is_.kennitala": "kennitala",
    "it.codicefiscale": "codice fiscale", "ke.pin": "kra pin",
    "kr.rrn": r"rrn|\w*주민등록번호[^\W\d]*|resident registration", "lt.asmens": "asmens kodas",
    "lv.pvn": "personas kods", "mu.nid": "nid", "mx.curp": "curp", "mx.rfc": "rfc", "my.nric": "nric|mykad",
    "nl.bsn": r"bsn|burger ?service ?(?:nummer|nr)|sofi(?: ?nummer)?|persoonsnummer",
    "nl.identiteitskaartnummer": r"identiteits\w*", "no.fodselsnummer": "f[øo]dselsnummer|personnummer",
    "nz.ird": "ird", "pe.cui": "dni|cui", "pk.cnic": "cnic", "pl.nip": "nip", "pl.pesel": "pesel",
    "pt.cc": "cart[ãa]o de cidad[ãa]o", "pt.nif": r"nif|contribuinte\w*", "ro.cnp": "cnp|cod numeric personal",
    "ru.inn": "инн|inn", "se.personnummer": r"personn(?:umme)?r\w*", "si.emso": "em[šs]o",
    "sk.rc": "rodn[ée] [čc][íi]slo", "th.pin": r"\w*บัตรประชาชน[^\W\d]*|thai id",
    "tr.tckimlik": r"t\.?c\.? ?kimlik\w*|tckn|kimlik no", "ua.rntrc": "рнокпп|rntrc|іпн", "us.itin": "itin",
    "us.ssn": r"soc(?:ial)?\.? sec(?:urity)?|social", "uy.rut": "rut", "ve.rif": "rif",
    "za.idnr": "id number|identity number",
}  # fmt: skip
# Names for the number of any country.
ANY = (
    r"national (?:id|identity|identification|insurance)\w*|social security|ssns?|identity (?:card|number)"
    r"|(?:citizen|personal) id\w*|identification card|personal code"
    r"|tax(?: ?payer)? ?(?:id\w{0,12}|no|number|nr|code)|tin"
)
# Forms in which chance passes the check so rarely that a number needs no name.
CLEAR = {
    "br.cpf": r"\d{3}(?:[. ]\d{3}[. ]\d{3}[-/ .]\d\d|\d{6}[-/]\d\d)",
    "de.idnr": r"\d{2}([ -])\d{3}\1\d{3}\1\d{3}",
    "es.dni": r"(?:\d[- ]?\d{7}|\d\.\d{3}\.\d{3}|\d \d{3} \d{3})[- ]?[A-Z]",
    "es.nie": r"[XYZxyz][- ]?\d{7}[- ]?[A-Z]",
    "fr.nif": r"[0-3]\d \d\d \d{3} \d{3} \d{3}",
    "fr.nir": r"[1278]([ .]?)\d\d\1\d\d\1\d[\dABab]\1\d{3}\1\d{3}[ .]?\d\d",
    "gb.nino": r"[A-Z]{2}([ -]?)\d\d\1\d\d\1\d\d\1[A-D]",
    "in_.aadhaar": r"(?<!\d{4}[ -])[2-9]\d{3}([ -])\d{4}\1\d{4}(?![ -]\d{4}(?!\d))",
    "in_.pan": r"[A-Z]{3}[ABCFGHJKLPT][A-Z]\d{4}[A-Z]",
    "it.codicefiscale": r"(?i:[A-Z]{6} ?[\dL-NP-V]{2}[A-EHLMPRST][\dL-NP-V]{2} ?[A-Z][\dL-NP-V]{3}[A-Z])",
    "us.itin": r"9\d\d-\d\d-\d{4}",
    "us.ssn": r"\d{3}-\d\d-\d{4}",
}
LITERAL = re.compile(r"[=<>+*/%(,\[{]\s*\Z")  # before 30000000L in code, which is a valid DNI

# Between a name for any country's number and a number that somebody calls theirs; then check digits are not required,
# which some countries have given up.
CALLED = re.compile(r"(?: (?:number|no|nr))?\.?(?: is| was)?[\s:=#\"']{1,4}", re.IGNORECASE)
CALLED_NUMBER = re.compile(r"\d(?:[ -]?\d){5,17}|[A-Z]{2} ?\d(?: ?\d){5} ?[A-Z]", re.IGNORECASE)
SOMEBODYS = re.compile(r"\b(?:my|his|her|our|their|'s)(?: \w{1,12}){0,2} ?\Z", re.IGNORECASE)
BEFORE_NAME = 30  # characters

FEWEST_DIGITS, MOST_GROUPS, SHORTEST, LONGEST = 6, 5, 7, 24  # of a number; characters including separators
PART = re.compile(r"[A-Z0-9](?:[./+-]?[A-Z0-9]){0,23}", re.IGNORECASE)  # numbers are written in groups
IN_GROUPS = re.compile(r"\w+(?:[ ./+-]\w+)*")
SIX_DIGITS = re.compile(r"\d(?:[^\d\n]{0,9}\d){5}")  # texts without such a run are skipped


def _names(alternatives: str) -> re.Pattern[str]:
    # A number may follow at once after letters of other scripts, which may have no spaces: 身份证号1101…
    alternatives = alternatives.replace(" ", "[ _-]")
    return re.compile(rf"(?<![^\W_])(?:{alternatives})(?:(?![^\W_])|(?<![\x00-\u024f])(?=\d))", re.IGNORECASE)


NAME = _names("|".join([*NAMES.values(), ANY]))
OF_ANY = _names(ANY)


def national_ids(text: str) -> Iterator[Span]:
    """Find numbers that are valid in a country: in a clear form, or near their name there."""
    if not SIX_DIGITS.search(text):
        return
    for find in clear_forms():
        yield from find(text)
    if NAME.search(text):
        yield from filter(None, (_somebodys(text, name) for name in OF_ANY.finditer(text)))
        named = [country for country in countries() if country[0].search(text)]
        parts = [Span(*part.span()) for part in PART.finditer(text)]
        yield from longest_runs(parts, MOST_GROUPS, lambda span: _is_named(text, span, named))


def _somebodys(text: str, name: re.Match[str]) -> Span | None:
    """Return the number right after "my SSN is", without checking its digits."""
    if not SOMEBODYS.search(text_before(text, name.start(), BEFORE_NAME)):
        return None
    called = CALLED.match(text, name.end())
    number = CALLED_NUMBER.match(text, called.end()) if called else None
    return Span(*number.span()) if number and stands_alone(text, Span(*number.span())) else None


def _is_named(text: str, span: Span, named: list[tuple[re.Pattern[str], str]]) -> bool:
    """Tell whether a span is a valid number of one of these countries, near its name."""
    number = text[span.start : span.end]
    return (
        SHORTEST <= len(number) <= LONGEST
        and sum(map(str.isdigit, number)) >= FEWEST_DIGITS
        and IN_GROUPS.fullmatch(number) is not None
        and stands_alone(text, span)
        and any(is_valid(module, number) and has_context(text, span, names) for names, module in named)
    )


def is_valid(module: str, number: str) -> bool:
    try:
        return load_check(module)(re.sub("[ .]", "", number))
    except LookupError:  # stdnum.cn.ric does not know the county; date and check digit were right
        return True


@cache
def load_check(module: str) -> Callable[[str], bool]:
    if module == "gb.nino":  # has no check digit and is not in python-stdnum: prefixes that HMRC uses
        prefix = "(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]"
        nino = re.compile(rf"{prefix}-?\d\d-?\d\d-?\d\d-?[A-D]", re.IGNORECASE)
        return lambda number: nino.fullmatch(number) is not None
    return import_module(f"stdnum.{module}").is_valid  # type: ignore[no-any-return]


@cache
def countries() -> list[tuple[re.Pattern[str], str]]:
    """Return the names of each country's numbers and its module of python-stdnum."""
    return [(_names(f"{names}|{ANY}"), module) for module, names in NAMES.items()]


@cache
def clear_forms() -> list[Pattern]:
    def valid(module: str) -> Callable[[re.Match[str]], bool]:
        return lambda match: (
            is_valid(module, match.group())
            and not (match.group().endswith("L") and LITERAL.search(text_before(match.string, match.start(), 4)))
        )

    return [Pattern(re.compile(form), valid=valid(module)) for module, form in CLEAR.items()]


passports = Pattern(
    re.compile(r"\d{9}|[A-Z]{1,3} ?\d{6,8}[A-Z]?|\d\d[A-Z]{2} ?\d{5}|(?=[A-Z]{0,8}\d)[A-Z0-9]{8,9}", re.IGNORECASE),
    valid=lambda match: match.group().isupper() or sum(map(str.isdigit, match.group())) >= 6,
    context=words(
        "passports?", "passeports?", "(?:reise)?pass ?(?:nummer|nr)", "reisepass", "ausweisnummer", "pasaportes?",
        "passaporto", "passaporte", "paspoort(?:nummer)?", "पासपोर्ट", "护照", "護照",
    ),
)  # fmt: skip
