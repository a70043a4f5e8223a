"""SGLang servers: command, checks before the start, process, requests."""
