"""National and tax ids of persons, and passports. Check digits are verified by python-stdnum if it knows the id."""

import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

from stdnum.br import cpf
from stdnum.de import idnr, stnr
from stdnum.es import dni, nie
from stdnum.fr import nif, nir
from stdnum.gb import nhs, utr
from stdnum.in_ import aadhaar, pan
from stdnum.it import codicefiscale
from stdnum.nl import bsn
from stdnum.us import itin, ssn

from eagle3.prompts.privacy.recogniser import Pattern, Recogniser, Span, stands_alone, words

TAX_WORDS = (r"tax(?: ?payer)? ?(?:id\w{0,12}|no|number|nr|code)?", "tin", r"national id\w{0,12}")
CODE_LITERAL = re.compile(r"[=<>+*/%(,\[{]\s*\Z")  # before 30000000L in code


def _without(characters: str, check: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda number: check(re.sub(characters, "", number))


def _spanish(number: str) -> bool:
    number = number.replace(".", "")
    return nie.is_valid(number) if number[0] in "XYZxyz" else dni.is_valid(number)


def _nino(number: str) -> bool:
    """Accept the prefixes that HMRC uses; National Insurance numbers have no checksum."""
    return re.match(r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]", number, re.IGNORECASE) is not None


def _no_literal(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - 4) : match.start()]
    letter = match.group()[-1]
    return letter.isupper() and not (letter == "L" and CODE_LITERAL.search(before))


def _passport(number: str) -> bool:
    return number.upper() == number or sum(map(str.isdigit, number)) >= 6


def _id(
    entity: str,
    pattern: str,
    check: Callable[[str], bool],
    *context: str,
    clear: str | Callable[[re.Match[str]], object] | None = None,
) -> Recogniser:
    """Describe an id: its pattern, the check of its digits, its context words, and the forms that need no context."""
    if isinstance(clear, str):
        form = re.compile(clear)
        clear = lambda match: form.fullmatch(match.group())  # noqa: E731
    find = Pattern(
        re.compile(pattern, re.IGNORECASE),
        valid=lambda match: check(match.group()),
        clear=clear,
        context=words(*context) if context else None,
    )
    return Recogniser(entity, find)


OF_COUNTRIES = [
    _id("US_SSN", r"\d{3}([ -]?)\d\d\1\d{4}", _without(" ", ssn.is_valid),
        r"ssns?", "soc(?:ial)?\\.? sec(?:urity)?", "social", *TAX_WORDS, clear=r"\d{3}-\d\d-\d{4}"),
    _id("US_ITIN", r"9\d\d([ -]?)\d\d\1\d{4}", _without(" ", itin.is_valid),
        "itin", *TAX_WORDS, clear=r"9\d\d-\d\d-\d{4}"),
    _id("UK_NINO", r"[A-Z]{2}([ -]?)\d\d\1\d\d\1\d\d\1[A-D]", _nino,
        r"nino", "ni", "national insurance", "insurance (?:number|no)", clear=r"[A-Z].*[A-D]"),
    _id("UK_NHS_NUMBER", r"\d{3}([ -]?)\d{3}\1\d{4}", nhs.is_valid, "nhs", r"patients?", "health", "medical", "gp"),
    _id("UK_UTR", r"\d{5} ?\d{5}", utr.is_valid, "utr", r"unique tax\w{0,6}", "hmrc", "self assessment", *TAX_WORDS),
    # 1 in 270 random numbers passes (measured): groups of 2-3-3-3 need no context.
    _id("DE_TAX_ID", r"\d{2}([ -]?)\d{3}\1\d{3}\1\d{3}", idnr.is_valid,
        r"steuer ?(?:id\w{0,24}|nummer|nr)", r"steuerliche \w{1,30}", "id ?nr", "idnummer", r"identifikationsnummer",
        "finanzamt", *TAX_WORDS, clear=r"\d\d[ -].*"),
    _id("FR_SOCIAL_SECURITY", r"[1278]([ .]?)\d\d\1\d\d\1\d[\dAB]\1\d{3}\1\d{3}[ .]?\d\d",
        _without(r"\.", nir.is_valid)),
    _id("FR_TAX_ID", r"[0-3]\d( ?)\d\d\1\d{3}\1\d{3}\1\d{3}", nif.is_valid,
        r"num[ée]ro fiscal", r"fiscale?", "spi", r"imp[ôo]ts?", *TAX_WORDS, clear=r".* .*"),
    _id("DE_TAX_NUMBER", r"\d{2}(?:\d?[/ ]\d{3,4}[/ ]\d{4,5}(?: ?\d)?|\d{8,11})", stnr.is_valid,
        r"steuer ?(?:nummer|nr)", r"st\.? ?nr", "finanzamt", *TAX_WORDS),
    _id("ES_NATIONAL_ID", r"[XYZ\d](?:[- ]?\d{7}|\d\.\d{3}\.\d{3}|\d \d{3} \d{3})[- ]?[A-Z]", _spanish,
        "dni", "nie", "nif", "documento", "identidad", *TAX_WORDS, clear=_no_literal),
    _id("IT_FISCAL_CODE",
        r"[A-Z]{6} ?[0-9LMNPQRSTUV]{2}[A-EHLMPRST][0-9LMNPQRSTUV]{2} ?[A-Z][0-9LMNPQRSTUV]{3}[A-Z]",
        _without(" ", codicefiscale.is_valid)),
    # One in eleven numbers passes, so context is required.
    _id("NL_BSN", r"\d{3}(?:\d[. ]?\d{2}[. ]?\d{3}|[. -]\d{3}[. -]\d{3}|\d{5})", _without(r"\D", bsn.is_valid),
        "bsn", "burger ?service ?(?:nummer|nr)", "sofi(?: ?nummer)?", r"persoonsnummer", *TAX_WORDS),
    # One in a hundred passes.
    _id("BR_CPF", r"\d{3}(?:[. ]\d{3}[. ]\d{3}[-/ .]\d\d|\d{6}[-/]?\d\d)", _without(r"\D", cpf.is_valid),
        "cpf", r"cadastro de pessoas? f[íi]sicas?", r"contribuinte\w{0,12}", "documento", *TAX_WORDS, clear=r".*\D.*"),
    # One in ten passes: groups of 4-4-4 need no context.
    _id("IN_AADHAAR", r"(?<!\d{4}[ -])[2-9]\d{3}([ -]?)\d{4}\1\d{4}(?![ -]\d{4}(?!\d))", aadhaar.is_valid,
        r"aadh?aa?r", "uidai", "uid", "आधार", *TAX_WORDS, clear=r"\d{4}[ -].*"),
    _id("IN_PAN", r"[A-Z]{3}[ABCFGHJKLPT][A-Z]\d{4}[A-Z]", pan.is_valid,
        "pan", "permanent account", "income tax", *TAX_WORDS, clear=r"[A-Z0-9]+"),
]  # fmt: skip
PASSPORT = _id(
    "PASSPORT", r"\d{9}|[A-Z]{1,3} ?\d{6,8}[A-Z]?|\d\d[A-Z]{2} ?\d{5}|(?=[A-Z]{0,8}\d)[A-Z0-9]{8,9}", _passport,
    "passports?", "passeports?", "(?:reise)?pass ?(?:nummer|nr)", "reisepass", "ausweisnummer", "pasaportes?",
    "passaporto", "passaporte", "paspoort(?:nummer)?", "पासपोर्ट", "护照", "護照",
)  # fmt: skip

