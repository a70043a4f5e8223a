"""National and tax ids of persons, one class each, and passports. The rules are python-stdnum's where it has them."""

import re
from collections.abc import Callable

from stdnum.br import cpf
from stdnum.de import idnr, stnr
from stdnum.es import dni, nie
from stdnum.fr import nif, nir
from stdnum.gb import nhs, utr
from stdnum.in_ import aadhaar, pan
from stdnum.it import codicefiscale
from stdnum.nl import bsn
from stdnum.us import itin, ssn

from eagle3.prompts.privacy.recogniser import Pattern, words

TAX_WORDS = (r"tax(?: ?payer)? ?(?:id\w{0,12}|no|number|nr|code)?", "tin", r"national id\w{0,12}")


class NationalId(Pattern):
    """A pattern, the check of its digits and letters, and the forms (`clear`) that need no context words."""

    check: Callable[[str], bool]
    clear: re.Pattern[str] | None = None

    def valid(self, match: re.Match[str]) -> bool:
        return self.check(match.group())

    def needs_context(self, match: re.Match[str]) -> bool:
        return self.clear is None or self.clear.fullmatch(match.group()) is None


class UsSsn(NationalId):
    entity = "US_SSN"
    pattern = re.compile(r"\d{3}([ -]?)\d\d\1\d{4}")
    check = staticmethod(lambda number: ssn.is_valid(number.replace(" ", "")))
    clear = re.compile(r"\d{3}-\d\d-\d{4}")
    context = words(r"ssns?", "soc(?:ial)?\\.? sec(?:urity)?", "social", *TAX_WORDS)


class UsItin(NationalId):
    entity = "US_ITIN"
    pattern = re.compile(r"9\d\d([ -]?)\d\d\1\d{4}")
    check = staticmethod(lambda number: itin.is_valid(number.replace(" ", "")))
    clear = re.compile(r"9\d\d-\d\d-\d{4}")
    context = words("itin", *TAX_WORDS)


class UkNino(NationalId):
    """National Insurance number: the letters that HMRC gives out, six digits, A to D; no checksum exists."""

    entity = "UK_NINO"
    pattern = re.compile(r"[A-Z]{2}([ -]?)\d\d\1\d\d\1\d\d\1[A-D]", re.IGNORECASE)
    prefix = re.compile(r"(?!BG|GB|KN|NK|NT|TN|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z]", re.IGNORECASE)
    clear = re.compile(r"[A-Z].*[A-D]")
    context = words(r"nino", "ni", "national insurance", "insurance (?:number|no)")

    def valid(self, match: re.Match[str]) -> bool:
        return self.prefix.match(match.group()) is not None


class UkNhsNumber(NationalId):
    entity = "UK_NHS_NUMBER"
    pattern = re.compile(r"\d{3}([ -]?)\d{3}\1\d{4}")
    check = staticmethod(nhs.is_valid)
    context = words("nhs", r"patients?", "health", "medical", "gp")


class UkUtr(NationalId):
    entity = "UK_UTR"
    pattern = re.compile(r"\d{5} ?\d{5}")
    check = staticmethod(utr.is_valid)
    context = words("utr", r"unique tax\w{0,6}", "hmrc", "self assessment", *TAX_WORDS)


class DeTaxId(NationalId):
    """Steuer-Identifikationsnummer. The rule passes 1 in 270 random numbers (measured): 2-3-3-3 groups are clear."""

    entity = "DE_TAX_ID"
    pattern = re.compile(r"\d{2}([ -]?)\d{3}\1\d{3}\1\d{3}")
    check = staticmethod(idnr.is_valid)
    clear = re.compile(r"\d\d[ -].*")
    context = words(
        r"steuer ?(?:id\w{0,24}|nummer|nr)", r"steuerliche \w{1,30}", "id ?nr", "idnummer", r"identifikationsnummer",
        "finanzamt", *TAX_WORDS,
    )  # fmt: skip


class DeTaxNumber(NationalId):
    entity = "DE_TAX_NUMBER"
    pattern = re.compile(r"\d{2}(?:\d?[/ ]\d{3,4}[/ ]\d{4,5}(?: ?\d)?|\d{8,11})")
    check = staticmethod(stnr.is_valid)
    context = words("steuer ?(?:nummer|nr)", r"st\.? ?nr", "finanzamt", *TAX_WORDS)


class FrSocialSecurity(NationalId):
    """NIR, with its key mod 97."""

    entity = "FR_SOCIAL_SECURITY"
    pattern = re.compile(r"[1278]([ .]?)\d\d\1\d\d\1\d[\dAB]\1\d{3}\1\d{3}[ .]?\d\d", re.IGNORECASE)
    check = staticmethod(lambda number: nir.is_valid(number.replace(".", "")))
    clear = pattern


class FrTaxId(NationalId):
    """Numéro fiscal (SPI), with its key mod 511; the 2-2-3-3-3 groups are clear."""

    entity = "FR_TAX_ID"
    pattern = re.compile(r"[0-3]\d( ?)\d\d\1\d{3}\1\d{3}\1\d{3}")
    check = staticmethod(nif.is_valid)
    clear = re.compile(r".* .*")
    context = words("num[ée]ro fiscal", r"fiscale?", "spi", r"imp[ôo]ts?", *TAX_WORDS)


