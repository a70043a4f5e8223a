"""Checks that heads can be compared, before the target is loaded."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from eagle3.errors import InputError
from eagle3.head_files.files import HeadFiles, read_without_weights
from eagle3.serving.check.origin import require_fits, warn_of_precision
from eagle3.settings.serving import CompareSettings
from eagle3.target.files import TargetFiles, make_identity
from eagle3.target.identity import TargetIdentity, differences, other_precision

BY_FILES = ("config_hash", "tokenizer_hash")  # identify the target without its weights


def head_folders(heads: Sequence[str]) -> dict[str, Path]:
    """Return the folders of the key `heads` by their last parts, or by their whole paths where two end alike.

    Raises InputError where one comes twice."""
    folders = [Path(head) for head in heads]
    for place, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:place]]:
            raise InputError(f"heads: {folder} is listed twice; name each head once")
    short = [folder.name for folder in folders]
    alike = len(set(short)) < len(short) or "" in short
    return {str(folder) if alike else folder.name: folder for folder in folders}


def require_comparable(folders: Iterable[Path], target: TargetFiles, settings: CompareSettings) -> None:
    """Raise InputError for a head of another target or vocabulary, by its name, and for what it cannot draft."""
    identity = make_identity(target, weights_hash="")
    for folder in folders:
        files = read_without_weights(folder)
        topk = max(shape.topk for shape in settings.drafts())
        require_fits(files, target, steps=settings.most_steps, topk=topk, head="heads", shape="compare.shapes: ")
        require_own_target(files, identity, BY_FILES)


def require_own_target(files: HeadFiles, target: TargetIdentity, parts: tuple[str, ...]) -> None:
    """Raise InputError for a head whose training.json names a target that differs in one of the `parts`, unless it may
    be the same in another precision."""
    trained = files.record.origin.target if files.record else target  # other trainers record none
    differing = differences(trained, target, parts)
    if differing and other_precision(trained, target) is None:
        raise InputError(
            f"heads: {files.path} was trained on {trained.known_as}, not on target.path={target.known_as}: they "
            f"differ in {differing[0]}; compare heads of one target"
        )


def require_targets(heads: Iterable[Path], target: TargetIdentity) -> None:
    """Raise InputError for a head of other weights, once the target is loaded; warn of another precision."""
    for head in heads:
        files = read_without_weights(head)
        require_own_target(files, target, ("weights_hash",))
        warn_of_precision(files, target)
