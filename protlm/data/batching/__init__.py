"""The order of sequences in an epoch, and their assignment to batches."""
