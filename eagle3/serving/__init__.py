"""Exports, checks, serves and measures trained heads."""
