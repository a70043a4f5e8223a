"""Kinds of draft heads, their training unroll, their loss and their vocabulary."""
