"""What the hook writes in SGLang 0.5.23's own model is what Hugging Face computes. Needs an interpreter with SGLang:

    pip install --no-deps sglang==0.5.23 orjson ipython traitlets gguf pybase64 msgspec apache-tvm-ffi sentencepiece \
        compressed-tensors loguru openai partial-json-parser einops         # on top of this project's environment
    SGLANG_PYTHON=/that/bin/python python -m pytest -m slow tests/engine/test_real_sglang.py
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PYTHON = os.environ.get("SGLANG_PYTHON")


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="SGLANG_PYTHON names no interpreter with SGLang 0.5.23 (see the file's top)")
def test_the_hook_in_sglangs_own_llama_writes_hugging_faces_states(target, tiny_path, tmp_path):
    script = Path(__file__).parents[1] / "real_sglang.py"
    ran = subprocess.run(
        [str(PYTHON), str(script), str(tiny_path), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    [file] = tmp_path.glob("0/*.safetensors")
    captured = load_file(file)
    with torch.no_grad():
        output = target.model(input_ids=torch.tensor([told["input_ids"]]), output_hidden_states=True)
    expected = torch.cat([output.hidden_states[layer][0] for layer in told["layers"]], dim=-1)
    torch.testing.assert_close(captured["aux"], expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(captured["last"], output.hidden_states[-1][0, 3:], rtol=1e-4, atol=1e-3)
    assert captured["teacher_argmax"].tolist() == output.logits[0, 3:].argmax(-1).tolist() and captured["finite"]
