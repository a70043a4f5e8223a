"""What a server would make of a head."""
