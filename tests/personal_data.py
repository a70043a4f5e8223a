"""The labelled set: identifiers and near misses, in prose, chat, tables and code of several languages.

    python tests/personal_data.py          # ten of them

A case names the entity that its text holds, or none for a near miss. Many of the field names that people use are in it,
so that a recogniser which needs context has to know them. Values are drawn in written forms such as "<d3>-<d2>-<d4>"
until python-stdnum finds them valid: the cases are for the forms and the words around them.
"""

import base64
import json
import re
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

import phonenumbers
from phonenumbers import PhoneNumberFormat, PhoneNumberType
from stdnum import iban, isbn, luhn
from stdnum.br import cpf
from stdnum.de import idnr
from stdnum.es import dni, nie
from stdnum.fr import nif, nir
from stdnum.gb import nhs, utr
from stdnum.in_ import aadhaar
from stdnum.it import codicefiscale
from stdnum.nl import bsn
from stdnum.us import itin, ssn


@dataclass(frozen=True)
class Case:
    text: str
    entity: str | None  # None: no personal data
    start: int  # of the identifier or near miss
    end: int
    kind: str  # the form of the text, or what the near miss is


# --- values ----------------------------------------------------------------------------------------------------------

Value = Callable[[Random], str]
ALNUM, UPPER, DIGITS = string.ascii_letters + string.digits, string.ascii_uppercase, string.digits
CHARACTERS = {  # in a form, <d3> is three digits, <[12]> is 1 or 2
    "d": DIGITS, "D": "123456789", "A": UPPER, "c": UPPER + DIGITS, "l": string.ascii_letters, "a": ALNUM,
    "w": ALNUM + "_-", "b": ALNUM + "+/", "h": "0123456789abcdef", "U": "0123456789ABCDEF",
}  # fmt: skip
NUMBERS = {  # <n> is a number of this range: small, of an address, a month, day, year, hour, minute
    "n": (0, 30), "i": (30, 160), "m": (10, 13), "t": (10, 29), "Y": (1950, 2030), "H": (10, 24), "M": (10, 60),
}  # fmt: skip
PART = re.compile(r"<(\w|\[[^]]+\])(\d*)>")


def drawn(forms: str, valid: Callable[[str], bool] = bool, *, wrong: bool = False) -> Value:
    """Return a function that fills one of the forms, which | separates, with a `valid` value, or with a wrong one."""

    def draw(random: Random) -> str:
        def part(match: re.Match[str]) -> str:
            if match[1] in NUMBERS:
                return str(random.randrange(*NUMBERS[match[1]]))
            return "".join(random.choices(CHARACTERS.get(match[1]) or match[1][1:-1], k=int(match[2] or 1)))

        form = random.choice(forms.split("|"))
        while bool(valid(re.sub(r"[ .-]", "", value := PART.sub(part, form)))) == wrong:
            pass
        return value

    return draw


def either(*values: Value) -> Value:
    return lambda random: random.choice(values)(random)


