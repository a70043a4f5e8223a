"""Exports a trained head: its files and the model card."""
