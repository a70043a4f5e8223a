"""Finds and deletes the damaged files of a feature store, so that the features stage makes them again."""

from eagle3.errors import InputError
from eagle3.features.index import ShardIndex, index_name
from eagle3.features.manifest import MANIFEST, Manifest, read_index, read_manifest
from eagle3.features.store import TARGET_WEIGHTS
from eagle3.progress import Bar
from eagle3.storage.folder import Storage
from eagle3.storage.prefault import sha256_of


def find_damage(storage: Storage) -> tuple[dict[str, str], list[str]]:
    """Compare every byte of a store with its hashes. Return the damage of each damaged file by name, and the shards
    that the manifest does not list: those of another store, or of a run that has not ended."""
    damage: dict[str, str] = {}
    manifest = _manifest(storage, damage)
    names = set(storage.names("*"))
    shards = {name for name in names if name.startswith("shard-") and name.endswith(".tar")}
    listed = {} if manifest is None else {shard.name: shard for shard in manifest.shards}
    foreign = sorted(shards - set(listed)) if listed else []
    for name in Bar(sorted(listed or shards), desc="verify", unit="shard"):
        index = _index(storage, name, listed[name].index_sha256 if listed else None, damage)
        if name not in names:
            damage[name] = "is missing"
        elif index is not None and (wrong := _wrong(storage, name, index.facts.sha256)):
            damage[name] = wrong
    if manifest is not None:
        expected = manifest.target_weights_sha256
        wrong = _wrong(storage, TARGET_WEIGHTS, expected) if TARGET_WEIGHTS in names else "is missing"
        damage |= {TARGET_WEIGHTS: wrong} if wrong else {}
    return damage, foreign


def take_away(storage: Storage, damage: dict[str, str]) -> None:
    """Delete damaged files, a shard together with its index."""
    for name in damage:
        storage.delete(name)
        if name.startswith("shard-"):
            number = name[: len("shard-000000")]
            for each in [f"{number}.index", *storage.names(f"{number}-*.tar")]:
                storage.delete(each)


def _manifest(storage: Storage, damage: dict[str, str]) -> Manifest | None:
    try:
        return read_manifest(storage)
    except InputError as error:
        require_this_version(error)
        damage[MANIFEST] = "is missing, damaged or edited"
        return None


def require_this_version(error: InputError) -> None:
    """Raise the error again if the file is another version's: that is no damage, and must not be deleted."""
    if "format_version=" in str(error):
        raise error


def _index(storage: Storage, shard: str, expected: str | None, damage: dict[str, str]) -> ShardIndex | None:
    try:
        return read_index(storage, index_name(shard), expected)
    except InputError as error:
        require_this_version(error)
        damage[index_name(shard)] = f"is missing, damaged, or not that of {shard}"
        return None


def _wrong(storage: Storage, name: str, expected: str) -> str:
    actual = sha256_of(storage.read(name))
    return "" if actual == expected else f"has sha256 {actual[:12]}… instead of {expected[:12]}…"
