"""The draft head, its training unroll, its loss and its vocabulary."""
