"""An export that takes its place only once its checks have found no error."""

import logging
from collections.abc import Callable
from pathlib import Path

from eagle3.engine.draft import Draft
from eagle3.head_files.finding import Finding, has_errors
from eagle3.head_files.format import read_kind
from eagle3.provenance import provenance
from eagle3.serving.check.accept_length import Measurer
from eagle3.serving.check.checks import check_export
from eagle3.serving.head.card import write_card
from eagle3.serving.head.export import TrainedHead, write_head
from eagle3.storage.replace import replacing

log = logging.getLogger(__name__)


def write_checked(
    trained: TrainedHead,
    head: Path,
    *,
    measurer: Callable[[], Measurer | str],
    draft: Callable[[str | None], Draft],
    conclude: Callable[[list[Finding]], None],
) -> None:
    """Export a head to a folder, with its model card. `draft` is told SGLang's name of how its kind drafts, `conclude`
    what the checks found; it raises InputError for an error. `measurer` may be why nothing is measured."""
    with replacing(head) as new:  # what is there stays until this head is checked
        decodes = measurer()
        files = write_head(trained, new, versions=provenance())
        findings, files = check_export(trained, files, decodes)
        write_card(files, trained.settings, draft(read_kind(files).sglang_algorithm))
        if has_errors(findings):
            log.warning("head=%s is not written, and what was there is left alone", head)
        conclude(findings)
