"""Linear attention with feature maps, for the Performers and RFA."""
