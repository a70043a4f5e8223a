"""A target and its head made larger that compute what they did: a served model's cost with a small model's answers.

    python benchmarks/enlarge.py TARGET HEAD OUT --times 16 --intermediate 16384 --layers 20    # OUT/target, OUT/head

Heads are judged by what they do to a server, and a server of a model of 24 M weights waits for its scheduler. With the
sizes above that model has 8.1 B weights, its head 0.6 B, and both compute what they did, up to rounding.

The hidden state gets zeros behind its own numbers. What reads those zeros, and what nobody reads, are random weights,
so that they cost what trained ones cost; what writes hidden states has zeros. A norm over `times` as many channels
divides by sqrt(times) less: where `times` is a power of 4, its weights are scaled without rounding.
"""

import argparse
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3.errors import InputError
from eagle3.storage.files import write_json

WRITES_HIDDEN = ("embed_tokens", "o_proj", "down_proj", "fc")
OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
STD = 0.02  # of random weights, as models are initialised


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="a Llama")
    parser.add_argument("head", type=Path, help="its exported head")
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, required=True, help="hidden size and heads over those now; a power of 4")
    parser.add_argument("--intermediate", type=int, required=True, help="intermediate size of both")
    parser.add_argument("--layers", type=int, required=True, help="of the target; those behind its own change nothing")
    options = parser.parse_args(arguments)
    if options.times < 1 or math.log2(options.times) % 2:
        raise InputError(f"--times={options.times} is no power of 4, without which norms would be rounded; try 4 or 16")
    if options.out.exists() and any(options.out.iterdir()):
        raise InputError(f"{options.out} is not empty; name a new folder")
    enlarge_target(options.target, options.out / "target", options.times, options.intermediate, options.layers)
    enlarge_head(options.head, options.out / "head", options.times, options.intermediate)


def enlarge_target(path: Path, out: Path, times: int, intermediate: int, num_layers: int) -> None:
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] != "llama":
        raise InputError(f"{path} is a {config['model_type']}; this script knows llama alone")
    if num_layers < config["num_hidden_layers"]:
        raise InputError(f"--layers={num_layers} is less than the {config['num_hidden_layers']} of {path}")
    tensors = load_file(path / "model.safetensors")
    enlarge = Enlarged(config, times, intermediate)
    larger = {name: enlarge(name, tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if (of_layer := OF_LAYER.match(name)) and of_layer[1] == "0":
            for layer in range(config["num_hidden_layers"], num_layers):
                larger[f"model.layers.{layer}.{of_layer[2]}"] = enlarge(name, tensor[:0] if tensor.ndim > 1 else tensor)
    out.mkdir(parents=True)
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    _save(out, larger, config | enlarge.sizes | {"num_hidden_layers": num_layers})


def enlarge_head(path: Path, out: Path, times: int, intermediate: int) -> None:
    config = json.loads((path / "config.json").read_text())
    enlarge = Enlarged(config, times, intermediate)
    out.mkdir(parents=True)
    larger = {name: enlarge(name, tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    _save(out, larger, config | enlarge.sizes)


class Enlarged:
    def __init__(self, config: dict[str, Any], times: int, intermediate: int) -> None:
        if intermediate < config["intermediate_size"]:
            raise InputError(f"--intermediate={intermediate} is less than the {config['intermediate_size']} there are")
        self.hidden, self.times = config["hidden_size"], times
        self.sizes = {
            "hidden_size": self.hidden * times,
            "intermediate_size": intermediate,
            "num_attention_heads": config["num_attention_heads"] * times,
            "num_key_value_heads": config["num_key_value_heads"] * times,
            "rms_norm_eps": config["rms_norm_eps"] / times,
        }
        head_dim = config["head_dim"]
        query, key_value = (self.sizes[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
        hidden = self.sizes["hidden_size"]
        self.shapes = {  # outputs and inputs; None: as they are
            "embed_tokens": (None, hidden),
            "lm_head": (None, hidden),
            "q_proj": (query, hidden),
            "k_proj": (key_value, hidden),
            "v_proj": (key_value, hidden),
            "o_proj": (hidden, query),
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
            "fc": (hidden, hidden),
        }

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """`tensor` in the corner of a larger one; that of a layer that does not exist has no rows."""
        kind = name.removesuffix(".weight").rpartition(".")[2]
        if tensor.ndim == 1 and tensor.is_floating_point():  # a norm, of hidden states or of one captured layer
            return torch.cat([tensor / self.times**0.5, tensor.new_ones(self.hidden * (self.times - 1))])
        if kind not in self.shapes:  # d2t, t2d
            return tensor
        # Captured layers, or embeddings and hidden states, side by side: each has zeros behind its own.
        return torch.cat([self._matrix(kind, part) for part in tensor.split(self._input_of(kind, tensor), 1)], 1)

    def _input_of(self, kind: str, tensor: Tensor) -> int:
        return tensor.shape[1] if kind in ("o_proj", "down_proj") else self.hidden

    def _matrix(self, kind: str, tensor: Tensor) -> Tensor:
        rows, columns = self.shapes[kind]
        shape = (len(tensor) if rows is None else rows, columns)
        if kind in WRITES_HIDDEN:
            larger = tensor.new_zeros(shape)
        else:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            larger = (torch.randn(shape, device=device, dtype=tensor.dtype) * STD).cpu()
        larger[: len(tensor), : tensor.shape[1]] = tensor
        return larger


def _save(out: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    write_json(out / "config.json", config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    print(f"{sum(tensor.numel() for tensor in tensors.values()) / 1e6:,.1f} M weights in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
