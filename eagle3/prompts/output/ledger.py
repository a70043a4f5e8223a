"""ledger.json: counts of rows by source and reason, and the inputs. It has no text of a row."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.prompts.chunks import ScannedChunk
from eagle3.prompts.licenses.attribution import attribution_entry
from eagle3.prompts.output.files import Counts
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.rules import Rules
from eagle3.storage.files import sha256_file
from eagle3.storage.records import read_sealed_json

NAMED = 200  # refused licences of a source, the commonest; in many files each one names a holder


def current_ledger(folder: Path, inputs: dict) -> dict | None:
    """Return the ledger if it was made from these inputs and still describes prompts.jsonl."""
    ledger_path, prompts_path = folder / "ledger.json", folder / "prompts.jsonl"
    if not (ledger_path.exists() and prompts_path.exists()):
        return None
    ledger = read_sealed_json(ledger_path, made_by=MAKE_PROMPTS)
    current = ledger["inputs"] == inputs and ledger["sha256"] == sha256_file(prompts_path)
    return ledger if current else None


def make_ledger(
    folder: Path, sources: list[Source], counts: dict[str, Counts], traffic: dict | None, rules: Rules, inputs: dict
) -> dict[str, Any]:
    """Return the ledger of the prompts.jsonl in `folder`; traffic: the report of the mix."""
    return {
        "rows": sum(count.rows for count in counts.values()),
        "prompts": sum(count.prompts for count in counts.values()),
        "sha256": sha256_file(folder / "prompts.jsonl"),
        "sources": {name: _sorted(vars(_with_commonest(count))) for name, count in counts.items()},
        "privacy": {"unseen": rules.privacy.unseen(), "partly_seen": rules.privacy.partly_seen()},
        "leaks": _leaks(counts, rules),
        "traffic": traffic,
        "attribution": [
            attribution_entry(
                source.terms,
                licenses=counts[source.name].licenses,
                origins=counts[source.name].origins,
                free_of_credit=rules.licenses.free_of_credit,
            )
            for source in sources
        ],
        "inputs": inputs,
    }


def _with_commonest(count: Counts) -> Counts:
    """Keep the commonest of the refused licences, and the sum of the others: the ledger stays small."""
    refused = count.found.get("licenses", Counter())
    commonest = dict(sorted(refused.items(), key=lambda item: (-item[1], item[0]))[:NAMED])
    rest = refused.total() - sum(commonest.values())
    return replace(count, found={**count.found, "licenses": Counter(commonest | ({"others": rest} if rest else {}))})


def _sorted(value: Any) -> Any:
    """Sort counters by descending number, then name, so that the order does not depend on the rows' order."""
    if isinstance(value, Counter):
        return dict(sorted(value.items(), key=lambda item: (-item[1], item[0])))
    return {key: _sorted(part) for key, part in value.items()} if isinstance(value, dict) else value


def _leaks(counts: dict[str, Counts], rules: Rules) -> dict[str, dict[str, int]]:
    """Return for each benchmark the numbers of its texts, answers and unread rows, and of prompts dropped for it."""
    rejected = sum((count.rejected for count in counts.values()), Counter())
    return {
        benchmark.name: {
            "texts": len(benchmark.texts),
            "answers": len(benchmark.answers),
            "unread": benchmark.unread,
            "dropped": rejected[f"leak: {benchmark.name}"],
        }
        for benchmark in rules.benchmarks
    }


# By the beginning of the commonest reason.
ADVICE = {
    "no column of messages or prompts": "say which column holds them, e.g. '+prompts.fields.prompt=COLUMN' "
    "(conf/prompts/default.yaml)",
    "unknown role": "say whose turns they are, e.g. '+prompts.roles.NAME=user' (conf/prompts/default.yaml)",
    "license": "give the licence of rows that name none, e.g. prompts.license=Apache-2.0; data of your own gets a name "
    "that you allow: prompts.license=in-house 'prompts.licenses.allowed_terms=[in-house]' (conf/prompts/licenses)",
    "no assistant turn": "give rows with answers, or drop answers=imported",
    "not a JSON object": "write one object a line, or all of them as one array in a file that ends in .json",
    "": "give rows with messages or prompts, or change what refuses these (conf/prompts)",
}


def nothing_left(sources: list[Source], chunks: list[ScannedChunk]) -> InputError:
    """Return the error for a run without prompts, with advice about the commonest reason."""
    rows = sum(chunk.summary["rows"] for chunk in chunks)
    rejected = sum((Counter(chunk.summary["rejected"]) for chunk in chunks), Counter())
    reasons = ", ".join(f"{reason}: {number}" for reason, number in rejected.most_common()) or "the sources are empty"
    commonest = max(rejected, key=rejected.__getitem__, default="")
    advice = next(advice for reason, advice in ADVICE.items() if commonest.startswith(reason))
    names = ", ".join(source.name for source in sources)
    return InputError(f"prompts: none of {rows} rows in {names} passed ({reasons}); {advice}")
