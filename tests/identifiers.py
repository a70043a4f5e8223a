"""Valid identifiers of every kind at random, from their public specifications.

Checksums are computed here, apart from the recognisers and the libraries that they use; phone numbers come from
phonenumbers, which is the only list of numbering plans there is.
"""

import base64
import json
import string
from random import Random

import phonenumbers
from phonenumbers import PhoneNumberFormat

DIGITS, UPPER = string.digits, string.ascii_uppercase
ALNUM = string.ascii_letters + string.digits


def chars(random: Random, alphabet: str, count: int) -> str:
    return "".join(random.choices(alphabet, k=count))


def digits(random: Random, count: int, *, first: str = "123456789") -> str:
    return random.choice(first) + chars(random, DIGITS, count - 1)


def grouped(number: str, sizes: tuple[int, ...], gap: str) -> str:
    parts, rest = [], number
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    return gap.join(parts + ([rest] if rest else []))


# Payment


def luhn_digit(body: str) -> str:
    doubled = [int(digit) * (2 - index % 2) for index, digit in enumerate(reversed(body))]
    return str(-sum(value // 10 + value % 10 for value in doubled) % 10)


def card(random: Random) -> str:
    prefix, length = random.choice(
        [("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("2650", 16), ("34", 15), ("37", 15), ("6011", 16), ("65",
            16),
         ("36", 14), ("3530", 16), ("62", 16)]
    )  # fmt: skip
    body = prefix + chars(random, DIGITS, length - len(prefix) - 1)
    number = body + luhn_digit(body)
    sizes = {16: (4, 4, 4), 15: (4, 6), 14: (4, 6)}[length]
    return random.choice([number, grouped(number, sizes, " "), grouped(number, sizes, "-")])


IBAN_FORMS = {  # the BBAN: n digit, a capital letter, c either
    "DE": "n" * 18, "GB": "aaaa" + "n" * 14, "NL": "aaaa" + "n" * 10, "ES": "n" * 20, "CH": "n" * 5 + "c" * 12,
    "BE": "n" * 12, "AT": "n" * 16, "PL": "n" * 24, "PT": "n" * 21, "SE": "n" * 20,
}  # fmt: skip
CHECKED_INSIDE = {"ES", "BE"}  # their BBAN has a checksum of its own


def iban(random: Random) -> str:
    country = random.choice([code for code in IBAN_FORMS if code not in CHECKED_INSIDE])
    alphabets = {"n": DIGITS, "a": UPPER, "c": DIGITS + UPPER}
    bban = "".join(random.choice(alphabets[kind]) for kind in IBAN_FORMS[country])
    value = int("".join(str(int(char, 36)) for char in bban + country + "00"))
    number = f"{country}{98 - value % 97:02}{bban}"
    return random.choice([number, grouped(number, (4,) * 9, " ").rstrip(), number.lower()])


def bank_account(random: Random) -> str:
    return random.choice([digits(random, 8), digits(random, 10), digits(random, 12)])


# National and tax ids


def us_ssn(random: Random) -> str:
    area = random.choice([number for number in range(1, 900) if number not in (666, 78, 219, 457)])
    parts = f"{area:03}", f"{random.randrange(1, 100):02}", f"{random.randrange(1, 10000):04}"
    return random.choice(["-", "-", "-", " ", ""]).join(parts)


def us_itin(random: Random) -> str:
    group = random.choice([*range(70, 89), 90, 91, 92, *range(94, 100)])
    return f"9{chars(random, DIGITS, 2)}-{group}-{chars(random, DIGITS, 4)}"


def uk_nino(random: Random) -> str:
    while (prefix := random.choice("ABCEGHJKLMNOPRSTWXYZ") + random.choice("ABCEGHJKLMNPRSTWXYZ")) in (
        "BG", "GB", "KN", "NK", "NT", "TN", "ZZ",
    ):  # fmt: skip
        pass
    number = prefix + chars(random, DIGITS, 6) + random.choice("ABCD")
    return random.choice([number, grouped(number, (2, 2, 2, 2), " ")])


def uk_nhs(random: Random) -> str:
    while True:
        body = digits(random, 9)
        check = 11 - sum(int(digit) * weight for digit, weight in zip(body, range(10, 1, -1), strict=True)) % 11
        if check != 10:
            number = body + str(check % 11)
            return random.choice([number, grouped(number, (3, 3), " ")])


def uk_utr(random: Random) -> str:
    body = digits(random, 9)
    rest = sum(int(digit) * weight for digit, weight in zip(body, (6, 7, 8, 9, 10, 5, 4, 3, 2), strict=True)) % 11
    number = "21987654321"[rest] + body
    return random.choice([number, grouped(number, (5,), " ")])


def de_tax_number(random: Random) -> str:
    """As the tax offices of three Länder write it; it has no checksum that is the same everywhere."""
    sizes = random.choice([(2, 3), (3, 3)])  # 21/815/08150 in Hesse and others, 181/815/08155 in Bavaria and others
    return "/".join(digits(random, size) for size in (*sizes, 5))


def de_tax_id(random: Random) -> str:
    twice, *once = random.sample(DIGITS, 9)
    body = [twice, twice, *once]
    random.shuffle(body)
    if body[0] == "0":
        body = body[1:] + body[:1] if body[1] != "0" else body[2:] + body[:2]
    product = 10
    for digit in body:
        total = (int(digit) + product) % 10 or 10
        product = total * 2 % 11
    number = "".join(body) + str((11 - product) % 10)
    return random.choice([number, grouped(number, (2, 3, 3), " ")])


def fr_social_security(random: Random) -> str:
    body = f"{random.choice('12')}{random.randrange(100):02}{random.randrange(1, 13):02}"
    body += f"{random.randrange(1, 96):02}" if random.random() < 0.9 else random.choice(["2A", "2B"])
    body = body.replace("20", "21") if body[5:7] == "20" else body
    body += f"{random.randrange(1, 990):03}{random.randrange(1, 1000):03}"
    value = int(body.replace("2A", "19").replace("2B", "18")) if body[5:7] in ("2A", "2B") else int(body)
    number = body + f"{97 - value % 97:02}"
    return random.choice([number, grouped(number, (1, 2, 2, 2, 3, 3), " ")])


def fr_tax_id(random: Random) -> str:
    body = random.choice("0123") + chars(random, DIGITS, 9)
    number = body + f"{int(body) % 511:03}"
    return random.choice([number, grouped(number, (2, 2, 3, 3), " ")])


def es_national_id(random: Random) -> str:
    letters = "TRWAGMYFPDXBNJZSQVHLCKE"
    if random.random() < 0.5:
        body = chars(random, DIGITS, 8)
        letter = letters[int(body) % 23]
        return random.choice([body + letter, f"{body}-{letter}", f"{body[:2]}.{body[2:5]}.{body[5:]}-{letter}"])
    start, body = random.randrange(3), chars(random, DIGITS, 7)
    letter = letters[int(f"{start}{body}") % 23]
    return random.choice([f"{'XYZ'[start]}{body}{letter}", f"{'XYZ'[start]}-{body}-{letter}"])


ODD_VALUES = dict(zip(DIGITS + UPPER, [1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 1, 0, 5, 7, 9, 13, 15, 17, 19, 21, 2, 4, 18,
                                       20, 11, 3, 6, 8, 12, 14, 16, 10, 22, 25, 24, 23], strict=True))  # fmt: skip


def it_fiscal_code(random: Random) -> str:
    name = chars(random, "BCDFGLMNPRSTVZ", 6)
    day = random.randrange(1, 29) + random.choice((0, 40))
    body = f"{name}{random.randrange(30, 99)}{random.choice('ABCDEHLMPRST')}{day:02}{random.choice('ABCDEFGHIL')}"
    body += f"{random.randrange(1, 999):03}"
    even_values = {**{digit: int(digit) for digit in DIGITS}, **{letter: ord(letter) - 65 for letter in UPPER}}
    total = sum((even_values if index % 2 else ODD_VALUES)[char] for index, char in enumerate(body))
    number = body + UPPER[total % 26]
    return random.choice([number, number.lower()])


def nl_bsn(random: Random) -> str:
    while True:
        body = digits(random, 8)
        check = sum(int(digit) * weight for digit, weight in zip(body, range(9, 1, -1), strict=True)) % 11
        if check != 10:
            number = body + str(check)
            return random.choice([number, grouped(number, (4, 2), ".")])


def br_cpf(random: Random) -> str:
    number = digits(random, 9)
    for _ in range(2):
        weights = range(len(number) + 1, 1, -1)
        rest = sum(int(digit) * weight for digit, weight in zip(number, weights, strict=True)) % 11
        number += str(0 if rest < 2 else 11 - rest)
    return f"{number[:3]}.{number[3:6]}.{number[6:9]}-{number[9:]}"


def br_cpf_digits(random: Random) -> str:
    return br_cpf(random).replace(".", "").replace("-", "")


DIHEDRAL = [[(i + j) % 5 if i < 5 and j < 5 else (i + j) % 5 + 5 if i < 5 else (i - j) % 5 + 5 if j < 5 else (i - j) % 5
             for j in range(10)] for i in range(10)]  # fmt: skip
SHIFT = [1, 5, 7, 6, 2, 8, 3, 0, 9, 4]


def verhoeff_digit(body: str) -> str:
    """The digit that brings the product of all permuted digits to 0 in the dihedral group D5."""
    for candidate in DIGITS:
        check = 0
        for index, digit in enumerate(reversed(body + candidate)):
            value = int(digit)
            for _ in range(index % 8):
                value = SHIFT[value]
            check = DIHEDRAL[check][value]
        if check == 0:
            return candidate
    raise AssertionError


def in_aadhaar(random: Random) -> str:
    body = digits(random, 11, first="23456789")
    number = body + verhoeff_digit(body)
    return random.choice([number, grouped(number, (4, 4), " ")])


def in_pan(random: Random) -> str:
    return f"{chars(random, UPPER, 3)}P{random.choice(UPPER)}{random.randrange(1, 10000):04}{random.choice(UPPER)}"


def passport(random: Random) -> str:
    forms = [
        digits(random, 9),  # US, GB
        "C" + chars(random, "CFGHJKLMNPRTVWXYZ0123456789", 7) + random.choice(DIGITS),  # DE
        f"{chars(random, DIGITS, 2)}{chars(random, UPPER, 2)}{chars(random, DIGITS, 5)}",  # FR
        f"{chars(random, UPPER, 3)}{chars(random, DIGITS, 6)}",  # ES
        f"{chars(random, UPPER, 2)}{chars(random, DIGITS, 7)}",  # IT
        f"{chars(random, UPPER, 2)}{chars(random, DIGITS, 6)}",  # BR
        f"{random.choice(UPPER)}{digits(random, 7)}",  # IN
        f"{chars(random, UPPER, 2)}{chars(random, DIGITS + UPPER, 6)}{random.choice(DIGITS)}",  # NL
    ]
    return random.choice(forms)


# Contact


def email(random: Random) -> str:
    first, last = (
        random.choice(["anna", "jürgen", "li", "maria", "tom", "x"]),
        random.choice(["berg", "o'neil", "wu", "silva"]),
    )
    user = random.choice(
        [
            f"{first}.{last}",
            f"{first}_{last}{random.randrange(99)}",
            f"{first}+news",
            f"{first[0]}{last}",
            first.upper(),
        ]
    )
    domain = random.choice(["gmail.com", "web.de", "firma-nord.de", "mail.co.uk", "corp.internal-mail.io", "uol.com.br",
                            "laposte.net", "iitb.ac.in", "münchner-verein.de", "startup.ai"])  # fmt: skip
    return f"{user}@{domain}"


PHONE_REGIONS = ("US", "GB", "DE", "FR", "ES", "IT", "NL", "BR", "IN")


def valid_phone(random: Random, region: str) -> phonenumbers.PhoneNumber:
    """The example of the region with its last digits at random, as long as the numbering plan takes it."""
    kind = random.choice([phonenumbers.PhoneNumberType.MOBILE, phonenumbers.PhoneNumberType.FIXED_LINE])
    example = phonenumbers.example_number_for_type(region, kind) or phonenumbers.example_number(region)
    assert example is not None
    national = phonenumbers.national_significant_number(example)
    for changed in (6, 5, 4, 3):
        candidate = f"+{example.country_code}{national[:-changed]}{chars(random, DIGITS, changed)}"
        if phonenumbers.is_valid_number(phone := phonenumbers.parse(candidate)):
            return phone
    return example


def phone_international(random: Random) -> str:
    region = random.choice([*PHONE_REGIONS, *random.sample(sorted(phonenumbers.SUPPORTED_REGIONS), 3)])
    phone = valid_phone(random, region)
    written = phonenumbers.format_number(phone, PhoneNumberFormat.INTERNATIONAL)
    return random.choice(
        [written, phonenumbers.format_number(phone, PhoneNumberFormat.E164), written.replace(" ", "-"),
         written.replace(" ", "."), written.replace("+", "00", 1), phonenumbers.format_number(phone,
             PhoneNumberFormat.RFC3966)]
    )  # fmt: skip


def phone_national(random: Random) -> str:
    phone = valid_phone(random, random.choice(PHONE_REGIONS))
    written = phonenumbers.format_number(phone, PhoneNumberFormat.NATIONAL)
    return random.choice([written, written, written.replace("-", " "), "".join(filter(str.isdigit, written))])


# Network, places


def ip_address(random: Random) -> str:
    if random.random() < 0.6:
        first = random.choice([5, 10, 31, 46, 81, 93, 104, 151, 172, 185, 192, 212])
        return f"{first}.{random.randrange(30, 160)}.{random.randrange(256)}.{random.randrange(1, 255)}"
    prefix = random.choice(["2a02", "2600", "2804", "fd12", "fe80"])
    if random.random() < 0.5:
        return ":".join([prefix, *(f"{random.randrange(1, 65536):x}" for _ in range(7))])
    return f"{prefix}:{random.randrange(1, 65536):x}::{random.randrange(1, 65536):x}"


def mac_address(random: Random) -> str:
    octets = [
        f"{random.randrange(4, 255) & 254:02x}",
        *(f"{random.randrange(256):02x}" for _ in range(4)),
        f"{random.randrange(10, 15):02x}",
    ]
    return random.choice(
        [":".join(octets), "-".join(octets).upper(), ".".join("".join(octets[i : i + 2]) for i in (0, 2, 4))]
    )


# Secrets


def api_key(random: Random) -> str:
    return random.choice(
        ["AKIA" + chars(random, UPPER + "234567", 16), "ghp_" + chars(random, ALNUM, 36), "sk_live_" + chars(random,
            ALNUM, 24),
         "sk-proj-" + chars(random, ALNUM + "_-", 48) + "x", "AIza" + chars(random, ALNUM + "_-", 34) + "x",
         "hf_" + chars(random, string.ascii_letters, 34),
         f"xoxb-{digits(random, 12)}-{digits(random, 12)}-{chars(random, ALNUM, 24)}", "glpat-" + chars(random, ALNUM,
             20),
         f"SG.{chars(random, ALNUM, 22)}.{chars(random, ALNUM, 43)}", "npm_" + chars(random, ALNUM, 36),
         "sk-ant-api03-" + chars(random, ALNUM + "_-", 93) + "AA",
         f"github_pat_{chars(random, ALNUM, 22)}_{chars(random, ALNUM, 59)}"]
    )  # fmt: skip


def base64url(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")


def jwt(random: Random) -> str:
    header = {"alg": random.choice(["HS256", "RS256"]), "typ": "JWT"}
    claims = {"sub": digits(random, 10), "name": chars(random, ALNUM, 9), "iat": random.randrange(10**9)}
    return ".".join(
        [*(base64url(json.dumps(part).encode()) for part in (header, claims)), base64url(random.randbytes(32))]
    )


def bearer(random: Random) -> str:
    return "Bearer " + chars(random, ALNUM, 31) + random.choice(DIGITS)


def private_key(random: Random) -> str:
    kind = random.choice(["RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", ""])
    body = base64.b64encode(random.randbytes(240)).decode()
    gap = random.choice(["\n", "\\n"])
    lines = [
        f"-----BEGIN {kind}PRIVATE KEY-----",
        *(body[i : i + 64] for i in range(0, len(body), 64)),
        f"-----END {kind}PRIVATE KEY-----",
    ]
    return gap.join(lines)


def password_value(random: Random) -> str:
    return (
        random.choice(["Sommer", "hunter", "Tr0ub4dor", "qW", "blauerHund"])
        + random.choice("!#?_-.")
        + digits(random, 4)
        + random.choice("kXz")
    )


def url_with_password(random: Random) -> str:
    scheme, port = random.choice([("postgres", 5432), ("https", 443), ("redis", 6379), ("mongodb+srv", 27017)])
    password = chars(random, ALNUM, 9) + random.choice(DIGITS)
    user, host = random.choice(["admin", "svc_app", "root", ""]), f"db{random.randrange(9)}.firma-nord.de"
    return f"{scheme}://{user}:{password}@{host}:{port}/main"
