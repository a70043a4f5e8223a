"""The LightningModule and all that a training run needs around it."""
