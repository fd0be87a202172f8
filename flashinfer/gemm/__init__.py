"""Matrix products: dense, with scaled and block-scaled operands, and in groups."""
