"""Personal data and secrets in prompts: found by recognisers, then dropped, masked or kept by entity."""

from eagle3.prompts.privacy.policy import Privacy
from eagle3.prompts.privacy.recogniser import Pattern, Recogniser, Span

__all__ = ["Pattern", "Privacy", "Recogniser", "Span"]
