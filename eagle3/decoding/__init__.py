"""Lossless speculative decoding with a draft head, which measures how good a head is."""
