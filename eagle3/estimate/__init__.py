"""What a run will hold and cost, before it: from a sample of its prompts and the target's files alone."""
