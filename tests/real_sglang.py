"""Runs SGLang 0.5.23's own Llama on the CPU with our hook; tests/engine/test_real_sglang.py starts it.

    python tests/real_sglang.py TARGET FOLDER     # FOLDER gets the hook's file

SGLang parses our flags, builds and loads its model, registers the hook and runs a prefill; only the attention kernel is
replaced by PyTorch's. Packages that SGLang imports and this does not use are stand-ins.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "eagle3/engine/hooks")]
transformers.utils.is_torchvision_available()  # False from now on, also once the stand-in is there
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional", "vllm", "vllm._custom_ops"):
    sys.modules[name] = MagicMock(__spec__=None, __path__=[])

from sglang.srt import server_args  # noqa: E402

from eagle3.engine.versions import capture_flags  # noqa: E402

LENGTHS, LAYERS = [5, 9], [2, 4, 5]


class Attention:
    def forward(self, q: Any, k: Any, v: Any, layer: Any, batch: Any, save_kv_cache: bool = True) -> Any:
        parts = [each.view(len(q), -1, layer.head_dim).transpose(0, 1).split(LENGTHS, 1) for each in (q, k, v)]
        outputs = [
            torch.nn.functional.scaled_dot_product_attention(*three, is_causal=True, enable_gqa=True)
            for three in zip(*parts, strict=True)
        ]
        return torch.cat([each.transpose(0, 1).flatten(1) for each in outputs])


def main(target: str, folder: Path) -> None:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.model_executor.hook_manager import register_forward_hooks
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup, spec_aux_hidden_state
    from sglang.srt.models.llama import LlamaForCausalLM
    from sglang.srt.runtime_context import SpawnRanks, get_observability, get_spec, publish
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    sizes: dict[str, Any] = {"dtype": "float32", "batch_tokens": 64, "most_bytes": 1 << 30}
    words = ["--model-path", target, "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32"]
    for flag, value in capture_flags("0.5.23", LAYERS, folder, **sizes).items():
        words += [f"--{flag}", *([] if value is True else map(str, value if isinstance(value, list) else [value]))]
    arguments = server_args.prepare_server_args(words)
    publish(arguments, role="test", ranks=SpawnRanks(world_rank=0))
    (folder / "0").mkdir()  # of the client
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    meeting = f"file://{folder}/meeting"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=meeting)
    initialize_model_parallel(backend="gloo")
    config = ModelConfig.from_server_args(arguments)
    model = LlamaForCausalLM(config.hf_config)
    model.load_weights((name, each.float()) for name, each in load_file(f"{target}/model.safetensors").items())
    capture = spec_aux_hidden_state.resolve_spec_aux_hidden_state_config(
        server_args=arguments,
        model_config=config,
        spec_algorithm=SpeculativeAlgorithm.from_string(get_spec().speculative_algorithm),
        is_draft_worker=False,
    )
    attention_backend_setup.configure_aux_hidden_state_capture(
        model=model,
        eagle_use_aux_hidden_state=capture.eagle_use_aux_hidden_state,
        eagle_aux_hidden_state_layer_ids=capture.eagle_aux_hidden_state_layer_ids,
        dflash_use_aux_hidden_state=False,
        dflash_target_layer_ids=None,
        is_dspark=False,
    )
    register_forward_hooks(model, get_observability().forward_hooks)
    rows = sum(LENGTHS)
    ids = torch.arange(100, 100 + rows)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=2, input_ids=ids, req_pool_indices=torch.arange(2),
        seq_lens=torch.tensor(LENGTHS), out_cache_loc=torch.arange(rows), seq_lens_sum=rows, positions=positions,
        rids=["theirs", f"eagle3:0.0:3-{LENGTHS[1]}"], extend_seq_lens=torch.tensor(LENGTHS),
        extend_prefix_lens=torch.zeros(2, dtype=torch.long), extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens_cpu=[0, 0], extend_num_tokens=rows, capture_hidden_mode=CaptureHiddenMode.NULL,
    )  # fmt: skip
    with torch.no_grad(), forward_context(ForwardContext(attn_backend=Attention())):
        model(ids, positions, batch)
    while not any(folder.glob("0/*.safetensors")) and not (folder / "failed.txt").exists():
        time.sleep(0.1)
    print(json.dumps({"input_ids": ids[LENGTHS[0] :].tolist(), "layers": LAYERS}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
