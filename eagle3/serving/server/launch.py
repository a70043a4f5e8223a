"""`action=launch`: a server with a head, from the checks before its start to Ctrl-C."""

import json
import logging
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.engine.client import KEY, api_key
from eagle3.engine.command import Draft, launch_command, require_windowed_attention, shell_line, stated_dtype
from eagle3.engine.endpoint import server_information
from eagle3.engine.process import OPEN_HOSTS, Server, require_free_port
from eagle3.engine.versions import count_gpus, find_sglang
from eagle3.errors import Interrupted
from eagle3.head_files.files import read_files, read_without_weights, weight_files
from eagle3.head_files.finding import TargetFacts, findings_table, require_no_errors
from eagle3.secrets import public
from eagle3.serving.check.checks import CHECKS, CONFIG_CHECKS, run_checks
from eagle3.serving.check.origin import warn_of_precision
from eagle3.settings.engine import LaunchSettings
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles, make_identity

log = logging.getLogger(__name__)


def launch(settings: LaunchSettings, target: TargetFiles, draft: Draft | None, *, dry_run: bool, folder: Path) -> None:
    """Serve until Ctrl-C or SIGTERM (Interrupted) or until the server ends by itself (InputError).

    `dry_run` prints the command alone, after a look at the head (InputError). The URL goes to stdout, the server's log
    to `folder` and stderr."""
    command = launch_command(settings, target, draft)
    if dry_run:
        require_head(settings, target, draft)
        print(public(shell_line(settings, command)))
        return
    prepare(settings, target, draft)
    if settings.host in OPEN_HOSTS and api_key() is None:
        log.warning(
            "launch.host=%s: whoever reaches this machine can use the server, which asks for no key; set %s in the "
            "environment, or keep it on launch.host=127.0.0.1 behind a proxy",
            settings.host,
            KEY,
        )
    log.info(shlex.join(command))  # without launch.env, which may hold secrets
    try:
        with Server(settings, command, log=folder / "server.log", name="the server") as server:
            announce(server, server_information(server.url))
            for line in server.follow():
                print(line, file=sys.stderr, flush=True)
            raise server.failure()
    except KeyboardInterrupt:
        raise Interrupted(f"the server is stopped; its log is {folder / 'server.log'}") from None


def prepare(settings: LaunchSettings, target: TargetFiles, draft: Draft | None) -> None:
    """Raise InputError for what would fail at the start, or silently later."""
    require_free_port(settings.host, settings.port)
    if settings.check:
        find_sglang(settings)
        require_head(settings, target, draft, weights=True)
        count_gpus(settings)


def require_head(settings: LaunchSettings, target: TargetFiles, draft: Draft | None, *, weights: bool = False) -> None:
    """Log the checks that need neither decoding nor the target's weights, and raise InputError if one finds an error.

    Without the head's `weights` these are the checks of its config, and only what they find is logged."""
    if draft is None or not settings.check:
        return
    require_windowed_attention(settings, draft)
    files = read_files(draft.head) if weights else read_without_weights(draft.head)
    weight_files(files.path)  # they have to be there
    if files.record:  # the target's weights are not compared: only the server reads them
        warn_of_precision(files, make_identity(target, files.record.origin.target.weights_hash))
    facts = TargetFacts(
        config=target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype),
        dtype=target.checkpoint_dtype,
        identity=None,
        embedding=None,
        launch_dtype=stated_dtype(settings) or "auto",
    )
    findings = run_checks(files, facts, CHECKS if weights else CONFIG_CHECKS)
    if shown := [each for each in findings if weights or each.level in ("warning", "error")]:
        log.info(findings_table(shown))
    require_no_errors(findings, draft.head)


def announce(server: Server, information: Mapping[str, Any]) -> None:
    """Print the URL and a request to paste, and log whether the overlap scheduler is on."""
    log.info(
        f"SGLang {information.get('version')}, log in {server.log}; {overlap_scheduler(server.settings, information)}"
    )
    question = {"model": "default", "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    authorized = f'-H "Authorization: Bearer ${KEY}" ' if api_key() else ""
    print(f"{server.url} is ready; ask it with:")
    print(
        f"curl -s {server.url}/v1/chat/completions -H 'Content-Type: application/json' {authorized}"
        f"-d {shlex.quote(json.dumps(question))}",
        flush=True,
    )


def overlap_scheduler(settings: LaunchSettings, information: Mapping[str, Any]) -> str:
    """Say whether it is on. SGLang turns it off for some targets and options (pipeline parallel, Mamba, the CPU)."""
    if not information.get("disable_overlap_schedule"):
        return "overlap scheduler on"
    reason = "by SGLang itself, its log says why" if settings.overlap_schedule else "by launch.overlap_schedule=false"
    return f"overlap scheduler off, {reason}"
