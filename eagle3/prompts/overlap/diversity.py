"""Prompts that mean alike: texts are embedded by a model from a local folder, grouped by k-means, each group thinned.

N kept prompts, H size of an embedding. Embeddings lie on disk; memory does not grow with N. Off by default.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from eagle3.errors import InputError, require_packages
from eagle3.prompts.overlap.duplicates import Fate
from eagle3.prompts.spool import Column, Scanned

log = logging.getLogger(__name__)
KEY = "prompts.diversity"
PASSES = 3  # over all embeddings, for the centres
READ = 16_384  # embeddings in memory at a time
COMPARED = 1024  # of a group, with all kept ones of it, at a time


class Diversity:
    """Of each group the first prompts stay: those whose cosine to the ones before is below `similarity`, and of them
    `per_cluster` (None sets no bound).

    path: the folder of config, tokenizer and safetensors; code in it never runs. An embedding is the mean of the last
    hidden states of the first `max_tokens` tokens of the user turns. It depends on the device and its arithmetic."""

    def __init__(
        self,
        *,
        path: str,
        clusters: int,
        per_cluster: int | None,
        similarity: float | None,
        max_tokens: int,
        batch_size: int,
        device: str,
        seed: int,
    ):
        require_packages("sklearn", extra="diversity", needed_by=KEY)
        self.path = Path(path).expanduser()
        self.clusters, self.per_cluster, self.similarity = clusters, per_cluster, similarity
        self.max_tokens, self.batch_size, self.device, self.seed = max_tokens, batch_size, device, seed
        if per_cluster is None and similarity is None:
            raise InputError(
                f"{KEY}.path={path}: without per_cluster and similarity nothing is left out; set one of them"
            )
        for pattern in ("config.json", "tokenizer*", "*.safetensors"):
            if not any(self.path.glob(pattern)):
                raise InputError(f"{KEY}.path={path} holds no {pattern}; give the local folder of a model")
        self.size = _embedding_size(self.path)
        _require_device(device)

    def files(self) -> list[Path]:
        """List what the folder holds: prompts are made again when one of them changes."""
        return sorted(file for file in self.path.rglob("*") if file.is_file())

    def thin(self, scanned: Scanned, fate: np.ndarray, folder: Path) -> None:
        """Mark in `fate` what is left out of those that it keeps; `folder` takes the embeddings."""
        numbers = np.flatnonzero(fate == Fate.KEPT)
        embeddings = self._embed(scanned, numbers, folder)
        groups = self._group(embeddings)
        for members in members_of(groups):
            kept, similar = self._choose(np.array(embeddings[members], dtype=np.float32))
            fate[numbers[members[similar]]] = Fate.SIMILAR
            fate[numbers[members[~kept & ~similar]]] = Fate.CLUSTER
        log.info("%d of %d prompts stay after prompts.diversity", (fate[numbers] == Fate.KEPT).sum(), len(numbers))

    def _embed(self, scanned: Scanned, numbers: np.ndarray, folder: Path) -> np.ndarray:
        """Write the embeddings of these prompts, of length 1, [N, H] float16."""
        encoder = Encoder(self.path, max_tokens=self.max_tokens, device=self.device)
        column = Column(folder / "embeddings", np.dtype(np.float16), (len(numbers), self.size))
        embeddings = column.zeros()
        with tqdm(total=len(numbers), desc="embed", unit="prompt") as bar:
            for start in range(0, len(numbers), self.batch_size):
                texts = [user_text(scanned.prompt(int(number))) for number in numbers[start : start + self.batch_size]]
                embeddings[start : start + len(texts)] = encoder(texts)
                bar.update(len(texts))
        return embeddings

    def _group(self, embeddings: np.ndarray) -> np.ndarray:
        """Return the group of each embedding, [N]."""
        from sklearn.cluster import MiniBatchKMeans

        count = len(embeddings)
        if count <= self.clusters:
            return np.arange(count)
        means = MiniBatchKMeans(self.clusters, random_state=self.seed, n_init=1, batch_size=READ)
        order = np.random.default_rng(self.seed)
        for _ in range(PASSES):
            shuffled = order.permutation(count)
            for part in parts(shuffled, at_least=self.clusters):
                means.partial_fit(np.array(embeddings[np.sort(part)], dtype=np.float32))
        groups = [means.predict(np.array(embeddings[at : at + READ], dtype=np.float32)) for at in range(0, count, READ)]
        return np.concatenate(groups)

    def _choose(self, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return which of a group [M, H], in its order, are kept, and which are left out as similar to a kept one."""
        kept, similar = np.zeros((2, len(group)), dtype=bool)
        room = len(group) if self.per_cluster is None else self.per_cluster
        for start in range(0, len(group), COMPARED):
            part = slice(start, start + COMPARED)
            if self.similarity is not None:
                similar[part] = (group[part] @ group[:start][kept[:start]].T >= self.similarity).any(axis=1)
                among = group[part] @ group[part].T >= self.similarity
            for place in range(start, min(start + COMPARED, len(group))):
                if self.similarity is not None and not similar[place]:
                    similar[place] = (among[place - start, : place - start] & kept[start:place]).any()
                kept[place] = not similar[place] and room > 0
                room -= kept[place]
        return kept, similar


class Encoder:
    """Texts → embeddings, by a model of Hugging Face, in float32."""

    def __init__(self, path: Path, *, max_tokens: int, device: str):
        import torch
        from transformers import AutoModel, AutoTokenizer, logging

        logging.disable_progress_bar()
        self.device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        model = AutoModel.from_pretrained(
            path, use_safetensors=True, local_files_only=True, trust_remote_code=False, dtype=torch.float32
        )
        self.model = model.eval().to(self.device)
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        context = getattr(model.config, "max_position_embeddings", None) or max_tokens
        self.tokens = min(max_tokens, context)

    def __call__(self, texts: list[str]) -> Any:
        """Return [texts, H] float32 of length 1; a text without tokens gets zeros."""
        import torch

        rows = self.tokenizer(texts, truncation=True, max_length=self.tokens)["input_ids"]
        longest = max(map(len, rows), default=0) or 1
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=self.device)
        with torch.inference_mode():
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state  # [texts, tokens, H]
            weights = mask.unsqueeze(-1)
            mean = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
            return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()


def _embedding_size(folder: Path) -> int:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config.get_text_config().hidden_size
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{KEY}.path={folder}: its config.json is of no model that transformers knows ({type(error).__name__}); "
            f"take an encoder or a chat model"
        ) from None


def _require_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"{KEY}.device={device}: PyTorch sees no GPU here; set cpu, or auto")


def user_text(record: dict) -> str:
    """Return what the user says in a prompt of the spool."""
    return "\n".join(turn["content"] for turn in record["messages"] if turn["role"] == "user")


def members_of(groups: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the places of each group's members, in rising order."""
    order = np.argsort(groups, kind="stable")
    bounds = np.flatnonzero(np.diff(groups[order])) + 1
    yield from np.split(order, bounds)


def parts(places: np.ndarray, *, at_least: int) -> list[np.ndarray]:
    """Cut into parts of about READ; k-means must see as many as it has centres at once."""
    return np.array_split(places, max(len(places) // max(READ, at_least), 1))