CARD = (
    "4<d15>|51<d14>|55<d2> <d4> <d4> <d4>|2221<d12>|2650-<d4>-<d4>-<d4>|34<d2> <d6> <d5>|37<d13>|6011 <d4> <d4> <d4>"
    "|65<d14>|36<d2>-<d6>-<d4>|3530<d12>|62<d2> <d4> <d4> <d4>"
)
IBAN = (
    "DE<d20>|de<d20>|DE<d2> <d4> <d4> <d4> <d4> <d2>|GB<d2> <A4> <d4> <d4> <d4> <d2>|NL<d2><A4><d10>|CH<d7><c12>"
    "|AT<d2> <d4> <d4> <d4> <d4>|PL<d26>|PT<d23>|SE<d2> <d4> <d4> <d4> <d4> <d4>"
)
CPF, SPANISH = "<D><d2>.<d3>.<d3>-<d2>", "<d8><A>|<d8>-<A>|<d2>.<d3>.<d3>-<A>"
FRENCH = "<[12]><d2>0<D><D><d9>|<[12]> <d2> 1<[012]> <D><d> <d3> <d3> <d2>|<[12]> <d2> 0<D> 2<[AB]> <d3> <d3> <d2>"
ITALIAN = "<[BCDFGLMNPRSTVZ]6><D><d><[ABCDEHLMPRST]><[0145]><D><[ABCDEFGHIL]><D><d2><A>"
AADHAAR = "<[23456789]><d11>|<[23456789]><d3> <d4> <d4>"
PASSPORT = (  # US and GB, DE, FR, ES, IT, BR, IN, NL
    "<D><d8>|C<[CFGHJKLMNPRTVWXYZ0123456789]7><d>|<d2><A2><d5>|<A3><d6>|<A2><d7>|<A2><d6>|<A><D><d6>|<A2><c6><d>"
)
IP = (
    "5.<i>.<n>.<i>|10.<i>.<i>.<i>|31.<i>.<i>.<i>|93.<i>.<i>.<i>|151.<i>.<i>.<i>|185.<i>.<i>.<i>|212.<i>.<i>.<i>"
    "|2a02:<h4>:<h4>:<h4>:<h4>:<h4>:<h4>:<h3>|2600:<h4>::<h3>|fd12:<h3>::<h4>|fe80:<D><h3>::<h3>"
)
MAC = "a<[26ae]>:<h2>:<h2>:<h2>:<h2>:0<[abcde]>|4<[048C]>-<U2>-<U2>-<U2>-<U2>-0<[AB]>|8<[048c]><h2>.<h4>.<h2>0<[ab]>"
API_KEY = (
    "AKIA<[ABCDEFGHIJKLMNOPQRSTUVWXYZ234567]16>|ghp_<a36>|sk_live_<a24>|sk-proj-<w48>x|AIza<w34>x|hf_<l34>|glpat-<a20>"
    "|xoxb-<D><d11>-<D><d11>-<a24>|SG.<a22>.<a43>|npm_<a36>|sk-ant-api03-<w93>AA|github_pat_<a22>_<a59>"
)
PHONE_REGIONS = ("US", "GB", "DE", "FR", "ES", "IT", "NL", "BR", "IN")


def phone(random: Random, region: str) -> phonenumbers.PhoneNumber:
    """Return the example of the region with its last digits at random, as long as the numbering plan takes it."""
    kind = random.choice([PhoneNumberType.MOBILE, PhoneNumberType.FIXED_LINE])
    example = phonenumbers.example_number_for_type(region, kind) or phonenumbers.example_number(region)
    assert example is not None
    national = phonenumbers.national_significant_number(example)
    for changed in (6, 5, 4, 3):
        found = phonenumbers.parse(drawn(f"+{example.country_code}{national[:-changed]}<d{changed}>")(random))
        if phonenumbers.is_valid_number(found):
            return found
    return example


def phone_international(random: Random) -> str:
    number = phone(random, random.choice([*PHONE_REGIONS, *random.sample(sorted(phonenumbers.SUPPORTED_REGIONS), 3)]))
    written = phonenumbers.format_number(number, PhoneNumberFormat.INTERNATIONAL)
    forms = [written, written.replace(" ", "-"), written.replace(" ", "."), written.replace("+", "00", 1)]
    others = (PhoneNumberFormat.E164, PhoneNumberFormat.RFC3966)
    return random.choice([*forms, *(phonenumbers.format_number(number, form) for form in others)])


def phone_national(random: Random) -> str:
    number = phone(random, random.choice(PHONE_REGIONS))
    written = phonenumbers.format_number(number, PhoneNumberFormat.NATIONAL)
    return random.choice([written, written, written.replace("-", " "), "".join(filter(str.isdigit, written))])


def email(random: Random) -> str:
    user = random.choice(["anna.berg", "jürgen_wu42", "li+news", "MARIA", "tsilva", "tom.o'neil"])
    domain = random.choice(["gmail.com", "web.de", "firma-nord.de", "mail.co.uk", "corp.internal-mail.io", "uol.com.br",
                            "laposte.net", "iitb.ac.in", "münchner-verein.de", "startup.ai"])  # fmt: skip
    return f"{user}@{domain}"


