"""Export heads for SGLang or vLLM; check, inspect and compare them; serve a head, and measure and tune the server.

python serve.py action=export run=RUN head=HEAD                     # for SGLang, vLLM and llama.cpp
python serve.py action=check target.path=TARGET head=HEAD           # exit status 1 and a reason if something is wrong
python serve.py action=decode target.path=TARGET head=HEAD prompts.path=FILE.jsonl steps=3 limit=40   # one JSON line
python serve.py action=show target.path=TARGET head=HEAD prompts.path=FILE.jsonl out=FILE.html   # an HTML page
python serve.py action=compare target.path=TARGET 'heads=[A,B]' prompts.path=FILE.jsonl    # a table of differences
python serve.py action=compare target.path=TARGET sweep=FOLDER prompts.path=FILE.jsonl   # of train.py -m, over seeds
python serve.py action=launch target.path=TARGET head=HEAD steps=3             # SGLang; dry_run=true prints the command
python serve.py action=bench target.path=TARGET head=HEAD steps=3 'bench.prompts={chat: FILE.jsonl}'   # a report
python serve.py action=tune target.path=TARGET head=HEAD prompts.path=FILE.jsonl tune.concurrency=8   # the best flags
python serve.py action=publish target.path=TARGET head=HEAD out=FOLDER 'results=[compare.json]' …    # for the hub
"""

from eagle3 import interrupts

if __name__ == "__main__":  # before the imports below, which take a while
    interrupts.end_at_once()

import hydra
from omegaconf import DictConfig

from eagle3 import cli
from eagle3.errors import InputError
from eagle3.settings.check import NO_ACTION, check_settings


@hydra.main(version_base="1.3", config_path="conf", config_name="serve")
@cli.report_errors
def main(config: DictConfig) -> None:
    if "action" not in config:
        raise InputError(NO_ACTION)
    run = check_settings(config, "serve")
    from eagle3.commands.serve import serve  # seconds of PyTorch: --help, Tab and slips do without

    interrupts.raise_interrupts()
    serve(run)


if __name__ == "__main__":
    cli.start(main)
