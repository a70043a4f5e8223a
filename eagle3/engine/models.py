"""Which of SGLang's model classes it can capture EAGLE-3's hidden states from, by its source."""

import ast
from pathlib import Path

CAPTURES = "set_eagle3_layers_to_capture"  # the method that SGLang calls on the target's model


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
