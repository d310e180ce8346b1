"""Checkpoints: format, descriptions, checks, and the best ones of a run."""
