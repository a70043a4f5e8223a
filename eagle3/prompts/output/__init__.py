"""The output of the stage: prompts, rejected rows, the ledger, the report."""
