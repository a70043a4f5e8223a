"""What `action=compare` does around the comparison: exports the jobs of a sweep, and gives the table to trackers."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3.engine.command import Draft
from eagle3.errors import InputError, require_packages
from eagle3.head_files.finding import Finding, findings_table, has_errors, require_no_errors
from eagle3.provenance import provenance
from eagle3.serving.check.checks import write_checked
from eagle3.serving.compare.jobs import Job, Jobs, find_jobs
from eagle3.serving.head.export import is_export_of, read_trained, require_replaceable
from eagle3.settings.parts import plain
from eagle3.settings.serving import CompareRun, CompareSettings

if TYPE_CHECKING:
    from eagle3.training.loggers import WandbRun

log = logging.getLogger(__name__)


def sweep_jobs(run: CompareRun) -> Jobs | None:
    """Return the jobs of `sweep`; None where `heads` names folders."""
    if (run.heads is None) == (run.sweep is None):
        given = "heads is not set" if run.heads is None else f"heads is set, and sweep={run.sweep} too"
        raise InputError(f"{given}; give heads=[A,B], folders of exported heads, or sweep=FOLDER, whose jobs have them")
    if run.sweep is None:
        return None
    jobs = find_jobs(Path(run.sweep))
    if jobs.has_seeds:
        require_packages("scipy", extra="bench", needed_by="an interval over the seeds of a sweep")
    return jobs


def export_job(job: Job, settings: CompareSettings) -> None:
    """Export a job's best checkpoint, unless its head is of that one. The comparison decodes: these checks do not."""
    if is_export_of(job.head, job.checkpoint):
        return
    require_replaceable(job.head)

    def conclude(findings: list[Finding]) -> None:
        if has_errors(findings):
            print(findings_table(findings))
        require_no_errors(findings, str(job.head))

    trained = read_trained(job.checkpoint)
    draft = Draft(head=str(job.head), draft_window=settings.draft_window, **vars(settings.shapes[0]))
    write_checked(trained, job.head, draft, measurer=lambda: "action=compare decodes", conclude=conclude)
    log.info("job %s: exported to %s", job.name, job.head)


def build_trackers(run: CompareRun) -> "list[WandbRun]":
    """Build the loggers that take a table: W&B's, without metrics.csv, which its option brings for a training."""
    if run.logger and run.logger.keys() - {"csv"} != {"wandb"}:
        raise InputError(
            f"logger={','.join(run.logger)}: only W&B takes this table; give logger=wandb, or leave it out"
        )
    if "wandb" in run.logger and run.logger["wandb"].keys["artifacts"]:
        raise InputError("logger.wandb.artifacts=true is for checkpoints, and action=compare makes none; leave it out")
    sweep = Path(run.sweep).resolve() if run.sweep else None
    return [part.build(compares=sweep) for name, part in run.logger.items() if name == "wandb"]


def track(loggers: "list[WandbRun]", run: CompareRun, rows: list[dict[str, Any]]) -> None:
    """Log the rows as a table, with the settings of the comparison."""
    from eagle3.training.loggers import close, log_settings, log_table  # with Lightning, which takes seconds

    log_settings(loggers, plain(run), {}, provenance())
    log_table(loggers, "compare", rows)
    close(loggers, "success")
