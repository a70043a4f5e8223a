"""Quality of the recognisers: what is found whole, false positives on code, linear time on crafted text."""

import json
import sysconfig
import time
from pathlib import Path

import pytest
from stores import ASSETS

from eagle3.prompts.privacy.policy import readable
from tests.prompts.privacy.test_policy import build_privacy

PROMPTS = ASSETS / "prompts"


@pytest.fixture(scope="module")
def privacy():
    return build_privacy()


@pytest.fixture(scope="module")
def recognisers():
    """What is found before anything is let through: generated addresses may be of private networks."""
    return build_privacy("privacy.allowed.placeholders=false")


# A mask replaces exactly the finding: less of it would leave digits of the identifier.
WHOLE = [
    ("Could you send the contract to ", "tom.o'neil@firma-nord.de", " before Friday?", "EMAIL_ADDRESS"),
    ("I typed ", "jürgen_wu42@startup.ai", " and the form refuses it", "EMAIL_ADDRESS"),
    ("- first\n- ", "+1 201-559-2200", "\n- third", "PHONE_NUMBER"),
    ('{"fax": "', "+390212983456", '", "active": true}', "PHONE_NUMBER"),
    ("Mi tarjeta es ", "6585598328252484", " y necesito ayuda", "CREDIT_CARD"),
    ("Kreditkarte: ", "6011 3444 9109 8949", ", stimmt das so?", "CREDIT_CARD"),
    ("Kontoverbindung: ", "PL61913832993321290210578680", ", stimmt das so?", "IBAN"),
    ("rekening: ", "AT77 9528 6768 6535 9093", "", "IBAN"),
    ("check if my account number ", "96232004", " is still ok? thx", "BANK_ACCOUNT"),
    ('{"número_de_cuenta": "', "14608295", '"}', "BANK_ACCOUNT"),
    ('record = {"ssn": "', "140-94-2831", '"}', "US_SSN"),
    ("my Social Security # ", "315 44 0069", " is refused", "US_SSN"),
    ("¿Es correcto ", "929-86-6790", "?", "US_ITIN"),
    ("| a | ", "PS 46 96 40 A", " | c |", "UK_NINO"),
    ("national_insurance_number=", "BJ367118B", "", "UK_NINO"),
    ("NHS number: ", "216 464 3690", "\nPlan: basic", "UK_NHS_NUMBER"),
    ("<self_assessment_utr>", "95055 36170", "</self_assessment_utr>", "UK_UTR"),
    ("Meine Steuer-ID lautet ", "32 498 851 062", ".", "DE_TAX_ID"),
    ("St.-Nr.: ", "56/438/66137", ", stimmt das so?", "DE_TAX_NUMBER"),
    ("Mon NIR est ", "270066888382903", ", pouvez-vous vérifier ?", "FR_SOCIAL_SECURITY"),
    ("| a | ", "2 04 07 2A 323 518 56", " | c |", "FR_SOCIAL_SECURITY"),
    ("my French tax id ", "27 65 658 188 482", " is refused", "FR_TAX_ID"),
    ("Anna wrote: ", "Z9131122N", "\nWhat should I answer?", "ES_NATIONAL_ID"),
    ("Mi DNI es ", "77933625B", " y necesito ayuda", "ES_NATIONAL_ID"),
    ('x = "', "DLLRDC43B01D205D", '"', "IT_FISCAL_CODE"),
    ("codice fiscale: ", "vcfznz73l45c643i", "", "IT_FISCAL_CODE"),
    ("Dutch BSN: ", "3982.89.098", "\nPlan: basic", "NL_BSN"),
    ("it's ", "372.008.488-40", ", same as last time", "BR_CPF"),
    ("My CPF is ", "\uff13\uff10\uff16.\uff14\uff16\uff10.\uff14\uff19\uff14-\uff15\uff13", ".", "BR_CPF"),
    ("my UIDAI no. is ", "8669 7187 1781", ", why?", "IN_AADHAAR"),
    ("id\tpan\tnote\n17\t", "NRXPQ8251X", "\tpaid", "IN_PAN"),
    ("numer PESEL: ", "44051401359", "", "NATIONAL_ID"),
    ("Reisepass-Nr.: ", "KE9RRGBK0", ", stimmt das so?", "PASSPORT"),
    ("IP-Adresse: ", "31.41.158.108", ", stimmt das so?", "IP_ADDRESS"),
    ("ip=", "2600:e1ad::362", ";", "IP_ADDRESS"),
    ("(see ", "44-6C-B6-4B-93-0B", ")", "MAC_ADDRESS"),
    ('"hwaddr": "', "80b1.153f.dc0a", '"', "MAC_ADDRESS"),
    ("- first\n- ", "glpat-V1coaEGWg1fb2aLZL1Kt", "\n- third", "API_KEY"),
    ("I typed ", "eyJhbGciOiAiUlMyNTYifQ.eyJzdWIiOiAiMTIifQ.KFaxrKjtieyfFKX2drw5maKGH", " here", "TOKEN"),
    ("key: ", "-----BEGIN EC PRIVATE KEY-----\n6B9fIfge8oX29b1SP29+KeUBFBC43vAH8j\n-----END EC PRIVATE KEY-----", "\n",
     "PRIVATE_KEY"),
    ('"url": "', "redis://:3cXHxAzfQ3@db3.firma-nord.de", ':6379/main"', "URL_PASSWORD"),
    ("Mon mot de passe est ", "Sommer#7731k", ", pouvez-vous vérifier ?", "PASSWORD"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "value", "after", "entity"), WHOLE)
