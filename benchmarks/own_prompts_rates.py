"""How long the target's own prompts and their answers take on a running SGLang server: answered at once, and in two
stages, in turns. The two stages are two commands, so their time has the start of another one.

    python benchmarks/own_prompts_rates.py --target TARGET --url http://127.0.0.1:30000 --work DIR --out RESULT.json
"""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from result import call, write_result

from eagle3.engine.client import new_session
from eagle3.engine.timed import flush_cache
from eagle3.storage.files import read_jsonl
from eagle3.target_prompts.store import finished_rounds

WAYS = {"at once": ("[prompts,answers]",), "two stages": ("[prompts]", "[answers]")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--work", type=Path, required=True, help="new folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="for precompute.py, e.g. sampling.top_p=0.8")
    options = parser.parse_args()
    runs = []
    for _ in range(options.repeats):
        for way, stages in WAYS.items():
            folder = options.work.resolve() / f"run_{len(runs)}"
            folder.mkdir(parents=True)
            runs.append({"way": way} | measure(options, folder, stages))
            print(json.dumps(runs[-1]), flush=True)
            write_result(options.out, {"runs": runs})  # of all so far


def measure(options: argparse.Namespace, folder: Path, stages: tuple[str, ...]) -> dict[str, Any]:
    """Run the stages into `folder`, with nothing in the server's prefix cache."""
    if not asyncio.run(flush(options.url)):
        raise SystemExit(f"{options.url}/flush_cache does not answer")
    arguments = [
        "prompts=from_target", f"target.path={options.target}", f"out_dir={folder}", f"prompts.limit={options.prompts}",
        "answers=sglang", f"answers.urls=[{options.url}]", *options.overrides,
    ]  # fmt: skip
    log = folder.with_suffix(".log")
    seconds = [call("precompute.py", *arguments, f"stages={each}", log=log) for each in stages]
    samples = sum(len([*read_jsonl(path)]) for path in finished_rounds(folder))
    rows = [*read_jsonl(folder / "answers" / "answers.jsonl")]
    tokens = sum(end - begin for row in rows for begin, end in row["turns"])
    return {"seconds": [round(each, 1) for each in seconds], "samples": samples, "answer_tokens": tokens}


async def flush(url: str) -> bool:
    async with new_session(timeout_s=60) as session:
        return await flush_cache(session, url)


if __name__ == "__main__":
    main()