# --- all countries that python-stdnum knows: numbers near their local name --------------------------------------------

# python-stdnum's modules of personal numbers → their names, as an expression that ignores case. OF_COUNTRIES has those
# whose form is so clear that they need no name.
PERSONAL = {
    "ar.cuit": "cui[tl]", "ar.dni": "dni|documento", "at.vnr": r"sozialversicherungs\w*|sv-?(?:nr|nummer)|vsnr",
    "au.tfn": "tfn|tax file", "be.nn": r"rijksregister\w*|registre national", "be.bis": "bis[- ]?(?:nummer|number)",
    "bg.egn": "егн|egn", "br.cpf": "cpf", "ca.bc_phn": "phn|personal health", "ca.sin": "sin|social insurance",
    "ch.ssn": r"ahv\w*|avs|sozialversicherungs\w*", "cl.rut": "ru[tn]", "cn.ric": r"\w*身份证[^\W\d]*|resident id\w*",
    "co.nit": "nit|c[ée]dula", "cr.cpf": "c[ée]dula", "cu.ni": "carn[ée]", "cz.rc": "rodn[ée] [čc][íi]slo|rč",
    "dk.cpr": "cpr|personnummer", "do.cedula": "c[ée]dula", "ec.ci": "c[ée]dula", "ee.ik": "isikukood",
    "es.dni": "dni|nif", "es.nie": "nie", "fi.hetu": r"hetu|henkil[öo]tunnus\w*", "fr.nir": r"nir|s[ée]cu\w*",
    "gr.amka": "αμκα|amka", "gr.vat": "αφμ|afm", "hr.oib": "oib", "id.nik": "nik|ktp", "ie.pps": r"pps\w?",
    "il.idnr": r"teudat\w*|תעודת", "in_.epic": "epic|voter id", "in_.vid": "vid", "is_.kennitala": "kennitala",
    "ke.pin": "kra pin", "kr.rrn": r"rrn|\w*주민등록번호[^\W\d]*|resident registration", "lt.asmens": "asmens kodas",
    "lv.pvn": "personas kods", "mu.nid": "nid", "mx.curp": "curp", "mx.rfc": "rfc", "my.nric": "nric|mykad",
    "nl.identiteitskaartnummer": r"identiteits\w*", "no.fodselsnummer": "f[øo]dselsnummer|personnummer",
    "nz.ird": "ird", "pe.cui": "dni|cui", "pk.cnic": "cnic", "pl.pesel": "pesel", "pl.nip": "nip",
    "pt.cc": "cart[ãa]o de cidad[ãa]o", "pt.nif": r"nif|contribuinte\w*", "ro.cnp": "cnp|cod numeric personal",
    "ru.inn": "инн|inn", "se.personnummer": r"personn(?:umme)?r\w*", "si.emso": "em[šs]o",
    "sk.rc": "rodn[ée] [čc][íi]slo", "th.pin": r"\w*บัตรประชาชน[^\W\d]*|thai id",
    "tr.tckimlik": r"t\.?c\.? ?kimlik\w*|tckn|kimlik no",
    "ua.rntrc": "рнокпп|rntrc|іпн", "uy.rut": "rut", "ve.rif": "rif", "za.idnr": "id number|identity number",
}  # fmt: skip
# Names for the number of any country.
ANY = (
    r"national (?:id|identity|identification|insurance)\w*|social security|ssn|identity (?:card|number)|tax id\w*"
    r"|(?:citizen|personal) id\w*|identification card|personal code"
)

