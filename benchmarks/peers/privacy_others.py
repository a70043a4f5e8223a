"""What is found in texts that nobody of this project wrote, and refused of harmless ones, with intervals.

    python benchmarks/peers/privacy_others.py --gitleaks DIR --kingfisher DIR --detect-secrets DIR --trufflehog DIR \\
        --presidio FILE --faker ar_EG de_DE … --out benchmarks/results/privacy_others.json

The texts are not in the repository. DIR: a checkout of github.com/gitleaks/gitleaks (MIT), mongodb/kingfisher
(Apache-2.0), Yelp/detect-secrets (Apache-2.0), trufflesecurity/trufflehog (AGPL-3.0, only measured with): the examples
next to their rules, right and wrong ones; of trufflehog what its detectors' tests find. FILE:
data/synth_dataset_v2.json of microsoft/presidio-research (MIT). Faker (MIT) fills its sentences with the values of each
locale. --prose: a file of sentences about passwords, a JSON object a line: `text`, and `start` and `end` of the
password where there is one. Ours holds what sixty exact phrases ("my password is ", "Passwort lautet", "密码是 ") find
in public sources on GitHub, ten hits each: those that tell a value, and those that do not. They were read once, to mark
the values. Harmless are the descriptions of the installed Python packages, in pieces; their authors' own addresses are
counted apart. --seen names the sources that were looked at while rules were written: their figures flatter. Of every
source one half, by the hash of its text, was looked at too; `untouched` counts the other half alone. Both halves of
Faker's values stand in the same sentences.
"""

import argparse
import ast
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

import yaml
from result import write_result
from scipy.stats import binomtest

from eagle3.compose import compose_run

SECRETS = {"API_KEY", "TOKEN", "PASSWORD", "PRIVATE_KEY", "URL_PASSWORD"}
PRESIDIO = {  # its kinds that patterns claim → ours
    "CREDIT_CARD": "CREDIT_CARD", "PHONE_NUMBER": "PHONE_NUMBER", "EMAIL_ADDRESS": "EMAIL_ADDRESS",
    "IBAN_CODE": "IBAN", "US_SSN": "NATIONAL_ID", "IP_ADDRESS": "IP_ADDRESS",
}  # fmt: skip
FAKER = {  # providers → ours; national ids have a name in each country
    "email": "EMAIL_ADDRESS", "phone_number": "PHONE_NUMBER", "credit_card_number": "CREDIT_CARD", "iban": "IBAN",
    "ipv4_public": "IP_ADDRESS", "ipv6": "IP_ADDRESS", "mac_address": "MAC_ADDRESS", "ssn": "a national id",
}  # fmt: skip
HARMLESS_CHARACTERS = 600


class Text(NamedTuple):
    source: str
    kind: str | None  # None: nothing is in it
    text: str
    start: int = 0
    end: int | None = None
    group: str | None = None  # texts of one group are in one half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("gitleaks", "kingfisher", "detect-secrets", "trufflehog", "presidio"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--prose", type=Path)
    parser.add_argument("--faker", nargs="*", default=[], help="locales")
    parser.add_argument("--seen", nargs="*", default=[], help="sources, as the result names them")
    parser.add_argument("--per-kind", type=int, default=50, help="values of each provider and locale")
    parser.add_argument("--harmless", type=int, default=3000, help="pieces of packages' descriptions")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    given = ("precompute", "prompts/privacy=patterns", "prompts.path=.", "target.path=.", "out_dir=.")
    privacy = compose_run(*given).prompts.privacy.build()
    # made-up values of others are often of documentation
    recognisers = compose_run(*given, "prompts.privacy.allowed.placeholders=false").prompts.privacy.build()
    judged: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))  # by source and kind
    for text in texts(options):
        found, _ = (recognisers if text.kind else privacy).find(text.text)
        right, kind = is_found(text, found) if text.kind else not found, text.kind or "harmless"
        sources = [text.source]
        if text.source.startswith("Faker "):
            sources.append(f"Faker, {'seen' if text.source in options.seen else 'unseen'} locales")
        for source in sources:
            judged[source][kind].append(right)
            if is_untouched(text):
                judged[source][f"{kind}, untouched"].append(right)
        if text.kind is None:
            others = {item.entity for item in found} - {"EMAIL_ADDRESS"}
            judged[text.source]["harmless next to email addresses"].append(not others)
    results = {
        source: {
            kind: measured(each, "passed" if kind.startswith("harmless") else "found")
            for kind, each in sorted(kinds.items())
        }
        for source, kinds in sorted(judged.items())
    }
    print(json.dumps(write_result(options.out, {"seen": options.seen, "sources": results}), indent=1))


