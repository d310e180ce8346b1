"""Sparse features of hidden states: how they are learned, what they cost, and what they are of."""
