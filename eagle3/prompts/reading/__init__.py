"""Files and dataset folders → rows → conversations. Needs no library of the extra `prompts` for JSON."""
