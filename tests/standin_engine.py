"""Stands where SGLang's scheduler would: the bundled target behind modules that are called as SGLang calls its own,
with the hooks that the flag asks for. It shows nothing about SGLang itself.

Shapes: N rows of a forward batch, H hidden size, V vocabulary.
"""

import fnmatch
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from eagle3.target.model import Target

FOREIGN = 3  # rows of another request in every batch


class Layer(nn.Module):
    """Returns what was computed for it, as (hidden, residual) or, odd ones, as one tensor."""

    def forward(self, positions: Tensor, hidden: Tensor, batch: Any, residual: Tensor) -> Any:
        return (hidden, residual) if len(positions) % 2 else hidden + residual


class LogitsProcessor(nn.Module):
    def forward(self, input_ids: Tensor, hidden_states: Tensor, lm_head: nn.Module, batch: Any) -> Tensor:
        return nn.functional.linear(hidden_states[-1:], lm_head.weight)  # type: ignore[arg-type]


class Decoder(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))


class Wrapper(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.vision = nn.ModuleList(nn.Identity() for _ in range(num_layers))
        self.language_model = Decoder(num_layers)
        self.logits_processor = LogitsProcessor()


class StandInEngine:
    """Runs prompts in chunks of `chunk` tokens. `shift` is a fault: hooks get the states of another layer."""

    def __init__(self, target: Target, hooks: list[dict[str, Any]], chunk: int, *, shift: int = 0) -> None:
        self.target, self.chunk, self.shift = target, chunk, shift
        self.head = SimpleNamespace(weight=target.lm_head)
        self.model = Wrapper(len(target.layers))
        for spec in hooks:
            module, _, factory = spec["hook_factory"].partition(":")
            hook = getattr(importlib.import_module(module), factory)(spec["config"])
            for name, part in self.model.named_modules():
                if any(fnmatch.fnmatch(name, pattern) for pattern in spec["target_modules"]):
                    part.register_forward_hook(hook)

    @torch.no_grad()
    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of one token, with the log-probabilities of its prompt if asked for."""
        ids = torch.tensor([body["input_ids"]])
        output = self.target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states, last = [state[0] for state in output.hidden_states], output.hidden_states[-1][0]
        for begin in range(0, len(last), self.chunk):
            end = min(begin + self.chunk, len(last))
            self._forward(body.get("rid", "theirs"), states, last, begin, end)
        stated = output.logits[0].float().log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
        pairs = zip([None, *stated], body["input_ids"], strict=True)
        logprobs = [[logprob, token, None] for logprob, token in pairs]
        return {
            "output_ids": [int(output.logits[0, -1].argmax())],
            "finish": "length",
            "spec": {"input_token_logprobs": logprobs} if body.get("return_logprob") else {},
        }

    def _forward(self, rid: str, states: list[Tensor], last: Tensor, begin: int, end: int) -> None:
        rows = end - begin
        foreign = torch.full((FOREIGN, last.shape[1]), 7.0)
        batch = SimpleNamespace(
            rids=["HEALTH_CHECK_1", rid],
            extend_seq_lens_cpu=[FOREIGN, rows],
            extend_prefix_lens_cpu=[0, begin],
            forward_mode=SimpleNamespace(is_extend=lambda: True),
        )
        positions = torch.arange(FOREIGN + rows)
        for number, layer in enumerate(self.model.language_model.layers):
            out = torch.cat([foreign, states[min(number + 1 + self.shift, len(states) - 2)][begin:end]])
            residual = torch.randn_like(out)
            layer(positions, out - residual, batch, residual)
        self.model.logits_processor(positions, torch.cat([foreign, last[begin:end]]), self.head, batch)
