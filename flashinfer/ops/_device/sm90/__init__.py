"""What Hopper's kernels are made of: rings, published slots, walks over work, sums on wgmma, block scales, stores."""
