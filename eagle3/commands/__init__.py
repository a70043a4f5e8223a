"""What the commands train and serve do once their config holds; only then are PyTorch and Lightning imported."""
