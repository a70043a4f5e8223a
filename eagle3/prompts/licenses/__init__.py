"""Licences: which rows may be used, on what terms a source came, whom a release has to credit."""
