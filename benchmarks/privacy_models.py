"""What models find in texts of others that no pattern can, what they refuse of harmless ones, and what they cost.

    python benchmarks/privacy_models.py --models small=spacy:DIR medium=spacy:DIR presidio=presidio:FILE \\
        --presidio synth_dataset_v2.json --faker en_US en_GB … --unseen ar_EG de_AT … \\
        --clean humaneval.jsonl --out benchmarks/results/privacy_models.json

NAME=DOOR:PATH is a model of conf/prompts/privacy/model and its `path`. Texts and halves: benchmarks/privacy_others.py;
nothing was written with these texts in view here, so all of them count. A span is found by its kind where that kind is
found at its place, as any kind where anything is, and somewhere in the text where that kind is, for then a prompt is
refused: the parts of an address are spans of their own. The rate is of prompts a
CPU second, without the patterns. `--unseen` names locales that were not looked at while the patterns were written: in
them presidio's own recognisers are held against the patterns, for the kinds that both know (`recognisers`).
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from hydra import compose, initialize_config_dir
from privacy_others import ROOT, Text, descriptions, faker, measured, presidio
from result import write_result

from eagle3 import cli
from eagle3.prompts.privacy.recogniser import Span

NAMES = {"PERSON": "PERSON", "GPE": "LOCATION", "ORGANIZATION": "ORGANIZATION", "STREET_ADDRESS": "STREET_ADDRESS"}
FAKER_NAMES = {"name": "PERSON", "city": "LOCATION", "company": "ORGANIZATION", "street_address": "STREET_ADDRESS"}
# What presidio calls the kinds that its recognisers and the patterns share.
SHARED = {
    "CREDIT_CARD": "CREDIT_CARD", "EMAIL_ADDRESS": "EMAIL_ADDRESS", "IBAN_CODE": "IBAN", "IP_ADDRESS": "IP_ADDRESS",
    "PHONE_NUMBER": "PHONE_NUMBER", "US_SSN": "US_SSN", "MAC_ADDRESS": "MAC_ADDRESS",
}  # fmt: skip
SURE = 0.3  # presidio's score: as conf/prompts/privacy/model/presidio.yaml

Finder = Callable[[str], list[tuple[str, Span]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME=DOOR:PATH")
    parser.add_argument("--presidio", type=Path, required=True, help="synth_dataset_v2.json")
    parser.add_argument("--faker", nargs="*", default=[], help="locales of the models' language")
    parser.add_argument("--unseen", nargs="*", default=[], help="locales that nobody looked at")
    parser.add_argument("--per-kind", type=int, default=50, help="values of each provider and locale")
    parser.add_argument("--harmless", type=int, default=1000, help="pieces of packages' descriptions")
    parser.add_argument("--clean", type=Path, nargs="*", default=[], help="rows with `turns`, without personal data")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    harmless = {"packages' descriptions": [text.text for text in descriptions(options.harmless)]}
    harmless |= {path.stem: list(turns(path)) for path in options.clean}
    named = list(presidio(options.presidio, NAMES))
    for group, locales in (("English", options.faker), ("unseen", options.unseen)):
        for locale in locales:
            each = faker(locale, options.presidio, options.per_kind, FAKER_NAMES, NAMES)
            named += [text._replace(source=f"Faker, {group} locales") for text in each]
    models = dict(spec.split("=", 1) for spec in options.models)
    results: dict = {
        "models": {name: judged(model(spec), named, harmless) for name, spec in models.items()},
    }
    if options.unseen:
        shared = list(presidio(options.presidio))
        for locale in options.unseen:
            each = faker(locale, options.presidio, options.per_kind)
            shared += [text._replace(source="Faker, unseen locales") for text in each]
        results["recognisers"] = {
            name: judged(find, [text for text in shared if text.kind in kinds], harmless)
            for name, find, kinds in (
                ("ours", patterns(), {*SHARED.values(), "STREET_ADDRESS"}),
                ("presidio", alone(), set(SHARED.values())),
            )
        }
    print(json.dumps(write_result(options.out, results), indent=1))


def turns(path: Path) -> Iterable[str]:
    return ("\n\n".join(json.loads(line)["turns"]) for line in path.read_text().splitlines())


def model(spec: str) -> Finder:
    """Return what the model of a door finds, without the patterns."""
    door, _, path = spec.partition(":")
    with initialize_config_dir(str(ROOT / "conf" / "prompts"), version_base="1.3"):
        group = ["+privacy=patterns", f"privacy/model={door}", f"privacy.model.path={path}"]
        built = cli.build(compose(overrides=group).privacy).model
    return lambda text: list(built.find(text))


def patterns() -> Finder:
    """Return what our recognisers find of the shared kinds, nobody's values too."""
    with initialize_config_dir(str(ROOT / "conf" / "prompts"), version_base="1.3"):
        settings = compose(overrides=["+privacy=patterns", "privacy.allowed.nobodys=false"]).privacy
        privacy = cli.build(settings)
    kinds = {*SHARED.values(), "STREET_ADDRESS"}
    return lambda text: [
        (found.entity, Span(found.start, found.end)) for found in privacy.find(text) if found.entity in kinds
    ]


def alone() -> Finder:
    """Return what presidio's own recognisers find of the shared kinds, without a model."""
    import spacy
    from presidio_analyzer import AnalyzerEngine
    from presidio_analyzer.nlp_engine import SpacyNlpEngine

    engine = SpacyNlpEngine()
    engine.nlp = {"en": spacy.blank("en")}
    analyzer = AnalyzerEngine(nlp_engine=engine)
    kinds = sorted(set(SHARED) & set(analyzer.get_supported_entities("en")))

    def find(text: str) -> list[tuple[str, Span]]:
        found = analyzer.analyze(text, language="en", entities=kinds, score_threshold=SURE)
        return [(SHARED[result.entity_type], Span(result.start, result.end)) for result in found]

    return find


def judged(find: Finder, texts: list[Text], harmless: dict[str, list[str]]) -> dict:
    """Return what is found by source and kind, what of harmless texts is refused by entity, and the rate."""
    find("The first text loads the model.")
    before = time.process_time()
    found = [find(text.text) for text in texts]
    refused = {source: [{entity for entity, _ in find(text)} for text in each] for source, each in harmless.items()}
    seconds = time.process_time() - before
    return {
        "found": recall(texts, found),
        "harmless": {source: passed(each) for source, each in refused.items()},
        "prompts_per_cpu_second": round((len(texts) + sum(map(len, harmless.values()))) / seconds, 1),
    }


def recall(texts: list[Text], found: list[list[tuple[str, Span]]]) -> dict:
    right: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for text, spans in zip(texts, found, strict=True):
        assert text.kind and text.end is not None
        there = {entity for entity, span in spans if span.start < text.end and span.end > text.start}
        right[text.source][text.kind].append(text.kind in there)
        right[text.source][f"{text.kind} as any kind"].append(bool(there))
        right[text.source][f"{text.kind} somewhere in the text"].append(any(entity == text.kind for entity, _ in spans))
    return {source: {kind: measured(each, "found") for kind, each in kinds.items()} for source, kinds in right.items()}


def passed(refused: list[set[str]]) -> dict:
    """Return how many texts passed, and by which entity others were refused."""
    entities = sorted(set().union(*refused))
    return measured([not each for each in refused], "passed") | {
        f"refused by {entity}": round(sum(entity in each for each in refused) / len(refused), 4) for entity in entities
    }


if __name__ == "__main__":
    main()
