"""What the three scripts do with a valid config; PyTorch and Lightning are imported only then."""
