"""Prompts that the target writes itself: its chat template up to where a user's text begins is continued (Magpie)."""
