"""Lossless speculative decoding with a head: the judge of every head."""
