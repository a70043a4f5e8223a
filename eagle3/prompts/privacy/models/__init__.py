"""Models that see what no pattern can tell."""

from eagle3.prompts.privacy.models.classifiers import HuggingFaceModel, OnnxModel
from eagle3.prompts.privacy.models.gliner import GlinerModel
from eagle3.prompts.privacy.models.names import MODEL_ENTITIES, NameModel
from eagle3.prompts.privacy.models.pipelines import PresidioModel, SpacyModel

__all__ = ["MODEL_ENTITIES", "GlinerModel", "HuggingFaceModel", "NameModel", "OnnxModel", "PresidioModel", "SpacyModel"]
