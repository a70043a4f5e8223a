"""Types and ranges of every key of conf/, one file per entry script and one for the prompts."""
