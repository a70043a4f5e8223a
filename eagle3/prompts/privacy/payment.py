"""What pays: credit cards, IBANs and bank accounts."""

import re
from collections.abc import Iterator

from stdnum import iban, luhn
from stdnum.es import ccc
from stdnum.iso7064 import mod_97_10

from eagle3.prompts.privacy.recogniser import Pattern, Span, after_word, has_context, stands_alone, words

# Who issues which numbers (ISO/IEC 7812 ranges of the networks in use) → lengths. Other numbers that pass Luhn's test,
# such as IMEIs and serials, are no cards.
ISSUERS = re.compile(
    r"""4(?:\d{12}|\d{15}|\d{18})                                                    # Visa
    |(?:5[1-5]\d\d|222[1-9]|22[3-9]\d|2[3-6]\d\d|27[01]\d|2720)\d{12}                # Mastercard
    |3[47]\d{13}                                                                     # American Express
    |3(?:0[0-59]|[689]\d)\d{11}(?:\d{2,5})?                                          # Diners Club
    |35(?:2[89]|[3-8]\d)\d{12,15}                                                    # JCB
    |(?:6011|64[4-9]\d|65\d\d|62\d\d|81\d\d|60\d\d|82\d\d|508\d|220[0-4])\d{12,15}   # Discover, UnionPay, RuPay, Mir
    |(?:5018|5020|5038|5893|6304|6759|676[1-3])\d{8,15}                              # Maestro
    """,
    re.VERBOSE,
)
SHORT_CARD = 13  # digits; so many are on few old cards and on every barcode


class CreditCard(Pattern):
    """Numbers of a card network, or called a card, that pass Luhn's test; in one piece or in groups as on cards."""

    entity = "CREDIT_CARD"
    pattern = re.compile(
        r"\d{4}(?:(?P<gap>[ .-])(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{3,4}(?:(?P=gap)\d{3})?|\d{6}(?P=gap)\d{4,5})|\d{8,15})"
    )
    context = words(
        "cards?", "visa", "credit", "debit", r"cc(?:n|num)?", "karte", "kreditkarte", "carte", "tarjeta",
        r"cart[aã]o", "carta",
        "kaart", "creditcard",
    )  # fmt: skip

    def valid(self, match: re.Match[str]) -> bool:
        return luhn.is_valid(re.sub(r"\D", "", match.group()))

    def needs_context(self, match: re.Match[str]) -> bool:
        """Tell short numbers and those of other issuers by the word: old cards, store cards, new ranges."""
        return len(match.group()) <= SHORT_CARD or ISSUERS.fullmatch(re.sub(r"\D", "", match.group())) is None


class Iban(Pattern):
    """ISO 13616: country, length and check digits (mod 97), in one piece or in groups, in either case.

    What is called one needs the check digits alone: countries join, and change their lengths.
    """

    entity = "IBAN"
    pattern = re.compile(r"[A-Z]{2}\d\d(?:[ -]?[A-Z0-9]){11,30}", re.IGNORECASE)
    shortest = 15
    context = words("iban", "transfer(?:red)?", "wire", r"[üu]berweis\w*", "virement", "transferencia", "bonifico")

    def find(self, text: str) -> Iterator[Span]:
        position = 0
        while match := self.pattern.search(text, position):
            start = match.start()
            end = next((end for end in self._ends(text, match) if self._is_iban(text, Span(start, end))), None)
            if end is not None:
                yield Span(start, end)
            position = end or after_word(text, start)

    def _is_iban(self, text: str, span: Span) -> bool:
        number = iban.compact(text[span.start : span.end])
        if not mod_97_10.is_valid(number[4:] + number[:4]):
            return False
        assert self.context is not None
        return iban.is_valid(number) or has_context(text, span, self.context)

    def _ends(self, text: str, match: re.Match[str]) -> Iterator[int]:
        """Yield where the number may end, longest first: the pattern runs on into the words that follow."""
        for end in range(match.end(), match.start() + self.shortest - 1, -1):
            if stands_alone(text, Span(match.start(), end)):
                yield end


class BankAccount(Pattern):
    """Account, routing and sort numbers that are called so; a Spanish CCC by its checksum too."""

    entity = "BANK_ACCOUNT"
    pattern = re.compile(r"\d(?:[ -]?\d){6,19}|\d\d-\d\d-\d\d")
    context = words(
        r"(?:account|acct|a/c)\.? ?(?:number|num|no|nr)", r"account\W{0,2}#", "acct", "a/c", "sort ?code",
        "aba", "routing", "bank account", "konto ?(?:nummer|nr)", "bankkonto",
        r"num[ée]ro de compte", "compte bancaire", "rib", "cuenta(?: bancaria| corriente)?", r"n[úu]mero de cuenta",
        r"conto corrente", r"numero di conto", "rekening(?:nummer)?", "bankrekening",
        r"conta(?: corrente| banc[áa]ria)",
        "ccc", "खाता संख्या", "银行账号", "口座番号",
    )  # fmt: skip

    def valid(self, match: re.Match[str]) -> bool:
        digits = re.sub(r"\D", "", match.group())
        return len(digits) != 20 or ccc.is_valid(digits)
