"""Licences: which rows may be used, on what terms a source came, whom a release has to credit."""

from eagle3.prompts.licenses.attribution import attribution_entry, attribution_text
from eagle3.prompts.licenses.rules import LicenseCheck, LicenseRules
from eagle3.prompts.licenses.terms import SourceTerms, source_terms

__all__ = [
    "LicenseCheck",
    "LicenseRules",
    "SourceTerms",
    "attribution_entry",
    "attribution_text",
    "source_terms",
]
