"""The serving engine: an SGLang server from its flags to its end, and requests to it."""
