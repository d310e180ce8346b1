"""Data preparation: selection, splits, duplicates, shards, and how a killed build resumes."""
