"""The frozen target: its files, facts, identity, model, and what it says of itself at captured layers."""
