"""The page of `protlm inspect`: one HTML file with its data, its style and its scripts."""
