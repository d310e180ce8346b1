"""Sparse features of hidden states: how they are learned, named, and what they cost."""
