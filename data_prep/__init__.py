"""Policy of data preparation: what is kept, what is which split, how shards are cut."""
