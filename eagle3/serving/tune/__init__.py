"""The search for the fastest draft setting."""
