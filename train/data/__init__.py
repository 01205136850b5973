"""Text to token shards, shards to batches, and baselines for a model's loss."""
