"""The example of a mixture of experts runs, and computes what Hugging Face's block does."""

import torch

from examples.moe import __main__ as moe

SIZES = ["--hidden", "64", "--intermediate", "96", "--experts", "4"]


def test_runs(capsys, device):
    # bfloat16 between the products and at the end, against float32.
    assert moe.main(["--tokens", "1", "40", "--device", device.type, *SIZES]) < 1e-2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "40"]


def test_the_references_agree(device):
    layer = moe.Layer.random(64, 96, 4, 2, device)
    x = torch.randn(9, 64, device=device).bfloat16()
    torch.testing.assert_close(moe.by_torch(layer, x), moe.by_hugging_face(layer, x))


def test_the_order_of_the_halves_matters(device):
    layer = moe.Layer.random(64, 96, 4, 2, device)
    x = torch.randn(9, 64, device=device).bfloat16()
    expected = moe.by_torch(layer, x)
    errors = [float((moe.run(layer, w, x).float() - expected).norm() / expected.norm())
              for w in (moe.prepared(layer), layer.gate_up)]  # fmt: skip
    assert errors[0] < 1e-2 < 1e-1 < errors[1]
