"""Texts that repeat one another: duplicates among the prompts, and leaks of benchmarks into them."""
