"""eagle3 COMMAND: the three scripts, found where the package is installed; each action of serve.py is a command.

eagle3 train data.path=DIR/features      # python train.py data.path=DIR/features
eagle3 export run=RUN head=HEAD          # python serve.py action=export run=RUN head=HEAD
"""

# ruff: noqa: E402
from eagle3 import ROOT, __version__, interrupts

interrupts.end_at_once()  # before the imports below, which take a while

import runpy
import sys
from pathlib import Path

from eagle3.cli import exit_with
from eagle3.hydra_run import CONF
from eagle3.settings.help import about_option
from eagle3.settings.serving import ACTIONS

COMMANDS = {
    "precompute": "Turn raw conversations into prompts, the target's answers and features.",
    "train": "Train a draft head on features.",
    **{name: about_option(Path(CONF) / "action" / f"{name}.yaml") for name in ACTIONS},
}


def main() -> None:
    """Run the script that the first word names, as Python would: ranks and workers start that file, too."""
    first, *rest = sys.argv[1:] or ["--help"]
    if first in COMMANDS:
        run(first, rest)
    elif first == "--version":
        print(f"eagle3 {__version__}")
    elif first in ("--help", "-h"):
        print(usage())
    else:
        exit_with(f"eagle3 has no command {first}; take one of: {', '.join(COMMANDS)}", 1)


def run(command: str, arguments: list[str]) -> None:
    if command in ACTIONS:
        command, arguments = "serve", [f"action={command}", *arguments]
    script = str(ROOT / f"{command}.py")
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def usage() -> str:
    commands = [f"  eagle3 {name:<11} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "Train EAGLE-3 draft heads. COMMAND --help shows the groups and keys of a command.\n",
            *commands,
            f"\nOptions with their comments: {CONF}. Add your own with --config-dir FOLDER after the command.",
        ]
    )


if __name__ == "__main__":
    main()
