"""Hopper's products of widened weights, in machine code: one is in flight while the next operand is widened."""

import re
import subprocess
import tempfile

# Element, factor and its width, tokens.
CASES = (("e2m1", "ue4m3", 16, 16), ("e2m1", "ue4m3", 16, 256), ("e2m1", "ue8m0", 32, 128),
         ("fp8e4nv", "ue8m0", 32, 64))  # fmt: skip


def machine_code():
    """{format, tokens: counts of wgmma, of waits, of waits that leave one product in flight, of bytes taken apart}."""
    from triton import knobs

    from flashinfer._core.compiler import compile_kernel
    from flashinfer.ops.gemm.blockscaled import Problem, config, sm90_widened

    what = "HGMMA", r"WARPGROUP\.DEPBAR", r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1", r"PRMT .*, 0x777[0-3],"
    found = {}
    for element, factor, width, tokens in CASES:
        layouts = dict(a_layout="128x4", b_layout="128x4")
        problem = Problem(element, element, factor, width, "bf16", tokens, **layouts)
        build = sm90_widened.build(problem, config.widened_tiles(problem)[-1])
        with tempfile.NamedTemporaryFile() as file:
            file.write(compile_kernel(build, "90a")[0])
            file.flush()
            command = [knobs.nvidia.nvdisasm.path, "-c", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found[element, factor, tokens] = tuple(len(re.findall(each, text)) for each in what)
    return found


def test_operands_are_widened_while_others_are_multiplied(in_triton):
    """A product of 64 of K is four wgmmas, and a wait after them is for the product before. ptxas may instead wait
    after each wgmma, or before it widens; and LLVM may take words of codes apart and put them together again."""
    for case, (products, waits, ahead, apart) in in_triton(machine_code).items():
        # Of each of two warpgroups, the last wait alone is for all products.
        assert products == 4 * (waits - 2) and ahead == waits - 2 >= 6 and not apart, (case, products, waits, apart)
