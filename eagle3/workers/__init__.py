"""Runs the work of a stage: in this process, or on the nodes of a Ray cluster."""
