"""The path by which callers of upstream reach helpers of its kernels in CuTe DSL; the kernels here are Triton's."""