def is_untouched(text: Text) -> bool:
    return hashlib.sha256((text.group or text.text).encode()).digest()[-1] % 2 == 1


def measured(right: list[bool], word: str) -> dict:
    """Return the share with Wilson's interval of 95 %."""
    share = binomtest(sum(right), len(right))
    low, high = share.proportion_ci(0.95, method="wilson")
    return {"texts": len(right), word: round(share.statistic, 4), "interval": [round(low, 4), round(high, 4)]}


def is_found(text: Text, found: list) -> bool:
    """Tell whether something of the kind is where it should be; of secrets and national ids any kind of them counts."""
    end = len(text.text) if text.end is None else text.end
    entities = {item.entity for item in found if item.start < end and item.end > text.start}
    if text.kind == "a secret":
        return bool(entities & SECRETS)
    return bool(entities) if text.kind == "a national id" else text.kind in entities


def texts(options: argparse.Namespace) -> Iterator[Text]:
    readers = {"gitleaks": gitleaks, "kingfisher": kingfisher, "detect_secrets": detect_secrets,
               "trufflehog": trufflehog, "presidio": presidio, "prose": prose}  # fmt: skip
    for name, read in readers.items():
        if path := getattr(options, name):
            yield from read(path)
    for locale in options.faker:
        yield from faker(locale, options.presidio, options.per_kind)
    yield from descriptions(options.harmless)


def kingfisher(folder: Path) -> Iterator[Text]:
    for file in sorted((folder / "data/rules").glob("*.yml")):
        for rule in yaml.safe_load(file.read_text())["rules"]:
            for example in rule.get("examples", []):
                yield Text("kingfisher", "a secret", example)


def gitleaks(folder: Path) -> Iterator[Text]:
    """Yield the examples that are plain literals; the others are generated from the rules."""
    block = re.compile(r"\b(tps|fps) := \[\]string\{\n(.*?)\n\t\}", re.DOTALL)
    literal = re.compile(r"^\t\t([`\"].*[`\"]),")
    for file in sorted((folder / "cmd/generate/config/rules").glob("*.go")):
        for kind, body in block.findall(file.read_text()):
            for line in body.splitlines():
                if match := literal.match(line):
                    text = match[1][1:-1] if match[1][0] == "`" else _unquoted(match[1])
                    if text is not None:
                        yield Text("gitleaks", "a secret" if kind == "tps" else None, text)


def _unquoted(literal: str) -> str | None:
    try:
        value = ast.literal_eval(literal)
    except (SyntaxError, ValueError):
        return None
    return value if isinstance(value, str) else None


def detect_secrets(folder: Path) -> Iterator[Text]:
    """Yield what its tests are parametrised with: (text, whether it is one). Keywords and entropy apart."""
    for file in sorted((folder / "tests/plugins").glob("*_test.py")):
        if file.stem in ("base_test", "high_entropy_strings_test", "keyword_test", "ip_public_test"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[1], ast.Constant):
                text = _unquoted(ast.unparse(node.elts[0]))
                if isinstance(node.elts[1].value, bool) and text:
                    yield Text("detect-secrets", "a secret" if node.elts[1].value else None, text)


