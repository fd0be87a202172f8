"""Matrix products: `dense` with one scale for a tensor, `blockscaled` with one for a block, `grouped` by segments."""
