"""A stand-in for SGLang's scheduler: the bundled target in modules that are called as SGLang calls its own, with the
hooks of --forward-hooks. It shows nothing about SGLang itself; tests/engine/test_real_sglang.py does.

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
    """Returns what was computed for it, as (hidden, residual) or, if the rows are even, as one tensor."""

    def forward(self, positions: Tensor, hidden: Tensor, batch: Any, residual: Tensor) -> Any:
        return (hidden, residual) if len(positions) % 2 else hidden + residual


class LogitsProcessor(nn.Module):
    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: nn.Module,
        logits_metadata: Any,
        aux_hidden_states: Tensor | list[Tensor] | None = None,
        hidden_states_before_norm: Tensor | None = None,
    ) -> Tensor:
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
    """Runs prompts in chunks of `chunk` tokens.

    `outputs` are the layers whose outputs go to the logits processor, None before SGLang 0.5.23."""

    def __init__(self, target: Target, hooks: list[dict[str, Any]], chunk: int, *, outputs: list[int] | None) -> None:
        self.target, self.chunk, self.outputs = target, chunk, outputs
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
            extend_seq_lens_cpu=[FOREIGN, rows, 1],  # the last is padding, which SGLang adds to some batches
            extend_prefix_lens_cpu=[0, begin, 0],
            forward_mode=SimpleNamespace(is_extend=lambda: True),
        )
        positions = torch.arange(FOREIGN + rows)
        after = [
            torch.cat([foreign, states[min(number + 1, len(states) - 2)][begin:end]])
            for number in range(len(self.model.language_model.layers))
        ]  # the residual stream after each layer
        arguments: list[Any] = [positions, torch.cat([foreign, last[begin:end]]), self.head, batch]
        if self.outputs is not None:
            aux = [after[layer] for layer in self.outputs]
            arguments.append(torch.cat(aux, dim=-1) if rows % 2 else aux)  # SGLang's models pass one or the other
        else:
            for layer, states_after in zip(self.model.language_model.layers, after, strict=True):
                residual = torch.randn_like(states_after)
                layer(positions, states_after - residual, batch, residual)
        self.model.logits_processor(*arguments)
