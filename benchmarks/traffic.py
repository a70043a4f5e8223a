"""Speed of measuring prompts for the traffic mix, accuracy of their languages, time and memory of the draw.

    python benchmarks/traffic.py --out benchmarks/results/traffic.json
    python benchmarks/traffic.py --catalogs SITE_PACKAGES/django --out benchmarks/results/traffic.json

With --catalogs, languages are told of the translations in that folder's gettext catalogs (*/locale/CODE/*/*.mo): short
texts of user interfaces, alone and four together. Code is every 800 characters of the standard library's sources.
"""

import argparse
import gettext
import json
import random
import re
import resource
import sysconfig
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from result import write_result

from eagle3.prompts import configured_sources, read_prompts
from eagle3.prompts.language import UNKNOWN, LanguageDetector, split_code
from eagle3.prompts.reading.prompt import Prompt
from eagle3.prompts.traffic import MEASURED, TrafficMix

ROOT = Path(__file__).parent.parent
CONF = ROOT / "conf/prompts"
LANGUAGES = ("ar", "cs", "da", "de", "el", "es", "fi", "fr", "he", "hi", "hu", "id", "it", "ja", "ko", "nl", "pl", "pt",
             "ro", "ru", "sv", "tr", "uk", "vi", "zh")  # fmt: skip
TEXTS = 200  # of each language, at most
MARKUP = re.compile(r"%\(\w+\)[sd]|%[sd]|\{\w*\}|<[^>]+>|&\w+;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--catalogs", type=Path)
    arguments = parser.parse_args()
    detector = LanguageDetector(**OmegaConf.load(CONF / "filters/default.yaml").language.detector)
    results = {"measure": measure_speed(detector), "python_sources": languages_of_code(detector)}
    if arguments.catalogs:
        results["languages"] = accuracy(detector, arguments.catalogs)
    results["draw"] = [draw(rows, detector) for rows in (1_000_000, 10_000_000)]
    print(json.dumps(write_result(arguments.out, results), indent=1))


def measure_speed(detector: LanguageDetector) -> dict:
    """Language, code share and all other features of the bundled prompts, and of ten joined into one; median of 5."""
    path = str(ROOT / "tests/assets/prompts/train.jsonl")
    (source,) = configured_sources(path=path, license=None, name=None, split=None, attribution=None, sources=None)
    prompts = [found for _, found in read_prompts(source, keep_answers=False) if isinstance(found, Prompt)]
    mix = traffic_mix(detector)
    mix.measure(prompts[0])  # loads the model
    tens = [prompts[start : start + 10] for start in range(0, len(prompts), 10)]
    turns = [[turn for prompt in ten for turn in prompt.messages] for ten in tens]
    long = [Prompt(id="", source="", license=None, messages=messages) for messages in turns]
    found = {}
    for name, batch in (("bundled prompts", prompts), ("ten joined", long)):
        seconds = []
        for _ in range(5):
            start = time.process_time()  # of one core, whatever else the machine does
            rows = np.array([mix.measure(prompt) for prompt in batch], dtype=MEASURED)
            seconds.append(time.process_time() - start)
        found[name] = {
            "prompts": len(rows),
            "characters": round(float(rows["characters"].mean())),
            "prompts_per_core_second": round(len(rows) / sorted(seconds)[2]),
            "languages": {code.decode(): count for code, count in Counter(rows["language"].tolist()).most_common()},
        }
    return found


def languages_of_code(detector: LanguageDetector) -> dict[str, int]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    pieces = [text[start : start + 800] for text in texts for start in range(0, len(text), 800)]
    return dict(Counter(detector(split_code([piece]).prose) for piece in pieces).most_common())


def accuracy(detector: LanguageDetector, folder: Path) -> dict:
    texts = {code: catalog_texts(folder, code) for code in LANGUAGES}
    four = {code: [" ".join(found[i : i + 4]) for i in range(0, len(found), 4)] for code, found in texts.items()}
    return {"one text": told(detector, texts), "four texts": told(detector, four)}


def catalog_texts(folder: Path, code: str) -> list[str]:
    """Translations of 20 characters and more, 10 where a character is a syllable or a word."""
    shortest = 10 if code in ("ja", "ko", "zh") else 20
    found = set()
    for path in folder.glob(f"**/locale/{'zh_Hans' if code == 'zh' else code}/LC_MESSAGES/*.mo"):
        with path.open("rb") as file:
            catalog: dict = gettext.GNUTranslations(file)._catalog
        for key, value in catalog.items():
            text = MARKUP.sub("", value).strip()
            if key and len(text) >= shortest and value != key:
                found.add(text)
    return random.Random(0).sample(sorted(found), min(TEXTS, len(found)))


def told(detector: LanguageDetector, texts: dict[str, list[str]]) -> dict:
    outcomes: dict[str, int] = defaultdict(int)
    for code, found in texts.items():
        for text in found:
            language = detector(split_code([text]).prose)
            outcomes["unknown" if language == UNKNOWN else "right" if language == code else "wrong"] += 1
    total = sum(outcomes.values())
    return {"texts": total, **{name: round(count / total, 4) for name, count in outcomes.items()}}


def draw(rows: int, detector: LanguageDetector) -> dict:
    """From a skewed pool of `rows` to a sample of 4,000; memory is the whole process's peak, the pool included."""
    pool = made_up(rows, 1, turns=0.6, length=5.5, code=0.2, english=0.8)
    sample = made_up(4_000, 2, turns=0.75, length=6.2, code=0.4, english=0.5)
    start = time.process_time()
    _, report = traffic_mix(detector).choose(pool, sample=sample)
    return {
        "rows": rows,
        "core_seconds": round(time.process_time() - start, 2),
        "pool_mb": round(pool.nbytes / 1e6),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
        "distance_before": max(feature["distance_before"] for feature in report["features"].values()),
        "distance_after": max(feature["distance_after"] for feature in report["features"].values()),
    }


def made_up(rows: int, seed: int, *, turns: float, length: float, code: float, english: float) -> np.ndarray:
    generator = np.random.default_rng(seed)
    pool = np.zeros(rows, MEASURED)
    pool["turns"] = generator.geometric(turns, rows)
    pool["characters"] = np.exp(generator.normal(length, 1.0, rows))
    pool["code_share"] = np.where(generator.random(rows) < code, generator.random(rows), 0)
    pool["language"] = np.where(generator.random(rows) < english, b"en", b"de")
    return pool


def traffic_mix(detector: LanguageDetector) -> TrafficMix:
    config = OmegaConf.to_container(OmegaConf.load(CONF / "traffic/production.yaml"))
    return TrafficMix(**{**config, "sample": "made up", "size": 100_000}, detector=detector)


if __name__ == "__main__":
    main()
