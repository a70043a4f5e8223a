"""Licences: which rows may be used, the terms of a source, the credits for a release."""
