"""Probes, fine-tuning and variant scoring: uses of a trained model."""
