"""Which of SGLang's model classes it can capture EAGLE-3's hidden states from, by list and by SGLang's source."""

import ast
from pathlib import Path

SGLANG = "0.5.17"
CAPTURES = "set_eagle3_layers_to_capture"  # the method that SGLang calls on the target's model
# The classes that a checkpoint can name (EntryClass in sglang/srt/models, 241) and that define or inherit
# set_eagle3_layers_to_capture (62), less drafts and embedding models. Read from the source in that version's wheel; a
# class that hands all on to an inner one (Mistral3, MiniCPM-V) is not here, as their inner ones do not define it.
# Where a server is started, `captures` asks its own version.
# fmt: off
CAPTURED = frozenset({
    "ApertusForCausalLM", "BailingMoEForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM",
    "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "ExaoneMoEForCausalLM",
    "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM", "GptOssForCausalLM", "IQuestCoderForCausalLM", "InternLM3ForCausalLM",
    "InternS1ProForConditionalGeneration", "InternS2PreviewForConditionalGeneration",
    "KimiK25ForConditionalGeneration", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM",
    "LongcatFlashForCausalLM", "MellumForCausalLM", "MindSporeForCausalLM", "MiniMaxM2ForCausalLM",
    "MiniMaxM3SparseForCausalLM", "Ministral3ForCausalLM", "MistralForCausalLM", "MistralLarge3ForCausalLM",
    "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
    "SarvamMoEForCausalLM", "TeleFLMForCausalLM",
})
# fmt: on


def capture_obstacle(architecture: str | None) -> str | None:
    """Say why SGLang serves no EAGLE-3 head for a target of this class; None if it does."""
    if architecture in CAPTURED:
        return None
    return (
        f"SGLang {SGLANG} cannot capture hidden states from {architecture or 'a target that names no architecture'}, "
        f"so it serves no EAGLE-3 head for it; take another target, or continue if another version or server does"
    )


def captures(models: Path, architecture: str | None) -> bool | None:
    """Say whether the class or one that it inherits from defines the capture; None where that cannot be told.

    Read, not imported: SGLang's models import CUDA kernels."""
    classes: dict[str, tuple[list[str], bool]] = {}  # name → its bases, whether it defines or delegates the capture
    for path in models.glob("*.py"):
        try:
            module = ast.parse(path.read_bytes())
        except SyntaxError:  # of a newer Python than ours
            return None
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                bases = [ast.unparse(base).split(".")[-1] for base in node.bases]
                classes[node.name] = bases, not methods.isdisjoint((CAPTURES, "__getattr__"))

    def inherits(name: str) -> bool:
        bases, defined = classes.get(name, ([], False))
        return defined or any(inherits(base) for base in bases if base != name)

    return inherits(architecture) if architecture in classes else None