def fr_tax_id(random: Random) -> str:
    """Only one number in 511 is valid: too few to draw until one is."""
    body = drawn("<[0123]><d9>")(random)
    number = body + nif.calc_check_digits(body)
    return random.choice([number, f"{number[:2]} {number[2:4]} {number[4:7]} {number[7:10]} {number[10:]}"])


def jwt(random: Random) -> str:
    header = json.dumps({"alg": random.choice(["HS256", "RS256"]), "typ": "JWT"}).encode()
    claims = json.dumps({"sub": "12", "name": drawn("<a9>")(random)}).encode()
    parts = (header, claims, random.randbytes(32))
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def private_key(random: Random) -> str:
    kind, gap = random.choice(["RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", ""]), random.choice(["\n", "\\n"])
    lines = [f"-----BEGIN {kind}PRIVATE KEY-----", *["<b64>"] * 5, f"-----END {kind}PRIVATE KEY-----"]
    return drawn(gap.join(lines))(random)


# --- texts -----------------------------------------------------------------------------------------------------------

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
    value: Value
    names: dict[str, str]  # language → what people call it, one or a|b|c
    unnamed: bool = True  # it can be told without a name
    assigned: bool = False  # only what is right after its name is one


KINDS = [
    Kind("EMAIL_ADDRESS", email, {"en": "email|contact", "de": "E-Mail-Adresse", "pt": "e-mail"}),
    Kind("PHONE_NUMBER", phone_international, {"en": "phone number|fax", "fr": "téléphone"}),
    Kind("PHONE_NUMBER", phone_national, {
        "en": "mobile|cell|phone no.|WhatsApp|Tel.", "de": "Telefonnummer|Handynummer|Rufnummer",
        "fr": "numéro de téléphone|portable", "es": "teléfono|móvil|celular", "it": "numero di cellulare|telefono",
        "nl": "telefoonnummer|mobiele nummer", "pt": "telefone|celular",
    }, unnamed=False),
    Kind("CREDIT_CARD", drawn(CARD, luhn.is_valid), {
        "en": "credit card|Visa|card number", "de": "Kreditkarte", "fr": "carte bancaire", "es": "tarjeta"}),
    Kind("IBAN", drawn(IBAN, iban.is_valid), {"en": "IBAN", "de": "Kontoverbindung", "nl": "rekening"}),
    Kind("BANK_ACCOUNT", drawn("<D><d7>|<D><d9>|<D><d11>"), {
        "en": "account number|bank account no.|acct #|routing number", "de": "Kontonummer|Konto-Nr.",
        "fr": "numéro de compte|compte bancaire", "es": "número de cuenta|cuenta bancaria",
        "it": "numero di conto|conto corrente", "nl": "rekeningnummer|bankrekening",
        "pt": "conta corrente|conta bancária",
    }, unnamed=False),
    Kind("US_SSN", drawn("<d3>-<d2>-<d4>|<d3>-<d2>-<d4>|<d3> <d2> <d4>|<d9>", ssn.is_valid), {
        "en": "SSN|social security number|Social Security No.|soc sec number|Social Security #"}, unnamed=False),
    Kind("US_ITIN", drawn("9<d2>-<d2>-<d4>", itin.is_valid), {"en": "ITIN|taxpayer id"}),
    Kind("UK_NINO", drawn("<[ABCEHJLM]><[ACEHJLMPRSWXYZ]><d6><[ABCD]>|<[PRSTWXY]>S <d2> <d2> <d2> <[ABCD]>"),
         {"en": "National Insurance number|NINO|NI number"}),
    Kind("UK_NHS_NUMBER", drawn("<D><d9>|<D><d2> <d3> <d4>", nhs.is_valid),
         {"en": "NHS number|NHS no.|patient number (NHS)"}, unnamed=False),
    Kind("UK_UTR", drawn("<D><d9>|<D><d4> <d5>", utr.is_valid),
         {"en": "UTR|Unique Taxpayer Reference|self-assessment UTR"}, unnamed=False),
    Kind("DE_TAX_ID", drawn("<D><d10>|<D><d> <d3> <d3> <d3>", idnr.is_valid), {
        "en": "German tax ID|TIN", "de": "Steuer-ID|Steueridentifikationsnummer|Steuer-IdNr.|IdNr."}, unnamed=False),
    # As Hesse and others write it, and Bavaria and others; no checksum is the same everywhere.
    Kind("DE_TAX_NUMBER", drawn("<D><d>/<D><d2>/<D><d4>|<D><d2>/<D><d2>/<D><d4>"),
         {"de": "Steuernummer|Steuer-Nr.|St.-Nr."}, unnamed=False),
    Kind("FR_SOCIAL_SECURITY", drawn(FRENCH, nir.is_valid),
         {"fr": "numéro de sécurité sociale|NIR", "en": "INSEE number"}),
    Kind("FR_TAX_ID", fr_tax_id, {
        "fr": "numéro fiscal|identifiant fiscal|n° fiscal", "en": "tax number|French tax id"}, unnamed=False),
    Kind("ES_NATIONAL_ID",
         either(drawn(SPANISH, dni.is_valid), drawn("<[XYZ]><d7><A>|<[XYZ]>-<d7>-<A>", nie.is_valid)),
         {"es": "DNI|NIF|documento de identidad", "en": "NIE"}),
    Kind("IT_FISCAL_CODE", either(drawn(ITALIAN, codicefiscale.is_valid),
                                  lambda random: drawn(ITALIAN, codicefiscale.is_valid)(random).lower()),
         {"it": "codice fiscale", "en": "Italian tax code"}),
    Kind("NL_BSN", drawn("<D><d8>|<D><d3>.<d2>.<d3>", bsn.is_valid), {
        "nl": "BSN|burgerservicenummer|sofinummer|BSN-nummer", "en": "Dutch BSN"}, unnamed=False),
    Kind("BR_CPF", drawn(CPF, cpf.is_valid), {"pt": "CPF|número do CPF", "en": "CPF"}),
    Kind("BR_CPF", drawn("<D><d10>", cpf.is_valid), {"pt": "CPF|número do CPF", "en": "CPF"}, unnamed=False),
    # Without the check digit of a card: if it is called one, it is taken for one.
    Kind("IN_AADHAAR", drawn(AADHAAR, lambda value: aadhaar.is_valid(value) and not luhn.is_valid(value)),
         {"en": "Aadhaar number|Aadhar card|UIDAI no.|आधार संख्या"}, unnamed=False),
    Kind("IN_PAN", drawn("<A3>P<A><d3><D><A>"), {"en": "PAN|PAN card"}),
    Kind("PASSPORT", drawn(PASSPORT), {
        "en": "passport number|Passport No.|US passport", "de": "Reisepassnummer|Reisepass-Nr.|Passnummer",
        "fr": "passeport|numéro de passeport", "es": "pasaporte|número de pasaporte", "it": "passaporto",
        "nl": "paspoortnummer", "pt": "passaporte",
    }, unnamed=False),
    Kind("IP_ADDRESS", drawn(IP), {"en": "IP|client address", "de": "IP-Adresse"}),
    Kind("MAC_ADDRESS", drawn(MAC), {"en": "MAC address|hwaddr"}),
    Kind("API_KEY", drawn(API_KEY), {"en": "API key|credential"}),
    Kind("TOKEN", jwt, {"en": "session|access token"}),
    Kind("TOKEN", drawn("Bearer <a31><d>"), {"en": "authorization|header"}),
    Kind("PRIVATE_KEY", private_key, {"en": "private key|ssh key"}),
    Kind("URL_PASSWORD", drawn(
        "postgres://admin:<a9><d>@db<d>.firma-nord.de:5432/main|https://svc_app:<a9><d>@db<d>.firma-nord.de:443/main"
        "|redis://:<a9><d>@db<d>.firma-nord.de:6379/main|mongodb+srv://root:<a9><d>@db<d>.firma-nord.de:27017/main"
    ), {"en": "database|connection string"}),
    Kind("PASSWORD", drawn("Sommer<[!#?_.-]><D><d3>k|hunter<[!#?_.-]><D><d3>X|Tr0ub4dor.<D><d3>z|qW-<D><d3>k"), {
        "en": "password|Password|passphrase|WiFi password", "de": "Passwort|Kennwort", "fr": "mot de passe",
        "es": "contraseña", "pt": "senha", "nl": "wachtwoord"}, unnamed=False, assigned=True),
]  # fmt: skip
NUMBERS_IN_OTHER_SCRIPTS = {
    "CREDIT_CARD", "IBAN", "US_SSN", "BR_CPF", "IN_AADHAAR", "PHONE_NUMBER", "FR_SOCIAL_SECURITY", "UK_NHS_NUMBER",
}  # fmt: skip
OTHER_SCRIPTS = (  # narrow blanks, other dashes, full-width and Arabic digits
    {ord(" "): "\u202f"}, {ord("-"): "\u2011"}, {ord(digit): ord(digit) + 0xFEE0 for digit in DIGITS},
    {ord(digit): 0x660 + int(digit) for digit in DIGITS},
)  # fmt: skip


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
    other_script = value
    if kind.entity in NUMBERS_IN_OTHER_SCRIPTS and random.random() < 0.15:
        other_script = value.translate(random.choice(OTHER_SCRIPTS))
    if kind.unnamed and random.random() < 0.5:
        return _filled(random.choice(UNNAMED), other_script, kind.entity, "unnamed")
    if random.random() < 0.4:
        template = random.choice(STRUCTURED[4 * kind.assigned :])
        key = re.sub(r"[\s().#°/-]+", "_", name.lower()).strip("_")
        return _filled(template, value, kind.entity, "structured", name=name, key=key)
    templates = [template for template in NAMED[language] if "{name}" in template.partition("{value}")[0]]
    template = random.choice(templates if kind.assigned else NAMED[language])
    return _filled(template, other_script, kind.entity, language, name=name)