def test_a_finding_holds_the_whole_identifier_and_nothing_else(recognisers, before, value, after, entity):
    text = before + value + after
    assert [(item.entity, text[item.start : item.end]) for item in recognisers.find(text)] == [(entity, value)]


def test_the_table_of_whole_identifiers_has_every_entity(recognisers):
    assert {entity for *_, entity in WHOLE} == set(recognisers.actions)


# False positives


def benchmark_prompts(name: str) -> list[str]:
    rows = [json.loads(line) for line in (ASSETS / "prompts" / f"{name}.jsonl").read_text().splitlines()]
    return ["\n\n".join(row["turns"]) for row in rows]


def python_prompts(*, every: int, lines: int = 40) -> list[str]:
    """The standard library's sources, cut into prompts, of which one in `every` is taken."""
    root = Path(sysconfig.get_path("stdlib"))
    prompts = []
    for folder in (
        "asyncio",
        "collections",
        "concurrent",
        "email",
        "http",
        "json",
        "logging",
        "unittest",
        "urllib",
        "",
    ):
        for path in sorted((root / folder).glob("*.py")):
            source = path.read_text(errors="replace").splitlines()
            prompts += ["What does this do?\n" + "\n".join(source[i : i + lines]) for i in range(0, len(source), lines)]
    return prompts[::every]


def test_at_most_half_a_percent_of_code_and_school_questions_is_refused(privacy):
    for name in ("humaneval", "gsm8k"):
        assert sum(bool(privacy.find(text)) for text in benchmark_prompts(name)) == 0


def test_at_most_half_a_percent_of_python_source_is_refused_beside_its_authors_addresses(privacy):
    texts = python_prompts(every=3)
    found = [{item.entity for item in privacy.find(text)} for text in texts]
    assert len(texts) > 1000
    assert sum(bool(entities - {"EMAIL_ADDRESS"}) for entities in found) <= 0.005 * len(texts)
    # The addresses are those of real authors: mail domains that exist.
    assert sum("EMAIL_ADDRESS" in entities for entities in found) <= 0.03 * len(texts)