# Between such a name and a number; then check digits are not required, which some countries have given up.
CALLED = re.compile(r"(?: (?:number|no|nr))?\.?(?: is| was)?[\s:=#\"']{1,4}", re.IGNORECASE)
CALLED_NUMBER = re.compile(r"\d(?:[ -]?\d){5,17}|[A-Z]{2} ?\d(?: ?\d){5} ?[A-Z]", re.IGNORECASE)
SOMEBODYS = re.compile(r"\b(?:my|his|her|our|their|'s)(?: \w{1,12}){0,2} ?\Z", re.IGNORECASE)

IN_GROUPS = re.compile(r"\w+(?:[ ./+-]\w+)*")
FEWEST_DIGITS, MOST_GROUPS, SHORTEST, LONGEST = 6, 5, 7, 24  # of a number; characters including separators
PART = re.compile(r"[A-Z0-9](?:[./+-]?[A-Z0-9]){0,23}", re.IGNORECASE)  # numbers are written in groups
# A number may follow at once after letters of other scripts, which may have no spaces: 身份证号1101…
NAME = re.compile(
    rf"(?<![^\W_])(?:{'|'.join([*PERSONAL.values(), ANY])})(?:(?![^\W_])|(?<![\x00-\u024f])(?=\d))", re.IGNORECASE
)
SIX_DIGITS = re.compile(r"\d(?:[^\d\n]{0,9}\d){5}")  # texts without such a run are skipped
AFTER_NAME, BEFORE_NAME = 60, 30  # characters between the name and the number


def national_ids(text: str) -> Iterator[Span]:
    """Find numbers that are valid in a country, after or right before their name there."""
    end = 0
    for name in NAME.finditer(text) if SIX_DIGITS.search(text) else ():
        number = _somebodys(text, name)
        if number is None or number.start < end:
            around = ((name.end(), name.end() + AFTER_NAME), (name.start() - BEFORE_NAME, name.start()))
            numbers = (_first_number(text, max(end, start), stop, name.group()) for start, stop in around)
            number = next(filter(None, numbers), None)
        if number is not None:
            yield number
            end = number.end


def _somebodys(text: str, name: re.Match[str]) -> Span | None:
    """Return the number right after "my SSN is", without checking its digits."""
    before = text[max(0, name.start() - BEFORE_NAME) : name.start()]
    if not re.fullmatch(ANY, name.group(), re.IGNORECASE) or not SOMEBODYS.search(before):
        return None
    called = CALLED.match(text, name.end())
    number = CALLED_NUMBER.match(text, called.end()) if called else None
    return Span(*number.span()) if number and stands_alone(text, Span(*number.span())) else None


def _first_number(text: str, start: int, stop: int, name: str) -> Span | None:
    """Return the first and longest run of parts that is a valid number for this name."""
    parts = [Span(*part.span()) for part in PART.finditer(text, start, min(len(text), stop))]
    for first, part in enumerate(parts):
        for last in reversed(parts[first : first + MOST_GROUPS]):
            span, number = Span(part.start, last.end), text[part.start : last.end]
            in_groups = SHORTEST <= len(number) <= LONGEST and IN_GROUPS.fullmatch(number) is not None
            is_number = in_groups and sum(map(str.isdigit, number)) >= FEWEST_DIGITS
            if is_number and stands_alone(text, span) and _is_personal(number, name):
                return span
    return None


def _is_personal(number: str, name: str) -> bool:
    try:
        return any(module.is_valid(number) for called, module in modules() if called.fullmatch(name))
    except LookupError:  # stdnum.cn.ric does not know the county; date and check digit were right
        return True


@cache
def modules() -> list[tuple[re.Pattern[str], Any]]:
    """Return each country's names and its module of python-stdnum."""
    return [
        (re.compile(f"{names}|{ANY}", re.IGNORECASE), import_module(f"stdnum.{module}"))
        for module, names in PERSONAL.items()
    ]


RECOGNISERS = [*OF_COUNTRIES, Recogniser("NATIONAL_ID", national_ids), PASSPORT]
