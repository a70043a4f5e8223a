"""Kinds of draft heads, their training unroll, their loss and their vocabulary."""

from eagle3.head import eagle3 as eagle3  # registers the kind
