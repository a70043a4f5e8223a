"""Files on disk and in object stores: written whole or not at all, sealed, by one writer at a time."""
