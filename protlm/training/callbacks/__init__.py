"""Callbacks of the training loop: checkpoints, logs, averages, preemption, skipped steps."""
