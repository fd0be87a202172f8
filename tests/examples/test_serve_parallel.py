"""The engine over ranks: the tokens of one rank's model, on every rank."""

import pytest
import torch

from examples.serve.parallel import shard
from tests.examples.test_serve import CONFIG, random_weights
from tests.ops.comm import processes


@pytest.mark.matrix
def test_two_ranks_and_one_have_the_same_tokens(tmp_path):
    said = processes.run(2, "tests.examples.split_ranks:serve", tmp_path)
    assert said[0] == said[1] and said[0]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shares_add_up(ranks):
    layer = random_weights()["layers"][0]
    shares = [shard(CONFIG, random_weights(), rank, ranks) for rank in range(ranks)]
    x = torch.randn(3, layer["ffn_down"].shape[1], dtype=torch.float64)
    parts = x.chunk(ranks, 1)
    down = [share["layers"][0]["ffn_down"].double() for _, share in shares]
    total = sum(part @ weight.T for part, weight in zip(parts, down, strict=True))
    torch.testing.assert_close(total, x @ layer["ffn_down"].double().T)
    heads = {share.num_qo_heads for share, _ in shares}
    assert heads == {CONFIG.num_qo_heads // ranks} and all(c.num_kv_heads == max(2 // ranks, 1) for c, _ in shares)
    with pytest.raises(ValueError, match="ranks: got 3"):
        shard(CONFIG, random_weights(), 0, 3)