@pytest.mark.parametrize(
    "text",
    [
        "git clone git@github.com:org/repo.git", "127.0.0.1 ::1 192.0.2.7 198.51.100.7 203.0.113.7 2001:db8::7",
        "a@example.com",
        "550e8400-e29b-41d4-a716-446655440000", "d41d8cd98f00b204e9800998ecf8427e", "pip install x==1.26.4.0",
        "noreply@web.de",
        "commit 356a192b7913b04c54574d18c28d46e6395428ab", "In 2008 Wall Street fell.", "x = data[10::2]",
        "3.141592653589793",
        "1700000000000", "2024-01-15T10:30:00Z", "std::vector<abc::def> v;", "Spring 2020", "x4111111111111111",
        "0.4111111111111111",
        "5a4111111111111111b", "a1b2-4111111111111111", "12345678Z9", "id_529982247-25", "weights@x.transpose", "",
        "On March 12, 2024 AI models changed", "As of January 5, 2024 US rules apply", "May 25 2018 EU law",
        "Behind Door 1, Door 2 and Door 3 is a goat", "Auf Platz 1 steht Bayern", "Platz 1: Bayern",
        "Der Speicherplatz 500 GB reicht", "Arbeitsplatz 3 ist frei", "Auf der Straße 20 km weiter",
        "Connected Via Bluetooth 5", "Load Via USB 3", "Install on Windows 10 Google Drive, then sync",
        "--- PASS: TestParseConfig2 (0.00s)", "PASS: test_login_2", "PASS: tests/unit-01.sh", "PWD=/home/ubuntu1/app",
        "pwd: ~/src/app2", "bypass=cache1", "compass is N45E20", "mysql -u root -p shop2", "docker run -u a1:a1",
        "See the basic torch.nn.functional.conv2d example", "the basic transformer-block-v2 layer",
        "Authorization: Basic dXNlcjpwYXNzd29yZDE=", "long n = 30000000L;", "sleep(30000000L)",
        "passport abcd12345", "int64 x = 12345678909",
        'AssemblyVersion("1.2.3.4")', "<Version>1.2.3.4</Version>", "nginx/1.18.0.1", "numpy >= 1.2.3.4",
        'if version == "1.2.3.4":', "left-pad@1.2.3.4", "cache-key-0cc175b9c0f1b6a831c399e269772661",
        "6229 0335 8038 1933", "GB01 CMVH 0893 7177 0894 13", "947.323.431-90", "296069040849226", "DVTRBS82H45A200Q",
        "97757578-N", "7451 3099 0510", "000-38-7473", "666-72-6086", "ZZ347967A", "ISBN 978-6-8538-7894-2",
        "v8.2.10.7", "seed=8333409711", "order number 112995", "Bestellnummer 8491731030", "224.0.0.251",
        "ff:ff:ff:ff:ff:ff", "97:07:40:cb:bd:0b:d0:0a:cf:91", "password=<your password>", f"sk-{'x' * 48}",
        "PASSWORD=${DB_PASSWORD}", "self.password = getpass(prompt)", 'if "-----BEGIN RSA PRIVATE KEY-----" in text:',
        f"-----BEGIN PUBLIC KEY-----\n{'5N1ClKgjZfa8/Pll' * 8}\n-----END PUBLIC KEY-----",
    ],
)  # fmt: skip
def test_what_is_not_personal_passes(privacy, text):
    assert privacy.find(text) == []


@pytest.mark.parametrize(
    ("text", "entity"),
    [
        ("(415) 555-2671", "PHONE_NUMBER"), ("call 4155552671", "PHONE_NUMBER"), ("01 42 68 53 00", "PHONE_NUMBER"),
        ("+44 (0)20 7946 0958", "PHONE_NUMBER"), ("拨打13812345678 call +8613812345678", "PHONE_NUMBER"),
        ("2024 4111 1111 1111 1111 12/27", "CREDIT_CARD"), ("卡号是4111111111111111谢谢", "CREDIT_CARD"),
        ("DE89 3704 0044 0532 0130 00 BIC COBADEFF", "IBAN"), ("name,ssn\nAnna,123456788\nTom,123456789", "US_SSN"),
        ("http://192.168.178.20/admin", "IP_ADDRESS"), ("用户@例子.公司", "EMAIL_ADDRESS"),
        ("<tom@web.de>", "EMAIL_ADDRESS"),
        ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", "API_KEY"), ("key-0cc175b9c0f1b6a831c399e269772661", "API_KEY"),
        ('DB_PASSWORD   = "Sup3rS3cret!"', "PASSWORD"), ("password:  hunter2x!", "PASSWORD"),
        ("password\t=\tS3cret!1x", "PASSWORD"), ("PASS: hunter#2x", "PASSWORD"), ("DB_PASS: hunter2x", "PASSWORD"),
        ("mypass=hunter2x", "PASSWORD"), ("CREATE USER bob IDENTIFIED BY 'S3cret1x'", "PASSWORD"),
        ("identified with mysql_native_password by 'S3cret1x'", "PASSWORD"),
        ("curl -s -u john:S3cret1x https://a.b", "PASSWORD"), ("mysql -u root -pS3cret1x", "PASSWORD"),
        ("Authorization: token abcdefghij1234567890ABCD", "TOKEN"),
        ("Authorization: Basic am9objpTM2NyZXQxeA==", "TOKEN"), ("basic am9objpTM2NyZXQxeA", "TOKEN"),
        ("https://x.com?email=john.doe@gmail.com", "EMAIL_ADDRESS"),
        ("GET /u?email=john.doe%40gmail.com HTTP/1.1", "EMAIL_ADDRESS"),
        ("ssh root@51.15.22.33", "IP_ADDRESS"), ("ssh -i key.pem anna@51.15.22.33", "IP_ADDRESS"),
        ("scp a.txt deploy@51.15.22.33:/srv", "IP_ADDRESS"), ('if ip == "51.15.22.33":', "IP_ADDRESS"),
        ("https://ipinfo.io/51.15.22.33", "IP_ADDRESS"), ("/dev/tcp/51.15.22.33/4444", "IP_ADDRESS"),
        ("call me on 467 3395", "PHONE_NUMBER"), ("Phone: 72 128 827", "PHONE_NUMBER"),
        ("write to +31(0)45 6029061 or phone", "PHONE_NUMBER"), ("call +90(891)3193442", "PHONE_NUMBER"),
        ("you can call 61 09 35 23", "PHONE_NUMBER"), ("my iban is GB22KZXX6007154273852", "IBAN"),
        ("reach us at 271-542-8512x400", "PHONE_NUMBER"),
        ("my card 180016070420458 is lost", "CREDIT_CARD"),
        ("address 6e40:4041:c617:e898:c11:40d2:c669:2eb4 blocked", "IP_ADDRESS"),
        ("curl -H 'Authorization: 5eb4223e-5008-46e5-be67-c7b8f2732305'", "TOKEN"),
        (
            "PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nComment: a\nPublic-Lines: 2\n"
            "AAAAC3NzaC1lZDI1NTE5AAAAIFkq0yLz5n7V3Tn0s9bX1mQe\nPrivate-Lines: 1\nAAAAIGsq\nPrivate-MAC: 0f",
            "PRIVATE_KEY",
        ),
        ("DNI 30000000L", "ES_NATIONAL_ID"),
        ("passport ab123456", "PASSPORT"),
        ("it's 30000000L", "ES_NATIONAL_ID"), ("529.982.247-25", "BR_CPF"), ("CPF 52998224725", "BR_CPF"),
    ],
)  # fmt: skip
def test_what_is_personal_is_found(recognisers, text, entity):
    assert entity in [item.entity for item in recognisers.find(text)]


