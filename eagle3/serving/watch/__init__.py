"""A running server, watched: its accept length by time, and when the head wants adapting."""