def _filled(template: str, value: str, entity: str | None, kind: str, **names: str) -> Case:
    before, _, after = template.partition("{value}")
    before = before.format(**names)
    return Case(before + value + after.format(**names), entity, len(before), len(before) + len(value), kind)


# --- near misses: they look like personal data and are none -----------------------------------------------------------

AROUND = [
    "What does {value} mean here?", "{value}", "I get {value} in the log, is that normal?",
    "result = f({value})\nassert result", "- first\n- {value}\n- third", "Rewrite this line: {value}",
    "| a | {value} | c |", "Warum steht da {value}?",
]  # fmt: skip
NEAR_MISSES: dict[str, Value] = {
    "card, wrong digit": drawn(CARD, luhn.is_valid, wrong=True),
    "IBAN, wrong check digits": drawn(IBAN, iban.is_valid, wrong=True),
    "CPF, wrong digit": drawn(CPF, cpf.is_valid, wrong=True),
    "NIR, wrong key": drawn(FRENCH, nir.is_valid, wrong=True),
    "codice fiscale, wrong letter": drawn(ITALIAN, codicefiscale.is_valid, wrong=True),
    "DNI, wrong letter": drawn(SPANISH, dni.is_valid, wrong=True),
    "Aadhaar, wrong digit": drawn(AADHAAR, aadhaar.is_valid, wrong=True),
    "SSN, no such area": drawn("000-<D><D>-<D><d3>|666-<D><D>-<D><d3>"),
    "NINO, no such prefix": drawn("BG<d6>A|GB<d6>A|ZZ<d6>A|DA<d6>A|AO<d6>A"),
    "UUID": drawn("<h8>-<h4>-4<h3>-<[89ab]><h3>-<h12>"),
    "hash": drawn("<h32>|<h40>|<h64>|<h128>|commit <h12>"),
    "version": drawn(
        "version <n>.<n>.<n>.<n>|v<n>.<n>.<n>.<n>|numpy==<n>.<n>.<n>.<n>|release <n>.<n>.<n>.<n>|<n>.<n>.<n>.<n>-rc1"
        "|firmware <n>.<n>.<n>.<n>|tool-<n>.<n>.<n>.<n>.tar.gz"
    ),
    "ISBN": drawn("ISBN 978<d10>|ISBN 978-<d>-<d4>-<d4>-<d>", lambda value: isbn.is_valid(value[4:])),
    "date": drawn(
        "<Y>-<m>-<t> <H>:<M>:00|<t>.<m>.<Y>|0<D>.<m>.<Y>|<m>/<t>/<Y>|<D>/<t>/<Y>|<Y><m><t>T<H><M>00Z"
        "|<t>-<m>-<Y> <H>:<M>|<Y>-<m>-<t>|<Y>-0<D>-0<D>"
    ),
    "code": drawn(
        "0x00000000<h8>|0.<d16>|-<d3>.<d12>|1 << <n>|<D><d9>.0|[<n>, <n>, <n>]|x[<d>::<d>]|std::deque<face::id>"
        "|np.array([[0.<d4>, 0.<d4>], [0.<d4>, 0.5]])|weights@x.transpose|a @ b.T|<D><d2>_<d3>_000|922337203<d10>"
        "|12:30:45|@pytest.mark.parametrize|self.password = getpass(prompt)|password=os.environ['DB_PASSWORD']"
        "|def login(user: str, password: str = None):|seed=<D><d9>|1<d12>"
    ),
    "order number": drawn(
        "order number <D><d5>|order number <D><d11>|invoice no. <D><d7>|tracking number <D><d9>|ticket #<D><d8>"
        "|Bestellnummer <D><d9>|SKU <D><d7>|case <D><d8>|case <D><d9>"
    ),
    "no host": drawn(
        "127.0.0.1|127.0.1.<i>|192.0.2.<i>|198.51.100.<i>|203.0.113.<i>|0.0.0.0|::1|2001:db8::<h2>|255.255.255.0"
        "|2001:db8:85a3::8a2e:370:<h2>|10.0.0.0/8|224.0.0.251|ff:ff:ff:ff:ff:ff|00:00:00:00:00:00|192.168.0.0/16"
    ),
    "no person": drawn(
        "git@github.com:org/repo<n>.git|alice@example.com|john.doe@mail.example.org|noreply@github.com"
        "|no-reply@accounts.google.com|<d7>+test@users.noreply.github.com|test@localhost|git@gitlab.com:a/b.git"
        "|icon@2x.png|react@18.2.0|test@example.net|@types/node@20.1.0"
    ),
    "placeholder": drawn(
        "password: ********|password=<your password>|api_key = 'YOUR_API_KEY_GOES_HERE_123'|sk-<[x]48>"
        "|AKIAIOSFODNN7EXAMPLE|Authorization: Bearer YOUR_ACCESS_TOKEN_1|postgres://user:password@localhost/db|PASSWORD=${DB_PASSWORD}"
        '|https://user:pass@host/|password = "password"|ghp_<[0]36>|Bearer <token>'
    ),
    "public key": drawn(
        "-----BEGIN PUBLIC KEY-----\n<b128>\n-----END PUBLIC KEY-----|ssh-ed25519 <b68>|sha256-<b43>="
        "|-----BEGIN CERTIFICATE-----\n<b128>\n-----END CERTIFICATE-----"
        '|<h2>:<h2>:<h2>:<h2>:<h2>:<h2>:<h2>:<h2>:<h2>:<h2>|if "-----BEGIN RSA PRIVATE KEY-----" in text:'
    ),
}


if __name__ == "__main__":
    everything = list(cases(0, per_kind=20, per_near_miss=20))
    for case in Random(0).sample(everything, 10):
        print(case.entity or case.kind, repr(case.text))
