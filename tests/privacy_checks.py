"""The privacy check as the config builds it."""

from omegaconf import OmegaConf
from scripts import composed
from stores import CONF

from eagle3.prompts import Prompt
from eagle3.prompts.privacy import Privacy
from eagle3.settings.parts import Part
from eagle3.settings.types import validated


def build_privacy(*overrides: str, policy: str = "patterns") -> Privacy:
    config = composed(None, f"+privacy={policy}", *overrides, conf=CONF / "prompts")
    return validated(Part, OmegaConf.to_container(config.privacy)).build()


def prompt(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> Prompt:
    messages = [{"role": roles[index % len(roles)], "content": content} for index, content in enumerate(contents)]
    return Prompt(id="1", source="s", license="MIT", messages=messages)


def contents(changed: Prompt | None) -> list[str]:
    assert changed is not None
    return [message["content"] for message in changed.messages]