# Crafted text

TRIGGERS = [
    "@", "a@", "a.b@c.d", "1", "12 ", "1 ", "0 ", "+1", "((1", "(123) ", "123-45-6789 ", "4111 ",
    "01 02 03 04 05 06 ", "A", "AB12 ",
    "DE89 3704 ", "a", "0xa", ":", "::", "a:", "1:", "1.2.3.", "aa:bb:", "12.34567, ",
    "1.1234 ", "A ",
    "12 Aa ", "1 Main Street ", "Calle A ", "straße ", "Am A 1", "1 rue de la ", " passport A1 ", "eyJ",
    "eyJaaaaaaaa.", "bearer a",
    "-----BEGIN PRIVATE KEY-----", "-----BEGIN PRIVATE KEY-----" + "A" * 40,
    "-----BEGIN PRIVATE KEY-----" + "A: " * 30, "://a:",
    "http://a:b@", "password", "password is ", "password of a ", "secret_key='", "sk-a", "xoxb-", "account number 1 ",
    "password \t ", "identified by '", "curl -u ", "curl -u a:", "mysql -p", "authorization: token ", "%40", "a%40b.",
    "ssh ", "Via USB ",
    "12345678901 ",
    "my password for ", "pin ", 'with password "', "user: a ", "密码是",
    "X1234567", "RSSMRA85T10A562", "ABCPE1234", "٣", "é", "東", "-", "\n", "\n\n", " ",
]  # fmt: skip


def seconds(recogniser, text: str) -> float:
    start = time.process_time()
    for _ in recogniser.find(text):
        pass
    return time.process_time() - start


@pytest.mark.slow
def test_no_text_can_drive_a_recogniser_beyond_linear_time(privacy):
    """Ten times the text takes ten times as long, not a hundred."""

    def least(trials: int, recogniser, text: str) -> float:
        return min(seconds(recogniser, text) for _ in range(trials))

    slow = []
    for trigger in TRIGGERS:
        small, large = (readable((trigger * (size // len(trigger) + 1))[:size]) for size in (5_000, 50_000))
        for recogniser in privacy.recognisers:
            # What grows with the square and takes 0.1 s at twice the size takes a quarter of it here. So short a time
            # may be the machine's: it is taken again before it counts.
            took = seconds(recogniser, large)
            if took > 0.025 and took > 20 * least(2, recogniser, small):
                took = least(2, recogniser, large)
                if took > 20 * least(3, recogniser, small):
                    slow.append((recogniser.entity, trigger, took))
    assert slow == []
