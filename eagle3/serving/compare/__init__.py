"""action=compare: heads on the same prompts, and how sure their differences are."""
