"""National ids of all countries that python-stdnum knows, near the name that they have there."""

import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType

from eagle3.prompts.privacy.recogniser import Recogniser, Span, stands_alone

# python-stdnum's modules of numbers that one person has → what people call them, as an expression without case.
# national_ids.py has those whose form is so clear that they need no name.
PERSONAL = {
    "ar.cuit": "cui[tl]", "ar.dni": "dni|documento", "at.vnr": r"sozialversicherungs\w*|sv-?(?:nr|nummer)|vsnr",
    "au.tfn": "tfn|tax file", "be.nn": r"rijksregister\w*|registre national", "be.bis": "bis[- ]?(?:nummer|number)",
    "bg.egn": "егн|egn", "br.cpf": "cpf", "ca.bc_phn": "phn|personal health", "ca.sin": "sin|social insurance",
    "ch.ssn": r"ahv\w*|avs|sozialversicherungs\w*", "cl.rut": "ru[tn]", "cn.ric": r"\w*身份证\w*|resident id\w*",
    "co.nit": "nit|c[ée]dula", "cr.cpf": "c[ée]dula", "cu.ni": "carn[ée]", "cz.rc": "rodn[ée] [čc][íi]slo|rč",
    "dk.cpr": "cpr|personnummer", "do.cedula": "c[ée]dula", "ec.ci": "c[ée]dula", "ee.ik": "isikukood",
    "es.dni": "dni|nif", "es.nie": "nie", "fi.hetu": r"hetu|henkil[öo]tunnus\w*", "fr.nir": r"nir|s[ée]cu\w*",
    "gr.amka": "αμκα|amka", "gr.vat": "αφμ|afm", "hr.oib": "oib", "id.nik": "nik|ktp", "ie.pps": r"pps\w?",
    "il.idnr": r"teudat\w*|תעודת", "in_.epic": "epic|voter id", "in_.vid": "vid", "is_.kennitala": "kennitala",
    "ke.pin": "kra pin", "kr.rrn": r"rrn|\w*주민등록번호\w*|resident registration", "lt.asmens": "asmens kodas",
    "lv.pvn": "personas kods", "mu.nid": "nid", "mx.curp": "curp", "mx.rfc": "rfc", "my.nric": "nric|mykad",
    "nl.identiteitskaartnummer": r"identiteits\w*", "no.fodselsnummer": "f[øo]dselsnummer|personnummer",
    "nz.ird": "ird", "pe.cui": "dni|cui", "pk.cnic": "cnic", "pl.pesel": "pesel", "pl.nip": "nip",
    "pt.cc": "cart[ãa]o de cidad[ãa]o", "pt.nif": r"nif|contribuinte\w*", "ro.cnp": "cnp|cod numeric personal",
    "ru.inn": "инн|inn", "se.personnummer": r"personn(?:umme)?r\w*", "si.emso": "em[šs]o",
    "sk.rc": "rodn[ée] [čc][íi]slo", "th.pin": r"\w*บัตรประชาชน\w*|thai id",
    "tr.tckimlik": r"t\.?c\.? ?kimlik\w*|tckn|kimlik no",
    "ua.rntrc": "рнокпп|rntrc|іпн", "uy.rut": "rut", "ve.rif": "rif", "za.idnr": "id number|identity number",
}  # fmt: skip
# Names that every country's number is given.
ANY = (
    r"national (?:id|identity|identification|insurance)\w*|social security|ssn|identity (?:card|number)|tax id\w*"
    r"|(?:citizen|personal) id\w*|identification card|personal code"
)

# Right between such a name and a number: then nobody asks for check digits, which some countries have given up.
CALLED = re.compile(r"(?: (?:number|no|nr))?\.?(?: is| was)?[\s:=#\"']{1,4}", re.IGNORECASE)
CALLED_NUMBER = re.compile(r"\d(?:[ -]?\d){5,17}|[A-Z]{2} ?\d(?: ?\d){5} ?[A-Z]", re.IGNORECASE)
SOMEBODYS = re.compile(r"\b(?:my|his|her|our|their|'s)(?: \w{1,12}){0,2} ?\Z", re.IGNORECASE)

IN_GROUPS = re.compile(r"\w+(?:[ ./+-]\w+)*")
FEWEST_DIGITS, MOST_GROUPS, LENGTHS = 6, 5, (7, 24)  # of a number, and its characters with what stands between


class OtherNationalId(Recogniser):
    """Numbers that are valid in a country, behind or right before what they are called there."""

    entity = "NATIONAL_ID"
    part = re.compile(r"[A-Z0-9](?:[./+-]?[A-Z0-9]){0,23}", re.IGNORECASE)  # numbers are written in groups
    name = re.compile(rf"(?<![^\W_])(?:{'|'.join([*PERSONAL.values(), ANY])})(?![^\W_])", re.IGNORECASE)
    digits = re.compile(r"\d(?:[^\d\n]{0,9}\d){5}")  # most texts hold no such run and are done at its sight
    behind, before = 60, 30  # characters between the name and the number

    def find(self, text: str) -> Iterator[Span]:
        if not self.digits.search(text):
            return
        end = 0
        for name in self.name.finditer(text):
            if (number := _somebodys(text, name)) and number.start >= end:
                yield number
                end = number.end
                continue
            for start, stop in ((name.end(), name.end() + self.behind), (name.start() - self.before, name.start())):
                parts = [Span(*part.span()) for part in self.part.finditer(text, max(end, start), min(len(text), stop))]
                number = _first_number(text, parts, name.group())
                if number is not None:
                    yield number
                    end = number.end
                    break


def _somebodys(text: str, name: re.Match[str]) -> Span | None:
    """Return the number right behind "my SSN is": whatever its check digits, somebody says that it is theirs."""
    if re.fullmatch(ANY, name.group(), re.IGNORECASE) and SOMEBODYS.search(
        text[max(0, name.start() - 30) : name.start()]
    ):
        called = CALLED.match(text, name.end())
        number = CALLED_NUMBER.match(text, called.end()) if called else None
        if number and stands_alone(text, Span(*number.span())):
            return Span(*number.span())
    return None


def _first_number(text: str, parts: list[Span], name: str) -> Span | None:
    """Return the first run of parts, the longest there, that is a number of this name."""
    for first, part in enumerate(parts):
        for last in reversed(parts[first : first + MOST_GROUPS]):
            number = text[part.start : last.end]
            if (
                LENGTHS[0] <= len(number) <= LENGTHS[1]
                and IN_GROUPS.fullmatch(number)
                and sum(map(str.isdigit, number)) >= FEWEST_DIGITS
                and stands_alone(text, Span(part.start, last.end))
                and _is_personal(number, name)
            ):
                return Span(part.start, last.end)
    return None


def _is_personal(number: str, name: str) -> bool:
    return any(_is_valid(module, number) for called, module in modules() if called.fullmatch(name))


def _is_valid(module: ModuleType, number: str) -> bool:
    try:
        return module.is_valid(number)
    except LookupError:  # of stdnum.cn.ric where its table has no county; date and check digit were right
        return True


@cache
def modules() -> list[tuple[re.Pattern[str], ModuleType]]:
    """Return each country's check and the names that call for it."""
    return [
        (re.compile(f"{names}|{ANY}", re.IGNORECASE), import_module(f"stdnum.{module}"))
        for module, names in PERSONAL.items()
    ]
