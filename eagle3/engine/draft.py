"""Drafting in terms of SGLang's flags."""

from dataclasses import dataclass

from eagle3.settings.serving import Drafting


@dataclass(frozen=True, kw_only=True)
class Draft(Drafting):
    """An exported head and how it drafts. `draft_tokens` counts the tree's root; None is for a chain: steps + 1.

    The head attends to the last `draft_window` tokens (None: all)."""

    head: str
    algorithm: str | None = "EAGLE3"  # SGLang's name of how its kind of head drafts; None: no server serves it
    draft_window: int | None = None
