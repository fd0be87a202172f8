"""Dumped calls by the names of upstream's replay."""

import json
import os

import pytest
import torch

from flashinfer import api_logging
from flashinfer._core import call_dump


def dumped(root, monkeypatch, result):
    monkeypatch.setenv("FLASHINFER_DUMP_DIR", str(root))
    given = {"input": torch.tensor([[0.5, -1.0, 2.0, 3.0]] * 4).half()}
    dump = call_dump.Dumps().begin("silu_and_mul", "flashinfer.activation:silu_and_mul", given, None)
    dump.end(result)
    return dump.folder, given["input"]


def test_replay(tmp_path, monkeypatch):
    gate, up = torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([2.0, 3.0], dtype=torch.float64)
    expected = (gate * gate.sigmoid() * up).half().expand(4, 2).contiguous()
    folder, x = dumped(tmp_path, monkeypatch, expected)
    found = api_logging.replay_from_dump(folder, device="cpu")
    assert found["args"] == [] and torch.equal(found["kwargs"]["input"], x) and "execution_result" not in found
    assert found["metadata"]["function_name"] == "silu_and_mul"
    found = api_logging.replay_from_dump(folder, True, "cpu", True)
    assert found["comparison_match"] is True
    torch.testing.assert_close(found["execution_result"], expected)
    dumped(tmp_path, monkeypatch, expected + 1)
    results = api_logging.replay_sequence(tmp_path, "cpu")
    assert [each["comparison_match"] for each in results] == [True, False]
    (folder / "inputs.pt").unlink()
    assert "NotKept" in api_logging.replay_sequence(tmp_path, "cpu")[0]["error"]
    with pytest.raises(FileNotFoundError):
        api_logging.replay_sequence(tmp_path / "none", "cpu")


def test_a_session_is_scanned_by_one_file(tmp_path, monkeypatch):
    """The keys that upstream's page on logging reads."""
    folder, x = dumped(tmp_path, monkeypatch, torch.ones(4, 2).half())
    again, _ = dumped(tmp_path, monkeypatch, torch.ones(4, 2).half())
    lines = [json.loads(line) for line in (tmp_path / "session.jsonl").read_text().splitlines()]
    states = [(line["function_name"], line["dump_dir"], line["execution_status"]) for line in lines]
    expected = [(str(path), state) for path in (folder, again) for state in ("inputs_saved", "completed")]
    assert states == [("silu_and_mul", *each) for each in expected]
    alone = [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]
    assert alone == lines[:2]
    assert lines[0]["module"] == "flashinfer.activation" and lines[0]["process_id"] == os.getpid()
    assert lines[0]["tensor_info"] == {"input_tensor_keys": ["input"], "output_tensor_keys": []}
    assert lines[1]["tensor_info"] == {"input_tensor_keys": ["input"], "output_tensor_keys": ["result"]}
    assert torch.equal(torch.load(folder / "inputs.pt")["input"], x)
