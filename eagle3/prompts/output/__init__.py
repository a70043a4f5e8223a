"""What the stage writes: prompts, rejected rows, the ledger, the report with its picture."""
