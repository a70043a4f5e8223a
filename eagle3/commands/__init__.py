"""Run the three scripts' valid configs; PyTorch and Lightning are imported only then."""
