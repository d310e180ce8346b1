"""Data: from UniProt records to batches of tokens."""
