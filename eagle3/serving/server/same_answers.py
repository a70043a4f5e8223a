"""Whether a server with a head gives the plain server's answers: drafts may change when tokens come, never which.

In bf16 they do now and then: a batch of another shape is computed by other kernels, and near-ties flip. How often shows
where the plain server answers a prompt again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eagle3.serving.server.load import Agreement, LoadResult


@dataclass(frozen=True)
class PlainAnswers:
    """The plain server's first answer to each prompt, in memory alone: it is somebody's text."""

    sampling: Mapping[str, Any]
    first: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    def compared(self, result: LoadResult, prompts: Sequence[list[int]], *, plain: bool) -> LoadResult:
        """Add how many of its complete answers are, token for token, the known ones. `plain` says that they are that
        server's, and become known. Sampled answers may differ, and are not compared."""
        if self.sampling["temperature"] != 0:
            return result
        same = compared = 0
        for prompt, answer in zip(prompts, result.answers, strict=True):
            if answer.error is not None:
                continue
            known = self.first.get(tuple(prompt))
            if known is not None:
                compared, same = compared + 1, same + (answer.output_ids == known)
            elif plain:
                self.first[tuple(prompt)] = answer.output_ids
        return replace(result, agreement=Agreement(same, compared))
