"""Exports a trained head: SGLang's or the speculators' layout, and the model card."""
