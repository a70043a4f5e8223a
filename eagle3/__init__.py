"""Train EAGLE-3 draft heads: prompts → answers → features → head → SGLang checkpoint. See README.md."""

from pathlib import Path

__version__ = "0.1.0"

_PACKAGE = Path(__file__).resolve().parent
_IN_WHEEL = _PACKAGE / "scripts"  # put there by setup.py
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent  # where the three scripts and conf/ are
