"""The transformer: blocks, positions, heads, and the files a model is kept in."""
