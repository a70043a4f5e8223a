"""The traffic mix: how many prompts of each kind to keep so that they match production traffic."""
