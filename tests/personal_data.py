"""The labelled set: identifiers and near misses, in prose, chat, tables and code of several languages.

    python tests/personal_data.py          # ten of them

A case names the entity that its text holds, or none for a near miss. Many of the field names that people use
are in it, so that a recogniser which needs context has to know them.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import identifiers as make

NARROW_SPACE, FULL_WIDTH = "\u202f", {ord(digit): ord(digit) + 0xFEE0 for digit in make.DIGITS}
ARABIC_INDIC = {ord(digit): 0x660 + int(digit) for digit in make.DIGITS}


@dataclass(frozen=True)
class Case:
    text: str
    entity: str | None  # None: no personal data
    start: int  # of the identifier or near miss
    end: int
    kind: str  # the form of the text, or what the near miss is


# Language → how a field is spoken of; {name} and {value} are put in.
NAMED = {
    "en": ["Please update our records: the {name} of the applicant is {value}, as of last week.",
           "hey can you check if my {name} {value} is still ok? thx", "{name}: {value}\nPlan: basic\nSince: March",
           "Write a polite letter to my bank. My {name} is {value}.",
           "I typed {value} as the {name} and the form refuses it, why?"],
    "de": ["Meine {name} lautet {value}. Was muss ich jetzt tun?", "{name}: {value} \u2013 stimmt das so?"],
    "fr": ["Mon {name} est {value}, pouvez-vous vérifier ?", "Rédige un courrier.\n{name} : {value}\nMerci !"],
    "es": ["Mi {name} es {value} y necesito ayuda con el formulario.", "{name}: {value} (confirmado)"],
    "it": ["Il mio {name} è {value}, è corretto?", "{name}: {value}"],
    "nl": ["Mijn {name} is {value}, klopt dat?", "{name}: {value}"],
    "pt": ["Meu {name} é {value}, pode verificar?", "{name}: {value}"],
}  # fmt: skip
STRUCTURED = [  # the first four have the name apart from the value
    "INSERT INTO people (id, {key}) VALUES (3, '{value}');",
    "| customer | {name} | city |\n|---|---|---|\n| 1 | {value} | Leeds |\n\nSort this table by city.",
    "id,{key},note\n17,{value},paid\n\nConvert this to JSON.",
    "id\t{key}\tnote\n17\t{value}\tpaid",
    '{{"id": 4, "{key}": "{value}", "active": true}}',
    'record = {{"{key}": "{value}"}}  # why does this fail?\nsave(record)',
    "<person><{key}>{value}</{key}></person>",
    "{key}={value}",
]
UNNAMED = [
    "Could you send the contract to {value} before Friday?", "it's {value}, same as last time", "{value}",
    "(see {value}) and tell me what is wrong with the letter above.", "- first\n- {value}\n- third",
    "Anna wrote: {value}\nWhat should I answer?", "送信先は {value} です。", "Это {value}, проверьте, пожалуйста.",
    'x = "{value}"\nprint(x)', "| a | {value} | c |", "Bitte prüfen: {value}!", "¿Es correcto {value}?",
]  # fmt: skip


@dataclass(frozen=True)
class Kind:
    entity: str
    value: Callable[[Random], str]
    names: dict[str, str]  # language → what people call it, one or a|b|c
    unnamed: bool = True  # it can be told without a name
    assigned: bool = False  # only what is right after its name is one


KINDS = [
    Kind("EMAIL_ADDRESS", make.email, {"en": "email|contact", "de": "E-Mail-Adresse", "pt": "e-mail"}),
    Kind("PHONE_NUMBER", make.phone_international, {"en": "phone number|fax", "fr": "téléphone"}),
    Kind("PHONE_NUMBER", make.phone_national, {
        "en": "mobile|cell|phone no.|WhatsApp|Tel.", "de": "Telefonnummer|Handynummer|Rufnummer",
        "fr": "numéro de téléphone|portable",
        "es": "teléfono|móvil|celular", "it": "numero di cellulare|telefono", "nl": "telefoonnummer|mobiele nummer",
        "pt": "telefone|celular",
    }, unnamed=False),
    Kind("CREDIT_CARD", make.card, {"en": "credit card|Visa|card number", "de": "Kreditkarte", "fr": "carte bancaire",
                                    "es": "tarjeta"}),
    Kind("IBAN", make.iban, {"en": "IBAN", "de": "Kontoverbindung", "nl": "rekening"}),
    Kind("BANK_ACCOUNT", make.bank_account, {
        "en": "account number|bank account no.|acct #|routing number", "de": "Kontonummer|Konto-Nr.",
        "fr": "numéro de compte|compte bancaire",
        "es": "número de cuenta|cuenta bancaria", "it": "numero di conto|conto corrente",
        "nl": "rekeningnummer|bankrekening",
        "pt": "conta corrente|conta bancária",
    }, unnamed=False),
    Kind("US_SSN", make.us_ssn,
         {"en": "SSN|social security number|Social Security No.|soc sec number|Social Security #"}, unnamed=False),
    Kind("US_ITIN", make.us_itin, {"en": "ITIN|taxpayer id"}),
    Kind("UK_NINO", make.uk_nino, {"en": "National Insurance number|NINO|NI number"}),
    Kind("UK_NHS_NUMBER", make.uk_nhs, {"en": "NHS number|NHS no.|patient number (NHS)"}, unnamed=False),
    Kind("UK_UTR", make.uk_utr, {"en": "UTR|Unique Taxpayer Reference|self-assessment UTR"}, unnamed=False),
    Kind("DE_TAX_ID", make.de_tax_id, {"en": "German tax ID|TIN",
                                       "de": "Steuer-ID|Steueridentifikationsnummer|Steuer-IdNr.|IdNr."},
                                       unnamed=False),
    Kind("DE_TAX_NUMBER", make.de_tax_number, {"de": "Steuernummer|Steuer-Nr.|St.-Nr."}, unnamed=False),
    Kind("FR_SOCIAL_SECURITY", make.fr_social_security, {"fr": "numéro de sécurité sociale|NIR", "en": "INSEE number"}),
    Kind("FR_TAX_ID", make.fr_tax_id, {"fr": "numéro fiscal|identifiant fiscal|n° fiscal",
                                       "en": "tax number|French tax id"}, unnamed=False),
    Kind("ES_NATIONAL_ID", make.es_national_id, {"es": "DNI|NIF|documento de identidad", "en": "NIE"}),
    Kind("IT_FISCAL_CODE", make.it_fiscal_code, {"it": "codice fiscale", "en": "Italian tax code"}),
    Kind("NL_BSN", make.nl_bsn, {"nl": "BSN|burgerservicenummer|sofinummer|BSN-nummer", "en": "Dutch BSN"},
         unnamed=False),
    Kind("BR_CPF", make.br_cpf, {"pt": "CPF|número do CPF", "en": "CPF"}),
    Kind("BR_CPF", make.br_cpf_digits, {"pt": "CPF|número do CPF", "en": "CPF"}, unnamed=False),
    Kind("IN_AADHAAR", make.in_aadhaar, {"en": "Aadhaar number|Aadhar card|UIDAI no.|आधार संख्या"}, unnamed=False),
    Kind("IN_PAN", make.in_pan, {"en": "PAN|PAN card"}),
    Kind("PASSPORT", make.passport, {
        "en": "passport number|Passport No.|US passport", "de": "Reisepassnummer|Reisepass-Nr.|Passnummer",
        "fr": "passeport|numéro de passeport",
        "es": "pasaporte|número de pasaporte", "it": "passaporto", "nl": "paspoortnummer", "pt": "passaporte",
    }, unnamed=False),
    Kind("IP_ADDRESS", make.ip_address, {"en": "IP|client address", "de": "IP-Adresse"}),
    Kind("MAC_ADDRESS", make.mac_address, {"en": "MAC address|hwaddr"}),
    Kind("API_KEY", make.api_key, {"en": "API key|credential"}),
    Kind("TOKEN", make.jwt, {"en": "session|access token"}),
    Kind("TOKEN", make.bearer, {"en": "authorization|header"}),
    Kind("PRIVATE_KEY", make.private_key, {"en": "private key|ssh key"}),
    Kind("URL_PASSWORD", make.url_with_password, {"en": "database|connection string"}),
    Kind("PASSWORD", make.password_value, {"en": "password|Password|passphrase|WiFi password",
                                           "de": "Passwort|Kennwort", "fr": "mot de passe",
         "es": "contraseña", "pt": "senha", "nl": "wachtwoord"}, unnamed=False, assigned=True),
]  # fmt: skip
NUMBERS = {
    "CREDIT_CARD",
    "IBAN",
    "US_SSN",
    "BR_CPF",
    "IN_AADHAAR",
    "PHONE_NUMBER",
    "FR_SOCIAL_SECURITY",
    "UK_NHS_NUMBER",
}


def cases(seed: int, *, per_kind: int, per_near_miss: int) -> Iterator[Case]:
    random = Random(seed)
    for kind in KINDS:
        for _ in range(per_kind):
            yield _positive(random, kind)
    for name, value in NEAR_MISSES.items():
        for _ in range(per_near_miss):
            yield _filled(random.choice(AROUND), value(random), None, name)


def _positive(random: Random, kind: Kind) -> Case:
    value = kind.value(random)
    language = random.choice(list(kind.names))
    name = random.choice(kind.names[language].split("|"))
    if kind.unnamed and random.random() < 0.5:
        return _filled(random.choice(UNNAMED), _in_other_script(random, kind, value), kind.entity, "unnamed")
    if random.random() < 0.4:
        template = random.choice(STRUCTURED[4 * kind.assigned :])
        key = re.sub(r"[\s().#°/-]+", "_", name.lower()).strip("_")
        return _filled(template, value, kind.entity, "structured", name=name, key=key)
    templates = [template for template in NAMED[language] if "{name}" in template.partition("{value}")[0]]
    template = random.choice(templates if kind.assigned else NAMED[language])
    return _filled(template, _in_other_script(random, kind, value), kind.entity, language, name=name)


def _in_other_script(random: Random, kind: Kind, value: str) -> str:
    """Now and then with the narrow blanks, dashes and digits of another keyboard."""
    if kind.entity not in NUMBERS or random.random() > 0.15:
        return value
    return random.choice(
        [
            value.replace(" ", NARROW_SPACE),
            value.replace("-", "\u2011"),
            value.translate(FULL_WIDTH),
            value.translate(ARABIC_INDIC),
        ]
    )


def _filled(template: str, value: str, entity: str | None, kind: str, **names: str) -> Case:
    before, _, after = template.partition("{value}")
    before = before.format(**names)
    return Case(before + value + after.format(**names), entity, len(before), len(before) + len(value), kind)


# Near misses: they look like personal data and are none.

AROUND = [
    "What does {value} mean here?", "{value}", "I get {value} in the log, is that normal?",
    "result = f({value})\nassert result",
    "- first\n- {value}\n- third", "Rewrite this line: {value}", "| a | {value} | c |", "Warum steht da {value}?",
]  # fmt: skip


def _other(random: Random, value: str, position: int) -> str:
    """The value with another digit or letter in this position from its end, so that its checksum fails."""
    position += len(value)
    old = value[position]
    alphabet = make.DIGITS if old.isdigit() else make.UPPER
    return value[:position] + random.choice([char for char in alphabet if char != old]) + value[position + 1 :]


def _iban_with_wrong_digits(random: Random) -> str:
    value = make.iban(random).upper()
    return value[:2] + f"{(int(value[2:4]) - 2 + random.randrange(1, 97)) % 97 + 2:02}" + value[4:]


def _version(random: Random) -> str:
    numbers = ".".join(str(random.randrange(30)) for _ in range(4))
    return random.choice([f"version {numbers}", f"v{numbers}", f"numpy=={numbers}", f"release {numbers}",
                          f"{numbers}-rc1",
                          f"firmware {numbers}", f"tool-{numbers}.tar.gz"])  # fmt: skip


def _isbn(random: Random) -> str:
    body = "978" + make.chars(random, make.DIGITS, 9)
    check = -sum(int(digit) * (1 + 2 * (index % 2)) for index, digit in enumerate(body)) % 10
    return random.choice([f"ISBN {body}{check}", f"ISBN 978-{body[3]}-{body[4:8]}-{body[8:]}-{check}"])


def _date(random: Random) -> str:
    day, month, year = random.randrange(1, 29), random.randrange(1, 13), random.randrange(1950, 2030)
    hour, minute = random.randrange(24), random.randrange(60)
    return random.choice([f"{year}-{month:02}-{day:02} {hour:02}:{minute:02}:00", f"{day:02}.{month:02}.{year}",
                          f"{month}/{day}/{year}",
                          f"{year}{month:02}{day:02}T{hour:02}{minute:02}00Z",
                          f"{day:02}-{month:02}-{year} {hour:02}:{minute:02}",
                          f"{year}-{month:02}-{day:02}"])  # fmt: skip


def _code(random: Random) -> str:
    number = random.randrange(10**9, 10**10)
    return random.choice([f"0x{number:016x}", f"{random.random()}", f"{random.gauss(0, 1e3)!r}",
                          f"1 << {random.randrange(64)}", f"{number}.0",
                          f"[{number % 97}, {number % 89}, {number % 83}]", f"x[{number % 9}::{number % 7}]",
                          "std::deque<face::id>",
                          f"np.array([[{random.random():.4f}, {random.random():.4f}], [{random.random():.4f}, 0.5]])",
                          "weights@x.transpose", "a @ b.T", f"{number % 1000}_{number % 999:03}_000",
                          f"{2**63 - number}", "12:30:45",
                          "@pytest.mark.parametrize", "self.password = getpass(prompt)",
                          "password=os.environ['DB_PASSWORD']",
                          "def login(user: str, password: str = None):", f"seed={number}",
                          f"1{random.randrange(10**12):012}"])  # fmt: skip


def _order(random: Random) -> str:
    return random.choice(
        ["order number ", "invoice no. ", "tracking number ", "ticket #", "Bestellnummer ", "SKU ", "case "]
    ) + make.digits(random, random.choice([6, 8, 9, 10, 12]))


def _not_a_host(random: Random) -> str:
    last = random.randrange(1, 255)
    return random.choice(["127.0.0.1", f"127.0.1.{last}", f"192.0.2.{last}", f"198.51.100.{last}",
                          f"203.0.113.{last}", "0.0.0.0", "::1",
                          f"2001:db8::{last:x}", f"2001:db8:85a3::8a2e:370:{last:x}", "255.255.255.0", "10.0.0.0/8",
                          "224.0.0.251",
                          "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "192.168.0.0/16"])  # fmt: skip


def _not_a_person(random: Random) -> str:
    user = random.choice(["alice", "john.doe", "test"])
    return random.choice([f"git@github.com:org/repo{random.randrange(99)}.git", f"{user}@example.com",
                          f"{user}@mail.example.org", "noreply@github.com",
                          "no-reply@accounts.google.com",
                          f"{random.randrange(10**7)}+{user}@users.noreply.github.com", f"{user}@localhost",
                          "git@gitlab.com:a/b.git", "icon@2x.png", "react@18.2.0", f"{user}@example.net",
                          "@types/node@20.1.0"])  # fmt: skip


def _placeholder(random: Random) -> str:
    return random.choice(["password: ********", "password=<your password>", "api_key = 'YOUR_API_KEY_GOES_HERE_123'",
                          "sk-" + "x" * 48,
                          "Authorization: Bearer YOUR_ACCESS_TOKEN_1", "postgres://user:password@localhost/db",
                          "PASSWORD=${DB_PASSWORD}",
                          "AKIAIOSFODNN7EXAMPLE", "https://user:pass@host/", 'password = "password"',
                          "ghp_" + "0" * 36, "Bearer <token>"])  # fmt: skip


def _public_key(random: Random) -> str:
    body = make.base64.b64encode(random.randbytes(96)).decode()
    return random.choice([f"-----BEGIN PUBLIC KEY-----\n{body}\n-----END PUBLIC KEY-----", f"ssh-ed25519 {body[:68]}",
                          f"-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----", f"sha256-{body[:43]}=",
                          ":".join(f"{byte:02x}" for byte in random.randbytes(16)),
                          'if "-----BEGIN RSA PRIVATE KEY-----" in text:'])  # fmt: skip


def _hash(random: Random) -> str:
    data = random.randbytes(8)
    name = random.choice(["md5", "sha1", "sha256", "sha512"])
    return random.choice([hashlib.new(name, data).hexdigest(), f"commit {hashlib.sha1(data).hexdigest()[:12]}"])


NEAR_MISSES: dict[str, Callable[[Random], str]] = {
    "card, wrong digit": lambda random: _other(random, make.card(random), -1),
    "IBAN, wrong check digits": _iban_with_wrong_digits,
    "CPF, wrong digit": lambda random: _other(random, make.br_cpf(random), -1),
    "NIR, wrong key": lambda random: _other(random, make.fr_social_security(random), -1),
    "codice fiscale, wrong letter": lambda random: _other(random, make.it_fiscal_code(random).upper(), -1),
    "DNI, wrong letter": lambda random: _other(random, make.es_national_id(random), -1),
    "Aadhaar, wrong digit": lambda random: _other(random, make.in_aadhaar(random), -1),
    "SSN, no such area": lambda random: (
        f"{random.choice(['000', '666'])}-{make.us_ssn(random)[-4:-2]}-{make.digits(random, 4)}"
    ),
    "NINO, no such prefix": lambda random: f"{random.choice(['BG', 'GB', 'ZZ', 'DA', 'AO'])}{make.digits(random, 6)}A",
    "UUID": lambda random: str(uuid.UUID(int=random.getrandbits(128), version=4)),
    "hash": _hash,
    "version": _version,
    "ISBN": _isbn,
    "date": _date,
    "code": _code,
    "order number": _order,
    "no host": _not_a_host,
    "no person": _not_a_person,
    "placeholder": _placeholder,
    "public key": _public_key,
}


if __name__ == "__main__":
    everything = list(cases(0, per_kind=20, per_near_miss=20))
    for case in Random(0).sample(everything, 10):
        print(case.entity or case.kind, repr(case.text))
