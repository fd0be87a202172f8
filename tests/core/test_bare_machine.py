"""A machine with no compiler on PATH and an empty home runs from a precompiled folder, and compiles nothing."""

import os
import subprocess
import sys

import pytest
import torch

from flashinfer._core.target import target_of

pytestmark = pytest.mark.gpu

PROGRAM = """
import torch, flashinfer
x = torch.randn(4, 8, 128, dtype=torch.bfloat16, device="cuda")
kv = torch.randn(9, 2, 16, 2, 128, dtype=torch.bfloat16, device="cuda")
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
indptr = torch.tensor([0, 3, 4, 4, 9], dtype=torch.int32)
last = torch.tensor([1, 16, 0, 5], dtype=torch.int32)
wrapper.plan(indptr, torch.arange(9, dtype=torch.int32), last, 8, 2, 128, 16, q_data_type=torch.bfloat16)
out = wrapper.run(x, kv)
ref = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(0, dtype=torch.uint8))
ref.plan(indptr, torch.arange(9, dtype=torch.int32), last, 8, 2, 128, 16, q_data_type=torch.bfloat16)
torch.testing.assert_close(out.cpu(), ref.run(x.cpu(), kv.cpu()), atol=2e-2, rtol=2e-2)
y = flashinfer.rmsnorm(x.view(32, 128), torch.ones(128, dtype=torch.bfloat16, device="cuda"))
z = flashinfer.silu_and_mul(y)
torch.cuda.synchronize()
assert out.isfinite().all() and z.isfinite().all()
import shutil
print("ran", shutil.which("gcc"), shutil.which("nvcc"))
"""


def run(command, **variables):
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHINFER_PRECOMPILED_DIR")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | variables
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_runs_from_a_precompiled_folder(tmp_path):
    arch = target_of(torch.device("cuda")).arch
    met, kernels, home, empty = (tmp_path / name for name in ("met", "kernels", "home", "empty"))
    for folder in (met, home, empty):
        folder.mkdir()
    run(["-c", PROGRAM], FLASHINFER_WORKSPACE_BASE=str(met))
    compile_ahead = ["-m", "flashinfer", "precompile", "--arch", arch, "--from-cache", str(met), "--out", str(kernels)]
    run(compile_ahead)
    home.chmod(0o555)
    bare = dict(PATH=str(empty), HOME=str(home), TRITON_HOME=str(home), FLASHINFER_FROZEN="1", CC="", CUDA_HOME="")
    done = run(["-c", PROGRAM], FLASHINFER_PRECOMPILED_DIR=str(kernels), **bare)
    assert "ran None None" in done.stdout
    # The folder is what made it run: without it, frozen mode refuses.
    with pytest.raises(AssertionError, match="FrozenError"):
        run(["-c", PROGRAM], **bare)
    # The CUDA driver keeps a folder of its own in a home it can write.
    assert not [path for path in home.iterdir() if path.name != ".nv"]
