"""Payment identifiers: credit cards, IBANs, bank accounts."""

import re
from collections.abc import Iterator

from stdnum import iban, luhn
from stdnum.es import ccc
from stdnum.iso7064 import mod_97_10

from eagle3.prompts.privacy.recogniser import Pattern, Span, after_word, has_context, stands_alone, words

# Ranges and lengths of the card networks in use (ISO/IEC 7812). Other numbers with a valid Luhn digit, such as IMEIs,
# are not cards.
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
SHORT_CARD = 13  # digits: few old cards have so many, every barcode does

credit_cards = Pattern(  # in one piece or in groups; short numbers and those of other issuers need a word
    re.compile(
        r"\d{4}(?:(?P<gap>[ .-]|  | - )(?:\d{4}(?P=gap)\d{4}(?P=gap)\d{3,4}(?:(?P=gap)\d{3})?|\d{6}(?P=gap)\d{4,5})"
        r"|\d{8,15})"
    ),
    valid=lambda match: luhn.is_valid(extract_digits(match.group())),
    clear=lambda match: len(match.group()) > SHORT_CARD and ISSUERS.fullmatch(extract_digits(match.group())),
    context=words(
        "cards?", "visa", "credit", "debit", r"cc(?:n|num)?", "karte", "kreditkarte", "carte", "tarjeta",
        r"cart[aã]o", "carta", "kaart", "creditcard",
    ),
)  # fmt: skip


def extract_digits(text: str) -> str:
    return re.sub(r"\D", "", text)


IBAN = re.compile(r"[A-Z]{2}\d\d(?:[ -]?[A-Z0-9]){11,30}", re.IGNORECASE)
SHORTEST_IBAN = 15
IBAN_WORDS = words("iban", "transfer(?:red)?", "wire", r"[üu]berweis\w*", "virement", "transferencia", "bonifico")


def ibans(text: str) -> Iterator[Span]:
    """Find numbers with country, length and check digits of ISO 13616, in one piece or in groups, in either case.

    Near a word such as IBAN the check digits are enough: countries join, and change their lengths.
    """
    position = 0
    while match := IBAN.search(text, position):
        start = match.start()
        # The pattern may extend into the following words: the longest valid end counts.
        ends = (Span(start, end) for end in range(match.end(), start + SHORTEST_IBAN - 1, -1))
        found = next((span for span in ends if stands_alone(text, span) and _is_iban(text, span)), None)
        if found is not None:
            yield found
        position = found.end if found else after_word(text, start)


def _is_iban(text: str, span: Span) -> bool:
    number = iban.compact(text[span.start : span.end])
    return mod_97_10.is_valid(number[4:] + number[:4]) and (
        iban.is_valid(number) or has_context(text, span, IBAN_WORDS)
    )


DATE = re.compile(r"(?:19|20)\d\d-[01]\d-[0-3]\d")

bank_accounts = Pattern(  # account, routing and sort numbers near such a word; a Spanish CCC also needs its checksum
    re.compile(r"\d(?:[ -]?\d){6,19}|\d\d-\d\d-\d\d|\d{4,6}-[\dxX]"),
    valid=lambda match: (
        not DATE.fullmatch(match.group())
        and (len(digits := extract_digits(match.group())) != 20 or ccc.is_valid(digits))
    ),
    context=words(
        r"(?:account|acct|a/c)\.? ?(?:number|num|no|nr)", r"account\W{0,2}#", "acct", "a/c", "sort ?code",
        "aba", "routing", "bank account", "konto ?(?:nummer|nr)", "bankkonto",
        r"num[ée]ro de compte", "compte bancaire", "rib", "cuenta(?: bancaria| corriente)?", r"n[úu]mero de cuenta",
        r"conto corrente", r"numero di conto", "rekening(?:nummer)?", "bankrekening",
        r"conta(?: corrente| banc[áa]ria)", "ccc", "clabe", "bsb", "nuban", "ifsc", "giro(?:konto)?",
        "(?:bank|plus)giro", "agência", r"transit(?= (?:number|num|no|\d{5})\b)", "institution (?:number|num|no)",
        "bank details", "blz", r"kto\W{0,3}nr", r"konto(?=\W{1,3}(?:\d|\Z))", r"compte n(?=\W{1,3}(?:\d|\Z))",
        r"(?:my|his|her|our|your|their|customer(?:['\u2019]s)?) account(?=\W{1,3}(?:\d|\Z))",
        "account to (?:debit|credit|charge)", r"(?:payee|beneficiary)(?:['\u2019]s)? account",
        r"num[eé]r (?:konta|rachunku)", r"[čc][íi]slo [úu][čc]tu", "kontonummer", r"банковск\w{2,4} сч[её]т\w*",
        r"(?:checking|savings|current) account", "direct deposit", "खाता संख्या", "银行账号", "口座番号",
    ),
)  # fmt: skip
