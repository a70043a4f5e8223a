"""Clean prompts to the target's own answers."""
