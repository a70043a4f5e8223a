"""Checks before a server starts of faults that SGLang finds minutes later or never."""

from eagle3.engine.installation import Installation
from eagle3.engine.models import captures
from eagle3.errors import InputError
from eagle3.head_files.files import read_files, read_without_weights, weight_files
from eagle3.head_files.finding import Finding, TargetFacts
from eagle3.serving.check.checks import CONFIG_CHECKS, run_checks
from eagle3.target.facts import target_config
from eagle3.target.files import TargetFiles


def require_capture(installation: Installation, target: TargetFiles) -> None:
    """Raise InputError if SGLang's class for the target has no way to capture hidden states."""
    if captures(installation.folder / "srt" / "models", target.architecture) is False:
        raise InputError(
            f"target.path={target.path} is a {target.architecture}: SGLang {installation.version} cannot capture "
            f"hidden states from that class, so it serves no EAGLE-3 head for it; take another target or SGLang"
        )


def check_files(head: str, target: TargetFiles) -> list[Finding]:
    """Run the checks that need neither decoding nor the target's weights."""
    return run_checks(read_files(head), facts_of_files(target))


def check_config(head: str, target: TargetFiles) -> list[Finding]:
    """Run those of them that need no weights of the head either, which have to be there all the same."""
    files = read_without_weights(head)
    weight_files(files.path)
    return run_checks(files, facts_of_files(target), CONFIG_CHECKS)


def facts_of_files(target: TargetFiles) -> TargetFacts:
    return TargetFacts(
        config=target_config(target.text_config, target.text_config.vocab_size, target.checkpoint_dtype),
        architecture=None,  # require_capture asks the installation
        dtype=target.checkpoint_dtype,
        identity=None,
        embedding=None,
    )
