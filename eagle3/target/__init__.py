"""The frozen target: its files, facts, identity, model, and the capture of its hidden states."""
