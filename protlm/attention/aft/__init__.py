"""The common parts of the attention-free transformers: sums, windows, biases, decoding."""