GO_STRING = r"`[^`]*`|\"(?:[^\"\\\n]|\\.)*\""
GO_CONSTANT = re.compile(rf"^\s*(\w+)\s*:?=\s*({GO_STRING})\s*$", re.MULTILINE)
GO_CASE = re.compile(
    rf"\binput:\s*(?:fmt\.Sprintf\(\s*)?({GO_STRING})((?:,\s*(?:\w+|{GO_STRING}))*)\)?,\s*want:\s*"
    rf"\[\]string\{{((?:\s*(?:\w+|{GO_STRING})\s*,?)+)\s*\}}"
)
GO_VALUE = re.compile(rf"{GO_STRING}|\w+")


def trufflehog(folder: Path) -> Iterator[Text]:
    """Yield what its detectors' tests find: literals, and formats filled with constants. One vendor is in one half."""
    for file in sorted((folder / "pkg/detectors").glob("**/*_test.go")):
        code = file.read_text()
        constants = {name: _go_string(literal) for name, literal in GO_CONSTANT.findall(code)}

        def values(expressions: str, constants: dict[str, str] = constants) -> list[str | None]:
            found = GO_VALUE.findall(expressions)
            return [constants.get(value) if value[0] not in '`"' else _go_string(value) for value in found]

        for literal, arguments, wanted in GO_CASE.findall(code):
            text, filled = _go_string(literal), values(arguments)
            if None in filled or text.count("%s") != len(filled):
                continue
            text = text % tuple(filled) if filled else text
            places = [(text.index(value), len(value)) for value in values(wanted) if value and value in text]
            if places:
                start, length = places[0]
                yield Text("trufflehog", "a secret", text, start, start + length, str(file.parent.relative_to(folder)))


def _go_string(literal: str) -> str:
    return literal[1:-1] if literal[0] == "`" else (_unquoted(literal) or literal[1:-1])


def presidio(file: Path) -> Iterator[Text]:
    for row in json.loads(file.read_text()):
        for span in row["spans"]:
            if kind := PRESIDIO.get(span["entity_type"]):
                yield Text("presidio-research", kind, row["full_text"], span["start_position"], span["end_position"])


def faker(locale: str, sentences: Path, count: int) -> Iterator[Text]:
    """Put values of a locale into presidio-research's sentences of the same kind."""
    from faker import Faker

    frames = _frames(sentences)
    fake, chance = Faker(locale), random.Random(0)
    Faker.seed(0)
    for provider, kind in FAKER.items():
        make: Callable[[], str] | None = getattr(fake, provider, None)
        for _ in range(count if make else 0):
            before, after = chance.choice(frames.get(kind) or frames["NATIONAL_ID"])
            value = str(make())  # type: ignore[misc]
            yield Text(f"Faker {locale}", kind, before + value + after, len(before), len(before) + len(value))


def prose(file: Path) -> Iterator[Text]:
    for row in map(json.loads, file.read_text().splitlines()):
        yield Text("passwords in prose", "a secret" if "end" in row else None, **row)


def _frames(file: Path) -> dict[str, list[tuple[str, str]]]:
    """Return, by kind, what stands before and behind it in sentences that hold one thing."""
    frames: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for row in json.loads(file.read_text()):
        kinds = [PRESIDIO.get(span["entity_type"]) for span in row["spans"]]
        if len(kinds) == 1 and kinds[0]:
            [span] = row["spans"]
            frames[kinds[0]].append(
                (row["full_text"][: span["start_position"]], row["full_text"][span["end_position"] :])
            )
    return frames


def descriptions(count: int) -> Iterator[Text]:
    pieces = []
    for package in sorted(distributions(), key=lambda each: each.name or ""):
        text = (package.read_text("METADATA") or "").partition("\n\n")[2]
        pieces += [text[at : at + HARMLESS_CHARACTERS] for at in range(0, len(text), HARMLESS_CHARACTERS)]
    random.Random(0).shuffle(pieces)
    yield from (Text("packages' descriptions", None, piece) for piece in pieces[:count])


if __name__ == "__main__":
    main()
