"""The example of a sparse layer runs, and its attention is that of the plain layer, keys chosen and all."""

from dataclasses import replace

import torch

from examples.sparse_layer import __main__ as example

CPU, HALF = torch.device("cpu"), torch.float16


def test_runs(capsys):
    torch.manual_seed(0)
    assert example.main(["--prompts", "40", "3", "17", "--steps", "1", "3", "1", "--device", "cpu"]) < 5e-3
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["prefill", "decode", "verify 3", "decode"]


def test_the_choice_matters(monkeypatch):
    """Another number of keys in one of the two is seen in the output."""
    torch.manual_seed(0)
    plain = example.plain

    def other(layer, x):
        sizes, layer.sizes = layer.sizes, replace(layer.sizes, top_k=layer.sizes.top_k + 1)
        try:
            return plain(layer, x)
        finally:
            layer.sizes = sizes

    monkeypatch.setattr(example, "plain", other)
    errors = [error for _, error in example.run([40, 17], [1], CPU, HALF)]
    assert min(errors) > 1e-2


def test_short_requests_see_all_their_keys():
    torch.manual_seed(0)
    assert max(error for _, error in example.run([1, 2], [1, 2], CPU, HALF, example.Sizes(top_k=64))) < 5e-3


def test_on_a_device(device):
    torch.manual_seed(0)
    assert max(error for _, error in example.run([40, 3], [1, 2], device, HALF)) < 5e-3
