r"""Raw conversations → clean prompts → the target's answers → feature shards, in DIR/prompts, /answers, /features.

python precompute.py target.path=TARGET prompts.path=FILE.jsonl out_dir=DIR prompts=in_house       # on a laptop
python precompute.py target=llama31_8b prompts.path=FILE.jsonl out_dir=DIR prompts.license=MIT \
    prompts/privacy/model=onnx prompts.privacy.model.path=FOLDER                     # one GPU; also filters names
python precompute.py target.path=TARGET out_dir=DIR 'stages=[features]'              # only this stage
python precompute.py target=llama31_8b out_dir=DIR 'stages=[estimate]'              # estimate tokens, bytes, GPU-hours
"""

from eagle3 import interrupts

if __name__ == "__main__":  # before the imports below, which take a while
    interrupts.end_at_once()

import hydra
from omegaconf import DictConfig

from eagle3 import cli
from eagle3.settings.check import check_settings


@hydra.main(version_base="1.3", config_path="conf", config_name="precompute")
@cli.report_errors
def main(config: DictConfig) -> None:
    run = check_settings(config, "precompute")
    from eagle3.commands.precompute import precompute  # each stage imports what it needs

    precompute(run)


if __name__ == "__main__":
    cli.start(main)
