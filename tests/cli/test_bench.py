"""`flashinfer bench attention` on a CPU, with this package in the place of the peer that shares its name."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashinfer.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(tmp_path):
    def run(*words):
        given = ["bench", "attention", "--device", "cpu", "--out", str(tmp_path), "--json", *words]
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 0, done.output
        (kept,) = tmp_path.glob("*.json")
        assert json.loads(kept.read_text()) == json.loads(done.stdout)
        return {row["name"]: row for row in json.loads(done.stdout)["cases"]}

    return run


def test_rows_stand_beside_the_peer_of_another_process(bench):
    rows = bench("--match", "decode", "--peer", str(ROOT))
    row = rows["paged decode 4x100, page 16"]
    assert row["us"] > 0 and row["group"] == "decode"
    assert row["peers"]["flashinfer/fa2"]["ratio"] == pytest.approx(row["peers"]["flashinfer/fa2"]["us"] / row["us"])
    assert row["peers"]["flashinfer/fa3"]["error"].startswith("UnsupportedConfig")
    assert [target["text"] for target in row["targets"]] == [">= 0.96 x copy"]
    cold, warm = (rows[f"first decode, {cache} cache"] for cache in ("cold", "warm"))
    assert cold["us"] > 0 and warm["us"] > 0 and warm["peers"]["flashinfer/auto"]["us"] > 0


def test_without_the_peer_a_row_says_so(bench):
    (row,) = bench("--match", "ragged prefill 2x64, causal").values()
    assert row["peers"]["flashinfer"] == {"error": "not installed"}
    assert row["peers"]["flash/gqa"]["us"] > 0 and row["us"] > 0


def test_a_room_without_such_a_peer_refuses_it(tmp_path):
    words = ["bench", "norm", "--device", "cpu", "--out", str(tmp_path), "--peer", str(ROOT), "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1 and "--peer" in json.loads(done.stdout)["error"]
