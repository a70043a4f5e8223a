"""Who does the work of a stage: this process, processes beside it, or the nodes of a Ray cluster."""
