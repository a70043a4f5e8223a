"""Checks what a server would make of a head."""
