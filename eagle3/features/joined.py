"""Several feature stores of one target, trained on as one: more answers to each prompt, or data that grew in parts.

Shapes: V target vocabulary, H hidden size.
"""

from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eagle3.errors import InputError
from eagle3.features.sample import Sample
from eagle3.features.store import FeatureStore, SampleRef
from eagle3.storage import require_local, sha256_json
from eagle3.target.model import require_same_target

SAME_IN_ALL = ("capture_layers", "dtype", "teacher_rows", "reasoning_ids")  # what packs and loss masks count on
TOTALS = ("samples", "tokens", "answer_tokens", "bytes")


class JoinedStores:
    """Stands in for a FeatureStore: the samples of all stores, one after the other, read where they lie."""

    def __init__(self, paths: list[str]) -> None:
        self.stores = [FeatureStore(path) for path in paths]
        for store in self.stores[1:]:
            require_joinable(self.stores[0], store)
        require_different(self.stores)
        self.samples = [ref for store in self.stores for ref in store.samples]
        self._store_at: dict[Path, FeatureStore] = {store.path: store for store in self.stores}

    @property
    def path(self) -> str:
        """As `data.path` gives it, for messages."""
        return f"[{','.join(str(store.path) for store in self.stores)}]"

    @property
    def absolute_path(self) -> list[str]:
        return [store.absolute_path for store in self.stores]

    @cached_property
    def manifest(self) -> dict:
        """What all stores have in common, their numbers added up, and under `stores` what each was made from."""
        manifests = [store.manifest for store in self.stores]
        made_from = manifests[0]["made_from"]
        return {
            "target_config": manifests[0]["target_config"],
            **{key: sum(manifest[key] for manifest in manifests) for key in TOTALS},
            "made_from": {
                **{key: made_from.get(key) for key in ("target", *SAME_IN_ALL)},
                "stores": [manifest["made_from"] for manifest in manifests],
            },
        }

    def read(self, ref: SampleRef) -> Sample:
        return self._store_at[ref.store].read(ref)

    def verify(self, *, rank: int = 0, world_size: int = 1) -> None:
        for store in self.stores:
            store.verify(rank=rank, world_size=world_size)

    def target_weights(self) -> tuple[Float[Tensor, "V H"], Float[Tensor, "V H"]]:
        """Embedding and lm_head, which are the same in all stores."""
        return self.stores[0].target_weights()

    @cached_property
    def answer_counts(self) -> Int[Tensor, " V"]:
        return torch.stack([store.answer_counts for store in self.stores]).sum(0)

    @property
    def fingerprint(self) -> str:
        """Their order decides the plan of an epoch, so it counts."""
        return sha256_json([store.fingerprint for store in self.stores])


Store = FeatureStore | JoinedStores


def open_store(path: str | list[str]) -> Store:
    """What `data.path` names. A list of one is that store."""
    paths = [path] if isinstance(path, str) else path
    for each in paths:
        require_local(each, setting="data.path")
    return FeatureStore(paths[0]) if len(paths) == 1 else JoinedStores(paths)


def require_joinable(first: FeatureStore, other: FeatureStore) -> None:
    """Raise InputError unless a pack may hold samples of both; answers may be sampled in different ways."""
    ours, theirs = first.manifest["made_from"], other.manifest["made_from"]
    require_same_target(
        ours["target"],
        theirs["target"],
        expected_from=f"data.path={first.path}",
        actual_from=f"data.path={other.path}",
    )
    differing = [key for key in SAME_IN_ALL if ours.get(key) != theirs.get(key)]
    if differing:
        values = ", ".join(f"{key}: {ours.get(key)} and {theirs.get(key)}" for key in differing)
        raise InputError(
            f"data.path=[{first.path},{other.path}] cannot be trained on as one, they differ ({values}); leave one "
            f"out, or make it again with the other's features.* settings: precompute.py stages=[features]"
        )


def require_different(stores: list[FeatureStore]) -> None:
    """Raise InputError if the same features would be trained twice, whatever their folders are called."""
    first: dict[str, FeatureStore] = {}
    for store in stores:
        same = first.setdefault(store.fingerprint, store)
        if same is not store:
            raise InputError(f"data.path names the same features twice, {same.path} and {store.path}; leave one out")
