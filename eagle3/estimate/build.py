"""From a config to the estimate of a run."""

from pathlib import Path

from omegaconf import DictConfig

from eagle3 import cli
from eagle3.answers.chat import Chat
from eagle3.estimate.hours import Rates
from eagle3.estimate.stage import estimate, rows_of_prompts
from eagle3.target.capture import default_capture_layers
from eagle3.target.stored import stored_target


def estimate_run(config: DictConfig) -> None:
    """Say what the stages will make of the prompts, and what it will take."""
    target = stored_target(**cli.plain(config.target))
    chat = Chat(target.tokenizer, stop_ids=target.stop_ids, **cli.plain(config.chat))
    settings, responses, features = (cli.plain(config[key]) for key in ("estimate", "responses", "features"))
    imported = cli.build(config.answers, leave_out=["name"]) if config.answers.name == "imported" else None
    rows_of, answers = rows_of_prompts(
        chat, target.text_config, responses, imported=imported, mean=settings.pop("answer_tokens")
    )
    estimate(
        files=target.files,
        rows_of=rows_of,
        answers=answers,
        out_dir=Path(config.out_dir),
        layers=len(features["capture_layers"] or default_capture_layers(target.text_config.num_hidden_layers)),
        features={key: features[key] for key in ("max_length", "too_long", "teachers", "shard_mb")},
        answered_by=None if imported else "huggingface" if config.answers.name == "huggingface" else "sglang",
        extracted_by="sglang" if features["engine"] else "huggingface",
        rates=Rates(**settings.pop("rates")),
        **settings,
    )
