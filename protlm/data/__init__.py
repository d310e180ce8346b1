"""From records of UniProt to batches of tokens."""
