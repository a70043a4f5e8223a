"""Files of an exported head: reads and writes them, and finds what servers would silently ignore."""
