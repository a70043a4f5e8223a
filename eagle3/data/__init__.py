"""Feature stores to packs on the training device."""
