"""Writes prompts.jsonl and rejects.jsonl from the scanned chunks; ledger.json: counts of rows by source and reason, and
the inputs. The ledger has no text of a row.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3.errors import MAKE_PROMPTS, InputError
from eagle3.prompts.chunks import READING, ScannedChunk
from eagle3.prompts.licenses.terms import SourceTerms
from eagle3.prompts.reading.sources import Source
from eagle3.prompts.reading.tools import TOOL_COLUMNS
from eagle3.prompts.rules import Rules
from eagle3.prompts.selection import Selection
from eagle3.storage.files import atomic_write, json_line, sha256_file, sha256_json
from eagle3.storage.records import read_sealed_json

NAMED = 200  # names of a source in the ledger, the commonest: in many files each licence names a holder
OWN_ID = "id of another prompt, made unique"
LISTED = 10  # of them in a line


@dataclass
class Counts:
    """Counts of the rows of one source."""

    rows: int = 0
    prompts: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    named: dict[str, Counter[str]] = field(default_factory=dict)  # by reason: the licences, sources, … refused
    licenses: Counter[str] = field(default_factory=Counter)  # of the prompts
    origins: Counter[str] = field(default_factory=Counter)  # the prompts' own `source`
    found: dict[str, Counter[str]] = field(default_factory=dict)  # counts of each check, e.g. entities


def write_prompts(
    folder: Path, sources: list[Source], chunks: list[ScannedChunk], selection: Selection, *, held_out: bool = False
) -> dict[str, Counts]:
    """Write the files of one side of the selection, in the order of the sources, and count by source."""
    counts = {source.name: Counts() for source in sources}
    lines = 0  # of the file, before the chunk
    with atomic_write(folder / "rejects.jsonl") as rejects, atomic_write(folder / "prompts.jsonl") as prompts:
        for number, chunk in enumerate(chunks):
            name = sources[chunk.source].name
            count, repeated_ids = counts[name], selection.repeated_ids(number)
            reasons = selection.reasons(number, held_out=held_out)
            count.rows += chunk.summary["rows"]
            for check, found in chunk.summary["counts"].items():
                count.found.setdefault(check, Counter()).update(found)
            read = count.found[READING]
            lines = 0 if chunk.summary["start"] == 0 else lines
            for index, row in enumerate(chunk.rows()):
                reason = row["reason"] or reasons.get(index)
                if reason is None:
                    if index in repeated_ids:
                        row["record"] = _with_own_id(row["record"])
                        read[OWN_ID] += 1
                    prompts.write(row["record"])
                    count.prompts += 1
                    count.licenses[row["license"]] += 1
                    count.origins[row["origin"]] += 1
                    continue
                count.rejected[reason] += 1
                place = {"file": chunk.summary["file"], "line": lines + row["line"]}
                named = {"name": row["name"]} if row["name"] is not None else {}
                if named:
                    count.named.setdefault(reason, Counter())[row["name"]] += 1
                rejects.write(json_line({"id": row["id"], "source": name, **place, "reason": reason, **named}))
            lines += chunk.summary["lines"]
    return counts


def _with_own_id(record: bytes) -> bytes:
    """Return a prompt whose id another one has, with an id that also depends on its content."""
    prompt = json.loads(record)
    content = {key: value for key, value in prompt.items() if key not in ("id", "source", "license")}
    return json_line({**prompt, "id": f"{prompt['id']}-{sha256_json(content)[:16]}"})


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
        "sources": {name: _sorted(vars(count)) for name, count in counts.items()},
        "privacy": rules.privacy.blind_spots(),
        "leaks": _leaks(counts, rules),
        "traffic": traffic,
        "attribution": [_credits(source.terms, counts[source.name], rules) for source in sources],
        "inputs": inputs,
    }


def _sorted(value: Any, most: int | None = None) -> Any:
    """Sort counters by descending number, then name, so that the order does not depend on the rows' order.

    What checks found is cut to the commonest names and the sum of the others, so that the ledger stays small.
    """
    if isinstance(value, Counter):
        ordered = sorted(value.items(), key=lambda item: (-item[1], item[0]))
        rest = sum(number for _, number in ordered[most:]) if most else 0
        return dict(ordered[:most]) | ({"others": rest} if rest else {})
    if isinstance(value, dict):
        return {key: _sorted(part, NAMED if key in ("found", "named") else most) for key, part in value.items()}
    return value


def _credits(terms: SourceTerms, count: Counts, rules: Rules) -> dict[str, Any]:
    """Return the entry of one source, for a release of the prompts or of a head trained on them.

    `missing`: a licence requires credit, and there is no `attribution` in the configuration, link or citation.
    """
    owing = any(license.lower() not in rules.licenses.free_of_credit for license in count.licenses)
    return {
        "source": terms.name,
        "prompts": count.prompts,
        "licenses": dict(sorted(count.licenses.items())),
        "license_from": terms.license_from,
        "card_license": terms.card_license,
        "origins": dict(sorted(count.origins.items())),
        "attribution": terms.attribution,
        "link": terms.link,
        "citation": terms.citation,
        "missing": owing and not (terms.attribution or terms.citation or terms.link),
    }


def _leaks(counts: dict[str, Counts], rules: Rules) -> dict[str, dict[str, int]]:
    """Return for each benchmark the numbers of its texts, answers and unread rows, and of prompts dropped for it."""
    rejected = total(count.rejected for count in counts.values())
    return {
        benchmark.name: {
            "texts": len(benchmark.texts),
            "answers": len(benchmark.answers),
            "unread": benchmark.unread,
            "dropped": rejected[f"leak: {benchmark.name}"],
        }
        for benchmark in rules.benchmarks
    }


# By a pattern for the beginning of the commonest reason; NAME stands for the commonest name that it is about.
ADVICE = {
    "no column of messages or prompts": "say which column holds them: '+prompts.fields.prompt=COLUMN' for a "
    "question, '+prompts.fields.messages=COLUMN' for a list of turns (conf/prompts/default.yaml)",
    r"\S+ is (not a list|neither text nor a list)": "name the column, or the part of it, that holds the turns or the "
    "question, e.g. '+prompts.fields.messages=COLUMN.PART' or '+prompts.fields.prompt=COLUMN.PART'",
    "turns in another column": "name it: '+prompts.fields.messages=NAME' (conf/prompts/default.yaml)",
    "unknown role": "say whose turns they are, e.g. '+prompts.roles={NAME: user}', or assistant, system, tool "
    "(conf/prompts/default.yaml)",
    "one turn of a conversation": "write the turns of each conversation into one row",
    "turn without a role": "say which key of a turn names its speaker, e.g. '+prompts.fields.role=KEY' "
    "(conf/prompts/default.yaml); a question and its answer in one object are two turns",
    "turn without content": "say which key of a turn holds its text, e.g. '+prompts.fields.content=KEY'",
    r"turns (inside a turn|as a tree|of several)": "write each conversation, or each branch of it, as a "
    "list of turns in a row of its own",
    "text with the turns of a rendered": "write the turns as a list, each with its role and its text",
    "turns in another order": "sort the turns of each row by NAME",
    "license missing": "give the licence of rows that name none, e.g. prompts.license=Apache-2.0; for data of your "
    "own: prompts=in_house",
    "license": "if you may use these rows, allow their licence: 'prompts.licenses.allowed_terms=[\"NAME\"]' "
    "(conf/prompts/licenses)",
    "source forbidden": "if the rows are yours to use, allow them by this name: 'prompts.licenses.cleared=[\"NAME\"]'; "
    "it may be that of a file or folder in the path, of the dataset card, or of the row's source or model "
    "(conf/prompts/licenses)",
    "no assistant turn": "give rows with answers, or drop answers=imported",
    "not a JSON object": "write one object a line, or all of them as one array; CSV, for example, with "
    "pandas.read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True)",
    rf"tool turn|row with (\S+\.)?({'|'.join(TOOL_COLUMNS)})$": "prompts.tools=keep reads tools, calls and results "
    "(docs/how-to/data.md)",
    "row with instances": "write each instance as a row of its own, with the columns instruction and input",
    "row with tools under": "call the column NAME tools and set prompts.tools=keep (docs/how-to/data.md), or ask "
    "without them: '+prompts.fields.attachments=[]'",
    r"(row|turn) with \S+$": "the question is about it or follows it; '+prompts.fields.attachments=[]' asks without it",
    "row with a file": "these rows are about it; '+prompts.fields.attachments=[]' asks them without it",
    "content with parts": "give rows of text: prompts have no images, sounds or documents",
    "text of an answer": "give the file of the questions, or name their column: '+prompts.fields.prompt=COLUMN'",
    r"\S+ holds something other": "write each turn as an object with a role and a content",
    "": "give rows with messages or prompts, or change what refuses these (conf/prompts)",
}


def nothing_left(sources: list[Source], chunks: list[ScannedChunk]) -> InputError:
    """Return the error for a run without prompts, with advice about the commonest reason."""
    rows = sum(chunk.summary["rows"] for chunk in chunks)
    rejected = total(chunk.summary["rejected"] for chunk in chunks)
    named = merged(chunk.summary["named"] for chunk in chunks)
    commonest = max(rejected, key=rejected.__getitem__, default="")
    advice = next(advice for reason, advice in ADVICE.items() if re.match(reason, commonest))
    name = max(named.get(commonest, {}), key=named.get(commonest, Counter()).__getitem__, default="NAME")
    names = ", ".join(source.name for source in sources)
    return InputError(
        f"prompts: none of {rows} rows in {names} passed ({in_words(rejected, named) or 'the sources are empty'}); "
        f"{advice.replace('NAME', name)}"
    )


def total(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    """Add counters up."""
    return sum(map(Counter, counts), Counter[str]())


def merged(counts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, Counter[str]]:
    """Add the counters of each key up."""
    found: dict[str, Counter[str]] = {}
    for each in counts:
        for key, counter in each.items():
            found.setdefault(key, Counter()).update(counter)
    return found


def in_words(counts: Counter[str], named: Mapping[str, Counter[str]], most: int | None = None) -> str:
    """Return the commonest reasons with their counts, and after each the commonest names that it is about."""
    parts = [
        f"{reason}: {number}" + (f" ({in_words(named[reason], {}, LISTED)})" if reason in named else "")
        for reason, number in counts.most_common(most)
    ]
    more = [f"{len(counts) - most} more"] if most is not None and len(counts) > most else []
    return ", ".join(parts + more)
