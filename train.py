"""Train a draft head on a feature store.

python train.py data.path=DIR/features                                     # minutes on a laptop for a small target
python train.py experiment=target_8b data.path=DIR/features                # a target of 7 to 9 B, on all GPUs
python train.py data.path=DIR/features hydra.run.dir=RUN ckpt_path=auto    # resume
python train.py data.path=DIR/features init_from=HEAD                      # start from an exported head, on new traffic
python train.py data=live data.path=DIR/answers target.path=TARGET         # features are made meanwhile, not stored
python train.py 'data.path=[A/features,B/features]'                        # several stores of one target
python train.py 'data.path=[A/features,B/features]' 'data.weights=[1,0.3]'        # 30 % of B in each epoch
python train.py -m data.path=DIR/features optim.lr=1e-3,3e-3 loss.decay=0.6,0.8                 # sweep
"""

from eagle3 import interrupts

if __name__ == "__main__":  # before the imports below, which take a while
    interrupts.end_at_once()

import hydra
from omegaconf import DictConfig

from eagle3 import cli
from eagle3.settings.check import check_settings


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
@cli.report_errors
def main(config: DictConfig) -> float:
    run = check_settings(config, "train")
    from eagle3.commands.train import train  # seconds of PyTorch and Lightning: --help, Tab and slips do without

    interrupts.raise_interrupts()
    return train(run)


if __name__ == "__main__":
    cli.start(main)
