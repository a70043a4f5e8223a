"""The target's features: extracted once, stored as shards, read back as packed batches."""
