"""What each rank of the split engine's test does."""

from examples.serve.parallel import serve_both
from tests.examples.test_serve import CONFIG, random_weights


def serve(rank, world, device):
    prompts = [[(7 * i + j * j) % 97 for j in range(3 + 11 * i)] for i in range(3)]
    found = serve_both(rank, world, CONFIG, random_weights(), prompts, 6, 16)
    if rank == 0:
        assert [len(text) for text in found["outputs"]["whole"]] == [6] * 3
        assert found["outputs"]["split"] == found["outputs"]["whole"]
    print(found["outputs"]["split"])
