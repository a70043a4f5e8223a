"""Quality and speed of the personal data check: what the README and the tests claim, measured.

    python benchmarks/privacy.py --prompts prompts/train.jsonl --clean humaneval.jsonl gsm8k.jsonl \\
        --out benchmarks/results/privacy.json

The labelled set is tests/personal_data.py's; `--prompts` gives rows for the rate of one core, `--clean` files with no
personal data, in which every finding is false. Python's standard library is measured too; addresses of its authors are
listed apart, as they are real.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from hydra import compose, initialize_config_dir
from result import write_result

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from personal_data import cases  # noqa: E402

from eagle3 import cli  # noqa: E402
from eagle3.prompts.privacy import Privacy  # noqa: E402
from eagle3.prompts.reading.conversation import messages_of  # noqa: E402
from eagle3.prompts.reading.prompt import Prompt  # noqa: E402
from tests.prompts.privacy.test_quality import hits, python_prompts  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--clean", type=Path, nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=1, help="the tests take 0")
    parser.add_argument("--per-kind", type=int, default=300)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with initialize_config_dir(str(ROOT / "conf" / "prompts"), version_base="1.3"):
        privacy = cli.build(compose(overrides=["+privacy=patterns"]).privacy)
        recognisers = cli.build(compose(overrides=["+privacy=patterns", "privacy.allowed.nobodys=false"]).privacy)
    results = {
        "labelled": measure_quality(recognisers, privacy, options.seed, options.per_kind),
        "false_positives": {
            **{path.stem: share(privacy, texts_of(path)) for path in options.clean},
            "python_stdlib": share(privacy, python_prompts(every=1)),
        },
        "prompts_per_second_one_core": measure_rate(privacy, options.prompts),
    }
    print(json.dumps(write_result(options.out, results), indent=1))


def measure_quality(recognisers: Privacy, privacy: Privacy, seed: int, per_kind: int) -> dict:
    cases_of, recalled, right, wrong = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    near_misses = Counter[str]()
    for case in cases(seed, per_kind=per_kind, per_near_miss=per_kind // 2):
        found = (recognisers if case.entity else privacy).find(case.text)  # near misses may be nobody's
        true = hits(case, found)
        if case.entity:
            cases_of[case.entity] += 1
            recalled[case.entity] += bool(true)
        else:
            near_misses["cases"] += 1
            near_misses["refused"] += bool(found)
        right.update(item.entity for item in true)
        wrong.update(item.entity for item in found if item not in true)
    entities = {
        entity: {
            "cases": cases_of[entity],
            "recall": round(recalled[entity] / cases_of[entity], 4),
            "precision": round(right[entity] / (right[entity] + wrong[entity]), 4),
        }
        for entity in sorted(cases_of)
    }
    return {
        "seed": seed,
        "cases": cases_of.total() + near_misses["cases"],
        "near_misses": near_misses,
        "entities": entities,
    }


def share(privacy: Privacy, texts: list[str]) -> dict:
    found = [{item.entity for item in privacy.find(text)} for text in texts]
    return {
        "prompts": len(texts),
        "refused": sum(map(bool, found)),
        "refused_beside_email_addresses": sum(bool(entities - {"EMAIL_ADDRESS"}) for entities in found),
        "entities": Counter(entity for entities in found for entity in entities),
    }


def texts_of(path: Path) -> list[str]:
    return ["\n\n".join(message["content"] for message in prompt.messages) for prompt in prompts_of(path)]


def prompts_of(path: Path, *, keep_answers: bool = False) -> list[Prompt]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    conversations = [messages_of(row, keep_answers=keep_answers) for row in rows]
    return [
        Prompt(id=str(index), source=path.stem, license=None, messages=messages)
        for index, messages in enumerate(conversations)
    ]


def measure_rate(privacy: Privacy, path: Path) -> dict:
    rates = {}
    for name, keep_answers in (("user_turns", False), ("with_answers", True)):
        prompts = prompts_of(path, keep_answers=keep_answers)
        start = time.process_time()
        for prompt in prompts:
            privacy(prompt)
        rates[name] = round(len(prompts) / (time.process_time() - start))
    return {"prompts": len(prompts), **rates}


if __name__ == "__main__":
    main()
