"""Checkpoints: format, descriptions, checksums, shards, and the best ones of a run."""
