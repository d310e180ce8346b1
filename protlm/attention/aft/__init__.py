"""What the attention-free transformers share: sums of exponentials, windows, position biases."""