class EsNationalId(NationalId):
    """DNI and NIE, with their letter mod 23."""

    entity = "ES_NATIONAL_ID"
    pattern = re.compile(r"[XYZ\d](?:[- ]?\d{7}|\d\.\d{3}\.\d{3}|\d \d{3} \d{3})[- ]?[A-Z]", re.IGNORECASE)
    check = staticmethod(lambda number: _spanish(number.replace(".", "")))
    clear = re.compile(r".*[A-Z]")
    context = words("dni", "nie", "nif", "documento", "identidad", *TAX_WORDS)
    literal = re.compile(r"[=<>+*/%(,\[{]\s*\Z")  # before 30000000L of code

    def needs_context(self, match: re.Match[str]) -> bool:
        before = match.string[max(0, match.start() - 4) : match.start()]
        return super().needs_context(match) or (match.group()[-1] == "L" and self.literal.search(before) is not None)


def _spanish(number: str) -> bool:
    return nie.is_valid(number) if number[0] in "XYZxyz" else dni.is_valid(number)


class ItFiscalCode(NationalId):
    """Codice fiscale of a person, with its check letter."""

    entity = "IT_FISCAL_CODE"
    part = "[0-9LMNPQRSTUV]"
    pattern = re.compile(rf"[A-Z]{{6}} ?{part}{{2}}[A-EHLMPRST]{part}{{2}} ?[A-Z]{part}{{3}}[A-Z]", re.IGNORECASE)
    check = staticmethod(lambda number: codicefiscale.is_valid(number.replace(" ", "")))
    clear = pattern


class NlBsn(NationalId):
    """Burgerservicenummer, with its eleven-test; one in eleven of all numbers passes, so that context decides."""

    entity = "NL_BSN"
    pattern = re.compile(r"\d{3}(?:\d[. ]?\d{2}[. ]?\d{3}|[. -]\d{3}[. -]\d{3}|\d{5})")
    check = staticmethod(lambda number: bsn.is_valid(re.sub(r"\D", "", number)))
    context = words("bsn", "burger ?service ?(?:nummer|nr)", "sofi(?: ?nummer)?", r"persoonsnummer", *TAX_WORDS)


class BrCpf(NationalId):
    """CPF, with its two check digits; one in a hundred of all numbers passes, so that bare digits need context."""

    entity = "BR_CPF"
    pattern = re.compile(r"\d{3}(?:[. ]\d{3}[. ]\d{3}[-/ .]\d\d|\d{6}[-/]?\d\d)")
    check = staticmethod(lambda number: cpf.is_valid(re.sub(r"\D", "", number)))
    clear = re.compile(r".*\D.*")
    context = words("cpf", r"cadastro de pessoas? f[íi]sicas?", r"contribuinte\w{0,12}", "documento", *TAX_WORDS)


class InAadhaar(NationalId):
    """Aadhaar, with its Verhoeff digit, which one number in ten has: the 4-4-4 groups are clear."""

    entity = "IN_AADHAAR"
    pattern = re.compile(r"(?<!\d{4}[ -])[2-9]\d{3}([ -]?)\d{4}\1\d{4}(?![ -]\d{4}(?!\d))")
    check = staticmethod(aadhaar.is_valid)
    clear = re.compile(r"\d{4}[ -].*")
    context = words(r"aadh?aa?r", "uidai", "uid", "आधार", *TAX_WORDS)


class InPan(NationalId):
    """Permanent account number of a person: five letters, the fourth for the kind of holder, four digits, a letter."""

    entity = "IN_PAN"
    pattern = re.compile(r"[A-Z]{3}[ABCFGHJKLPT][A-Z]\d{4}[A-Z]", re.IGNORECASE)
    check = staticmethod(pan.is_valid)
    clear = re.compile(r"[A-Z0-9]+")
    context = words("pan", "permanent account", "income tax", *TAX_WORDS)


class Passport(Pattern):
    """Passport numbers of the usual forms right by the word passport."""

    entity = "PASSPORT"
    gates = (
        "passp", "passn", "pass-n", "pass n", "pass_n", "passeport", "reisepass", "ausweis", "pasaporte", "passaport",
        "paspoort", "पासपोर्ट",
        "护照", "護照",
    )  # fmt: skip
    pattern = re.compile(
        r"\d{9}|[A-Z]{1,3} ?\d{6,8}[A-Z]?|\d\d[A-Z]{2} ?\d{5}|(?=[A-Z]{0,8}\d)[A-Z0-9]{8,9}", re.IGNORECASE
    )
    context = words(
        "passports?", "passeports?", "(?:reise)?pass ?(?:nummer|nr)", "reisepass", "ausweisnummer", "pasaportes?",
        "passaporto", "passaporte", "paspoort(?:nummer)?", "पासपोर्ट", "护照", "護照",
    )  # fmt: skip

    def valid(self, match: re.Match[str]) -> bool:
        number = match.group()
        return number.upper() == number or sum(map(str.isdigit, number)) >= 6
