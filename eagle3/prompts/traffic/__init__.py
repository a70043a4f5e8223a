"""The traffic mix: which prompts to keep so that together they look like production traffic."""
