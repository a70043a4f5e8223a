"""Train EAGLE-3 draft heads: prompts → answers → features → head → SGLang checkpoint. See README.md."""

from pathlib import Path

__version__ = "0.1.0"

# The folder of the three scripts and conf/: eagle3/scripts has links to them in a clone, and the files in a wheel.
ROOT = (Path(__file__).parent / "scripts" / "conf").resolve().parent
