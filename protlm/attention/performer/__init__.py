"""What the Performers share: feature maps, projections, and linear attention over features."""
