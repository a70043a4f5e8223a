"""Measured quality of the recognisers: recall and precision on the labelled set, false positives on code and questions,
linear time on crafted text.
"""

import json
import sysconfig
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from personal_data import Case, cases
from stores import ASSETS

from eagle3.prompts.privacy.policy import readable
from tests.prompts.privacy.test_policy import build_privacy

PROMPTS = ASSETS / "prompts"
# Of these the finding is more or less than what was put in: a token without "Bearer", a URL's account.
OTHER_EDGES = {"TOKEN", "URL_PASSWORD"}


@pytest.fixture(scope="module")
def privacy():
    return build_privacy()


@pytest.fixture(scope="module")
def recognisers():
    """What is found before anything is let through: generated addresses may be of private networks."""
    return build_privacy("privacy.allowed.placeholders=false")


@pytest.fixture(scope="module")
def labelled(privacy, recognisers) -> list[tuple[Case, list]]:
    found = cases(0, per_kind=115, per_near_miss=75)
    return [(case, (recognisers if case.entity else privacy).find(case.text)) for case in found]


def hits(case: Case, found: list) -> list:
    return [item for item in found if item.entity == case.entity and item.start < case.end and item.end > case.start]


def test_the_labelled_set_is_large_and_has_every_entity(labelled, privacy):
    assert len(labelled) >= 5000
    entities = {recogniser.entity for recogniser in privacy.recognisers} - {"NATIONAL_ID"}  # test_ids.py
    assert {case.entity for case, _ in labelled} - {None} == entities


def test_recall_of_valid_identifiers_is_at_least_99_percent_for_each_entity(labelled):
    results = defaultdict(list)
    for case, found in labelled:
        if case.entity:
            results[case.entity].append(bool(hits(case, found)))
    recall = {entity: sum(found) / len(found) for entity, found in results.items()}
    low = {entity: value for entity, value in recall.items() if value < 0.99}
    assert not low


def test_a_finding_holds_the_whole_identifier(labelled):
    """Else a mask would leave some of its digits."""
    cut = Counter(
        case.entity
        for case, found in labelled
        for item in hits(case, found)
        if case.entity not in OTHER_EDGES and not (item.start <= case.start + 4 and item.end >= case.end)
    )
    assert sum(cut.values()) <= 0.001 * len(labelled), cut


def test_precision_is_at_least_97_percent_for_each_entity(labelled):
    right, wrong = Counter(), Counter()
    for case, found in labelled:
        right.update(item.entity for item in hits(case, found))
        wrong.update(item.entity for item in found if item not in hits(case, found))
    precision = {entity: right[entity] / (right[entity] + wrong[entity]) for entity in right}
    assert {entity: value for entity, value in precision.items() if value < 0.97} == {}
    assert not set(wrong) - set(right), wrong


def test_near_misses_are_let_through(labelled):
    refused = Counter(case.kind for case, found in labelled if case.entity is None and found)
    near_misses = sum(case.entity is None for case, _ in labelled)
    assert sum(refused.values()) <= 0.01 * near_misses, refused


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
