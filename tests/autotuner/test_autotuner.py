"""The tuner on runners whose times are made up, and on ones that are measured."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashinfer
from flashinfer import autotune_cache, autotuner
from flashinfer._core import kernel_cache
from flashinfer.autotuner import (
    AutoTuner,
    ConstraintSpec,
    DynamicDim,
    DynamicTensorSpec,
    MeasurementPolicy,
    StaticDim,
    TunableRunner,
    TuningConfig,
    autotune,
    is_in_profile_measurement,
    measure,
)


def to_bucket(n):
    return max([b for b in (4, 8, 16) if b <= n], default=4)


CONFIG = TuningConfig(
    (DynamicTensorSpec((0,), (0,), (4, 8, 16), to_bucket),),
    (ConstraintSpec(1, 0, lambda shapes: shapes[0][0]),),
)


class Double(TunableRunner):
    """Doubles. Tactic 2 fails, tactic 3 computes something else; `milliseconds` says how long a tactic takes."""

    tactics = (0, 1, 2, 3, (4, 5))
    milliseconds = {-1: 9, 0: 5, 1: 3, 3: 0.1, (4, 5): 4}
    last = None

    def __init__(self):
        self.calls, self.seen = [], set()

    def get_valid_tactics(self, inputs, profile):
        return list(self.tactics)

    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs):
        self.calls.append((tuple(inputs[0].shape), tuple(inputs[1].shape), tactic))
        self.seen.update({inputs[0].max().item()} if tactic == 0 and len(inputs[0]) > 4 else ())
        Double.last = self.milliseconds.get(tactic)
        if tactic == 2:
            raise RuntimeError("no such tile")
        return inputs[0] * 2 + (1 if tactic == 3 else 0)


class Slower(Double):
    tactics = (7,)
    milliseconds = {-1: 20, 7: 3.5}


class Pairs(Double):
    tactics = ((4, 5),)


@pytest.fixture
def tuner(monkeypatch):
    """A new tuner for the process; a candidate takes what its runner says."""

    def made_up(call, timing, device):
        call()
        return Double.last

    monkeypatch.setattr(measure, "milliseconds", made_up)
    monkeypatch.setattr(AutoTuner, "_instance", None)
    monkeypatch.setattr(autotune_cache, "_open", False)
    return AutoTuner.get()


def inputs_of(rows):
    return [torch.randn(rows, 3), torch.randn(rows, 2), None, 5]


def choose(tuner, rows=5, runners=None, config=CONFIG, op="double"):
    runners = runners or [Double(), Slower()]
    runner, tactic = tuner.choose_one(op, runners, config, inputs_of(rows))
    return runners.index(runner), tactic


def test_the_fastest_right_candidate_is_chosen(tuner):
    assert choose(tuner) == (0, -1) and tuner.misses == 1
    runners = [Double(), Slower()]
    with autotune():
        assert tuner.is_tuning_mode
        assert choose(tuner, runners=runners) == (0, 1)
    assert not tuner.is_tuning_mode and tuner.failures == 2 * 3
    # All buckets are tuned, with inputs whose other dimensions follow.
    assert {call[:2] for call in runners[0].calls} == {((n, 3), (n, 2)) for n in (4, 8, 16)}
    runners = [Double(), Slower()]
    assert [choose(tuner, rows, runners) for rows in (1, 4, 7, 9, 1000)] == [(0, 1)] * 5
    assert not runners[0].calls and tuner.hits == 6
    assert choose(tuner, runners=[Slower()]) == (0, -1)


def test_a_choice_of_another_runner(tuner, monkeypatch):
    monkeypatch.setitem(Slower.milliseconds, 7, 0.5)
    with autotune():
        assert choose(tuner) == (1, 7)
    found, index, tactic, profile = tuner.search_cache(
        "double", [Double(), Slower()], autotuner.profiles.shapes_of(inputs_of(5)), CONFIG, inputs_of(5)
    )
    assert (found, index, tactic) == (True, 1, 7) and profile.get_opt_shapes() == ((4, 3), (4, 2), (0,), (0,))
    assert profile.shapes[0] == [DynamicDim(4, 4, 8), StaticDim(3)] and profile.shapes[1][0] == DynamicDim(4, 4, 4)
    assert profile.get_hash_key() == profile.get_opt_shapes() and profile.tensor_initializers == [None] * 4
    assert tuner.search_cache("other", [Double()], ((5, 3), (5, 2)), CONFIG) == (False, 0, -1, None)


def test_the_fallback_wins_where_it_is_fastest(tuner, monkeypatch):
    monkeypatch.setitem(Double.milliseconds, -1, 0.01)
    with autotune():
        assert choose(tuner) == (0, -1)
    assert tuner.hits == 1


def test_tuning_is_off_where_it_should_be(tuner, monkeypatch):
    with autotune(False):
        assert choose(tuner) == (0, -1)
    with autotune(skip_ops={"double"}):
        assert choose(tuner) == (0, -1)
    monkeypatch.setattr(autotuner.autotuner, "_capturing", lambda: True)
    with autotune():
        assert choose(tuner) == (0, -1)
    assert not tuner.profiling_cache


def test_what_a_choice_depends_on(tuner, monkeypatch):
    with autotune():
        choose(tuner)
    count = len(tuner.profiling_cache)
    assert choose(tuner, op="other") == (0, -1)
    halves = [x.half() if isinstance(x, torch.Tensor) else x for x in inputs_of(5)]
    assert tuner.choose_one("double", [Double(), Slower()], CONFIG, halves)[1] == -1
    monkeypatch.setattr(Double, "get_cache_key_extras", lambda self, inputs: (inputs[3],))
    assert choose(tuner) == (0, -1)
    monkeypatch.undo()
    monkeypatch.setattr(Double, "validate_tactic", lambda self, inputs, tactic: tactic != 1, raising=False)
    assert choose(tuner) == (0, -1) and len(tuner.profiling_cache) == count


def test_buckets_of_the_caller(tuner):
    def mapping(**kwargs):
        with autotune(False, **kwargs):
            return [tuner.get_effective_map_to_tuning_buckets(CONFIG)(n) for n in (1, 10, 15, 99)]

    assert mapping() == [4, 8, 8, 16]
    assert mapping(tuning_buckets=(20, 10)) == [10, 10, 10, 20]
    assert mapping(tuning_buckets=(10, 20), round_up=True) == [10, 10, 20, 20]
    assert mapping(round_up=True) == [4, 16, 16, 16]
    runners = [Double()]
    with autotune(tuning_buckets=(10, 20), round_up=True):
        assert choose(tuner, 15, runners) == (0, 1)
    assert {call[0][0] for call in runners[0].calls} == {10, 20}
    for bad, argument in (((), "tuning_buckets"), ((0,), "tuning_buckets")):
        with pytest.raises(ValueError, match=f"^{argument}: got"), autotune(tuning_buckets=bad):
            pass
    with pytest.raises(ValueError, match="^cuda_graph_profile_replays: got"), autotune(cuda_graph_profile_replays=0):
        pass


def test_tensors_are_made_for_other_sizes(tuner):
    made = []

    def make(shape, dtype, device):
        made.append(shape)
        return torch.full(shape, 3, dtype=dtype, device=device)

    config = TuningConfig(CONFIG.dynamic_tensor_specs, CONFIG.constraint_specs, ((0, make),))
    seen = []
    hooked = replace(config, inputs_pre_hook=lambda inputs: seen.append(inputs) or [inputs[0] * 5, *inputs[1:]])
    runner = Double()
    with autotune():
        choose(tuner, 4, [runner], hooked)
    assert [x[0].shape[0] for x in seen] == [4, 8, 16] and made == [(8, 3), (16, 3)]
    assert (seen[1][0] == 3).all() and seen[1][2:] == [None, 5] and seen[1][1].shape == (8, 2)
    assert runner.seen == {15.0}


def test_inputs_of_successive_calls_are_those_of_the_caller(tuner):
    inputs = inputs_of(4)
    config, batches = tuner.prepare_tactic_profile(inputs, CONFIG)
    assert config == CONFIG and len(batches) == 1 and all(x is y for x, y in zip(batches[0], inputs, strict=True))
    with autotune(False, tuning_buckets=(10, 20), round_up=True):
        (spec,) = tuner.prepare_tactic_profile(inputs, CONFIG)[0].dynamic_tensor_specs
    assert spec.gen_tuning_buckets == (10, 20) and spec.map_to_tuning_buckets(11) == 20


def test_contexts_in_one_another(tuner):
    """Each has from the one around it what it does not say. Any of them skips operations; the innermost measures."""
    def mapped(n=12):
        return tuner.get_effective_map_to_tuning_buckets(CONFIG)(n)

    with autotune(True, tuning_buckets=(10, 20), skip_ops="double", cuda_graph_profile_replays=7):
        assert tuner.mode.skipped == {"double"} and mapped() == 10
        with autotune(False, round_up=True, skip_ops=["other", "third"]):
            assert not tuner.is_tuning_mode and mapped() == 20 and tuner.mode.replays == 7
            assert tuner.mode.skipped == {"double", "other", "third"}
            assert choose(tuner, op="d") == (0, -1) and not tuner.profiling_cache
            with autotune(tuning_buckets=(5,), round_up=False):
                assert tuner.is_tuning_mode and mapped() == 5
            assert not tuner.is_tuning_mode
        assert mapped() == 10 and tuner.mode.skipped == {"double"} and choose(tuner) == (0, -1)
        assert choose(tuner, op="d") != (0, -1)
    assert not tuner.is_tuning_mode and mapped() == 8 and not tuner.mode.skipped
    # A context that fails leaves nothing behind. Buckets are one thread's; one without a context measures as others do.
    with pytest.raises(ZeroDivisionError), autotune(skip_ops="double"):
        raise ZeroDivisionError
    with autotune(tuning_buckets=(3,), skip_ops="double"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: (tuner.is_tuning_mode, mapped(), tuner.mode.skipped)).result() == (True, 8, set())
        with autotune(False):
            assert pool.submit(lambda: tuner.is_tuning_mode).result() and not tuner.is_tuning_mode
    assert not tuner.is_tuning_mode and len(tuner._modes.stack) == 1
    tuner.is_tuning_mode = True
    with autotune(False):
        assert not tuner.is_tuning_mode
    tuner.is_tuning_mode = False
    with pytest.raises(ValueError, match="^skip_ops: got"), autotune(skip_ops=[3]):
        pass
    with flashinfer.autotune_v2(persistent_cache=False, skip_ops="double"):
        assert choose(tuner) == (0, -1)


def test_rounding_up_to_buckets_that_a_function_makes(tuner):
    """The next power of 2 stands for a size, as far as there is a bucket; rounding down is what the operation says."""
    spec = DynamicTensorSpec((0,), (0,), lambda n: (32, 96, 64, 192), lambda n: n // 2)
    config = TuningConfig((spec,))
    for round_up, expected in ((True, [32, 64, 192, 192]), (False, [8, 32, 40, 500]), (None, [8, 32, 40, 500])):
        with autotune(False, round_up=round_up):
            mapping = tuner.get_effective_map_to_tuning_buckets(config)
            assert [mapping(n) for n in (16, 64, 80, 1000)] == expected


def test_a_config_says_how_candidates_are_timed(tuner, monkeypatch):
    timed = []
    monkeypatch.setattr(measure, "milliseconds", lambda call, timing, device: timed.append(timing) or 1.0)

    def timing(policy=None, **fields):
        timed.clear()
        tuner.clear_cache()
        with flashinfer.autotune_v2(persistent_cache=False, measurement_policy=policy):
            choose(tuner, config=TuningConfig(**fields))
        return timed[0]

    assert (timing().replays, timing().cold, timing().repeat) == (None, False, 10)
    found = timing(use_cuda_graph=True, cuda_graph_profile_replays=3, profiling_repeat=4, use_cold_l2_cache=True)
    assert (found.replays, found.cold, found.repeat) == (12, True, 4)
    policy = MeasurementPolicy("eager", False)
    found = timing(policy, use_cuda_graph=True, use_cold_l2_cache=True)
    assert (found.replays, found.cold, found.eager) == (None, False, True)
    assert timing(MeasurementPolicy("cuda_graph")).replays == 10
    fields = dict(use_cold_l2_graph_replay=True, value_aware_input_indices=(0,), profile_arena_input_indices=(0, 1))
    assert timing(**fields).repeat == 10


class Bare(TunableRunner):
    """Has no preparation; its fallback cannot run. `is_in_profile_measurement` holds while it is timed alone."""

    def __init__(self):
        self.calls, self.profiles = [], []

    def get_valid_tactics(self, inputs, profile):
        self.profiles.append(profile.get_opt_shapes())
        return [0, 1]

    def forward(self, inputs, tactic=-1):
        self.calls.append((tactic, is_in_profile_measurement()))
        if tactic == -1:
            raise RuntimeError("no fallback")
        Double.last = 5 - tactic
        return inputs[0] + 1


class Prepared(Bare):
    def forward(self, inputs, tactic=-1, do_preparation=False):
        if do_preparation:
            self.calls.append(("prepared", tactic))
            return None
        return super().forward(inputs, tactic)


class Compiled(Prepared):
    def precompile_tactics(self, inputs, tactics, profile, **kwargs):
        self.calls.append(("compiled", tuple(tactics)))
        return True


def test_runners_prepare_themselves_if_they_can(tuner):
    for kind, first in ((Bare, []), (Prepared, [("prepared", -1)]), (Compiled, [("compiled", (0, 1))])):
        tuner.clear_cache()
        runner = kind()
        with autotune():
            assert tuner.choose_one("bare", [runner], TuningConfig(), inputs_of(5)) == (runner, 1)
        assert [call for call in runner.calls if isinstance(call[0], str)] == first
        assert {call for call in runner.calls if not isinstance(call[0], str)} >= {(0, True), (1, True), (-1, False)}
        assert runner.profiles == [((5, 3), (5, 2), (0,), (0,))]
    assert not is_in_profile_measurement()


def test_statistics(tuner):
    choose(tuner)
    with autotune():
        choose(tuner)
    stats = tuner.stats
    assert stats.cache_misses == 1 and stats.cache_miss_config_collection == {"double": {((4, 3), (4, 2), (0,), (0,))}}
    assert stats.tuned_op_total_configs == stats.tuned_op_successful_configs == {"double": 3}
    assert stats.failed_tactics == {"double::Double": {2, 3}} and len(stats.failed_profiling_count["double"]) == 3
    assert "double: 3 of 3" in str(stats)
    tuner.reset_statistics()
    assert tuner.stats.cache_misses == 0 and not tuner.stats.failed_tactics


def test_buckets_of_sizes():
    buckets = (100, 200, 500, 1000)
    down, up = ([autotuner.round_to_nearest_bucket(n, buckets, way) for n in (1, 200, 350, 2000)] for way in (0, 1))
    assert down == [100, 200, 200, 1000] and up == [100, 200, 500, 1000]
    assert [autotuner.make_bucket_mapper((500, 100, 100), up)(300) for up in (False, True)] == [100, 500]
    with pytest.raises(ValueError, match="^buckets: got"):
        autotuner.make_bucket_mapper(())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_initializers(dtype):
    made = {
        name: getattr(autotuner, f"autotuner_initializer_{name}")((50, 4), dtype, torch.device("cpu"))
        for name in ("empty", "zeros", "ones", "randn", "rand", "rand_scaled")
    }
    assert all(x.shape == (50, 4) and x.dtype == dtype for x in made.values())
    assert (made["zeros"].float() == 0).all() and (made["ones"].float() == 1).all()
    rand, scaled = made["rand"].float(), made["rand_scaled"].float()
    assert 0 <= rand.min() <= rand.max() <= 1 and -5 <= scaled.min() < -2 and 2 < scaled.max() <= 5


def test_a_file_of_choices(tuner, tmp_path, caplog):
    path = tmp_path / "deep" / "choices.json"
    with autotune(cache=str(path)):
        choose(tuner)
        choose(tuner, op="other", runners=[Pairs()])
    tuner.publish_namespaced_records("mine", {"a": [1, 2]})
    tuner.save_configs(str(path))
    content = json.loads(path.read_text())
    assert content["_metadata"]["flashinfer_version"] == flashinfer.__version__
    tuner.clear_cache()
    assert choose(tuner) == (0, -1) and tuner.get_namespaced_records("mine") == {}
    runners = [Double(), Slower()]
    with autotune(True, cache=str(path)):
        assert choose(tuner, runners=runners) == (0, 1) and not runners[0].calls
    assert tuner.get_namespaced_records("mine") == {"a": [1, 2]}
    assert (4, 5) in [tactic for _, tactic in tuner._loaded.values()]
    # Another environment's file is neither used nor overwritten, unless it says that it fits all.
    content["_metadata"]["gpu"] = "another"
    path.write_text(json.dumps(content))
    tuner.clear_cache()
    assert not tuner.load_configs(str(path)) and "gpu is" in caplog.text
    tuner.save_configs(str(path))
    assert json.loads(path.read_text()) == content
    content["_metadata"]["gpu"] = "*"
    path.write_text(json.dumps(content))
    assert tuner.load_configs(str(path)) and choose(tuner) == (0, 1)
    path.write_text("{")
    assert not tuner.load_configs(str(path))
    with pytest.raises(FileNotFoundError, match="none"):
        tuner.load_configs(str(tmp_path / "none"))


@pytest.mark.parametrize("unknown", ["unknown", "None", None])
def test_a_file_whose_environment_is_not_known_is_replaced(tuner, tmp_path, caplog, unknown):
    path = tmp_path / "choices.json"
    with autotune(cache=str(path)):
        choose(tuner)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"_metadata": content["_metadata"] | {"gpu": unknown}, "old": ["Double", 1]}))
    tuner.clear_cache()
    assert not tuner.load_configs(str(path)) and "not used: gpu is" in caplog.text
    with autotune(cache=str(path)):
        choose(tuner)
    assert json.loads(path.read_text()) == content


def test_a_folder_of_choices(tuner, tmp_path, caplog):
    with flashinfer.autotune_v2(cache_root=str(tmp_path)):
        assert choose(tuner) == (0, 1)
        with pytest.raises(RuntimeError, match="does not nest"), flashinfer.autotune_v2():
            pass
    entries = list(tmp_path.rglob("entries/*.json"))
    assert len(entries) == 3 and len(list(tmp_path.rglob("manifest.json"))) == 1
    tuner.clear_cache()
    runners = [Double(), Slower()]
    assert choose(tuner, runners=runners) == (0, 1) and not runners[0].calls
    # What cannot be read, or is another key's, is no choice; another policy has a folder of its own.
    tuner.clear_cache()
    for path in entries:
        path.write_text("nonsense")
    assert choose(tuner) == (0, -1) and "not used" in caplog.text
    with flashinfer.autotune_v2(cache_root=str(tmp_path), measurement_policy=MeasurementPolicy("eager", True)):
        choose(tuner)
    assert len(list(tmp_path.rglob("entries/*.json"))) == 6
    with flashinfer.autotune_v2("replay", False):
        assert tuner.folder is None and not tuner.is_tuning_mode
    for bad, argument in ((dict(mode="learn"), "mode"), (dict(persistent_cache=False, cache_root="x"), "cache_root")):
        with pytest.raises(ValueError, match=f"^{argument}: got"), flashinfer.autotune_v2(**bad):
            pass
    with pytest.raises(ValueError, match="^execution_mode: got"):
        MeasurementPolicy("graph")


def kept(tuner, tmp_path):
    """A file with one choice, the key of that choice, and its content."""
    path = tmp_path / "choices.json"
    config = TuningConfig()
    with autotune(cache=str(path)):
        choose(tuner, config=config)
    content = json.loads(path.read_text())
    (key,) = [key for key in content if not key.startswith("_")]
    assert content[key] == ["Double", 1]
    tuner.clear_cache()
    return path, key, content


@pytest.mark.parametrize("tactic", [999999, {}, None, float("nan"), [1, None], [4, [5]], "tile", 1.5, [], -2])
@pytest.mark.parametrize("place", ["file", "folder"])
def test_tactic_that_no_runner_has_is_no_choice(tactic, place, tuner, tmp_path, monkeypatch):
    config = TuningConfig()
    if place == "file":
        path, key, content = kept(tuner, tmp_path)
        path.write_text(json.dumps(content | {key: ["Double", tactic]}))
        assert tuner.load_configs(str(path))
    else:
        with flashinfer.autotune_v2(cache_root=str(tmp_path)):
            choose(tuner, config=config)
        (path,) = tmp_path.rglob("entries/*.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tactic": tactic}))
        flashinfer.autotune_v2_reload()
    assert choose(tuner, config=config) == (0, -1)
    # A key may be known without inputs.
    assert all(type(found[1]) in (int, str, tuple) for found in tuner._loaded.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda content, key: [],
        lambda content, key: content | {"_metadata": [1]},
        lambda content, key: content | {key: {"runner": 1}},
        lambda content, key: content | {key: [1, 2, 3]},
        lambda content, key: content | {key: [["Double"], 1]},
        lambda content, key: content | {"_records": 3},
        lambda content, key: content | {"_records": {"mine": 3}},
    ],
)
def test_file_of_other_types_is_no_error(change, tuner, tmp_path):
    path, key, content = kept(tuner, tmp_path)
    path.write_text(json.dumps(change(content, key)))
    tuner.load_configs(str(path))
    with autotune(cache=str(path)):
        assert choose(tuner, config=TuningConfig()) in ((0, -1), (0, 1))


@pytest.mark.parametrize("content", ["[" * 200_000, "\x00", "NaN", '"text"'])
def test_file_that_is_no_object_is_no_error(content, tuner, tmp_path, caplog):
    path = tmp_path / "choices.json"
    path.write_text(content)
    assert not tuner.load_configs(str(path)) and "not used" in caplog.text


def test_file_of_another_user_or_huge_is_not_read(tuner, tmp_path, monkeypatch, caplog):
    path, _, _ = kept(tuner, tmp_path)
    uid = os.getuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: uid + 1)
        assert not tuner.load_configs(str(path)) and "belongs to user" in caplog.text
    path.chmod(0o666)
    assert not tuner.load_configs(str(path)) and "can be written by users" in caplog.text
    path.chmod(0o644)
    assert tuner.load_configs(str(path))
    os.truncate(path, 8 << 30)
    assert not tuner.load_configs(str(path)) and "more than" in caplog.text


@pytest.mark.parametrize("place", ["folder", "under a file"])
def test_result_that_cannot_be_written_costs_a_warning(place, tuner, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    path = tmp_path if place == "folder" else tmp_path / "file" / "choices.json"
    with autotune(cache=str(path)):
        assert choose(tuner) == (0, 1)
    assert "could not be saved" in caplog.text and tuner._dirty
    assert choose(tuner) == (0, 1)


def test_dirty_says_whether_there_is_something_to_save(tuner, tmp_path):
    assert tuner._dirty is False
    with autotune():
        choose(tuner)
    assert tuner._dirty is True
    tuner.save_configs(str(tmp_path / "choices.json"))
    assert tuner._dirty is False
    tuner.publish_namespaced_records("mine", {"a": 1})
    assert tuner._dirty is True
    tuner.clear_cache()
    assert tuner._dirty is False


def test_records_are_replaced_and_are_plain(tuner):
    given = {"a": [1]}
    tuner.publish_namespaced_records("mine", given)
    given["a"].append(2)
    tuner.get_namespaced_records("mine")["a"].append(3)
    assert tuner.get_namespaced_records("mine") == {"a": [1]}
    tuner.publish_namespaced_records("mine", {"b": 1})
    assert tuner.get_namespaced_records("mine") == {"b": 1}
    for bad in ("", "_metadata", None):
        with pytest.raises(ValueError, match="^namespace: got"):
            tuner.publish_namespaced_records(bad, {})
    for bad in ([], {"a": object()}):
        with pytest.raises(TypeError):
            tuner.publish_namespaced_records("mine", bad)


def test_tactics_are_ranked(tuner):
    runner, config = Double(), TuningConfig()
    assert tuner.rank_tactics("double", [runner], config, inputs_of(5), 3) == [-1]
    with autotune():
        assert tuner.rank_tactics("double", [runner], config, inputs_of(5), 3) == [1, (4, 5), 0]
        count = len(runner.calls)
        # Kept, and what choose_one gives.
        assert tuner.rank_tactics("double", [runner], config, inputs_of(5), 9) == [1, (4, 5), 0, -1]
        assert len(runner.calls) == count
    assert tuner.rank_tactics("double", [runner], config, inputs_of(5), 3) == [1]
    assert choose(tuner, runners=[runner], config=config) == (0, 1)
    with pytest.raises(ValueError, match="^k: got 0"):
        tuner.rank_tactics("double", [runner], config, inputs_of(5), 0)
    with pytest.raises(ValueError, match="^runners: got 2"):
        tuner.rank_tactics("double", [runner, runner], config, inputs_of(5), 2)


def test_a_tactic_is_profiled_over_the_callers_inputs(tuner, monkeypatch):
    monkeypatch.undo()
    runner, timed = Double(), AutoTuner(warmup=0, repeat=2)
    took = timed.profile_tactic(runner, inputs_of(4), 1, TuningConfig(), [inputs_of(n) for n in (5, 6)])
    assert took > 0 and [call[0][0] for call in runner.calls] == [5, 6] * 2


def test_policy_says_what_follows_from_it():
    found = [(p.use_cuda_graph, p.timer) for p in map(MeasurementPolicy, ("auto", "cuda_graph", "eager"))]
    assert found == [(None, "events"), (True, "events"), (False, "events_no_delay")]
    assert MeasurementPolicy().manifest_fields() == {}
    fields = MeasurementPolicy("eager", False).manifest_fields()
    assert fields == {"measure_execution_mode": "eager", "measure_cold_l2": "False"}


def test_folder_of_choices_by_variable(tuner, tmp_path, monkeypatch):
    for name in ("FLASHINFER_AUTOTUNE_DIR", "FLASHINFER_AUTOTUNE_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
        with flashinfer.autotune_v2():
            choose(tuner)
        tuner.clear_cache()
        assert len(list((tmp_path / name).rglob("entries/*.json"))) == 3


def test_no_folder_to_write_to(tuner, monkeypatch):
    monkeypatch.setattr(kernel_cache, "writable_root", lambda: None)
    with flashinfer.autotune_v2():
        assert choose(tuner) == (0, 1)
    assert choose(tuner) == (0, 1)


def test_reload_reads_what_others_wrote(tuner, tmp_path, monkeypatch):
    with flashinfer.autotune_v2(cache_root=str(tmp_path)):
        choose(tuner)
    for path in tmp_path.rglob("entries/*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tactic": 0}))
    assert choose(tuner) == (0, 1)
    flashinfer.autotune_v2_reload()
    assert choose(tuner) == (0, 0)


def test_the_cache_folder_is_the_kernels(tuner, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    with flashinfer.autotune_v2():
        choose(tuner)
    (manifest,) = tmp_path.rglob("manifest.json")
    place = (".cache", "flashinfer", flashinfer.__version__, "autotune", "v2")
    assert manifest.relative_to(tmp_path).parts[:5] == place


def test_same_results():
    x = torch.randn(8, 64)
    good = [x, torch.arange(3)]
    assert measure.why_different(measure.copied((x * (1 + 1e-6), [torch.arange(3)], None)), good) == ""
    assert "norm" in measure.why_different([x * 1.01, torch.arange(3)], good)
    assert measure.why_different([x.bfloat16()], [(x * 1.01).bfloat16()]) == ""
    assert "norm" in measure.why_different([x.bfloat16()], [(x * 1.2).bfloat16()])
    assert "integers" in measure.why_different([x, torch.arange(3) + 1], good)
    assert "tensors" in measure.why_different([x], good)
    assert "tensor" in measure.why_different([x[:4], torch.arange(3)], good)
    assert "NaN" in measure.why_different([x.clone().fill_(torch.nan)], [x])
    inf = torch.tensor([1.0, torch.inf])
    assert measure.why_different([inf], [inf.clone()]) == ""


NARROW = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_values_that_are_not_finite_are_compared(dtype):
    x = torch.tensor([1.0, 2.0, torch.nan, 3.0]).to(dtype)
    same = x.clone()
    assert measure.why_different([same], [x]) == ""
    # NaN elsewhere, none, and another number beside the same NaN.
    for values in ([1.0, torch.nan, 2.0, 3.0], [1.0, 2.0, 2.0, 3.0], [1.0, 2.0, torch.nan, -3.0]):
        assert measure.why_different([torch.tensor(values).to(dtype)], [x])
    if dtype != torch.float8_e4m3fn:
        up, down = (torch.tensor([1.0, sign * torch.inf]).to(dtype) for sign in (1, -1))
        assert measure.why_different([up], [up.clone()]) == "" and "sign" in measure.why_different([up], [down])


@pytest.mark.parametrize("dtype", NARROW[2:], ids=str)
def test_norms_of_the_largest_values_do_not_overflow(dtype):
    x = torch.full((64,), torch.finfo(dtype).max / 2, dtype=dtype)
    assert measure.why_different([x.clone()], [x]) == ""
    for other in (-x, x / 2, torch.zeros_like(x)):
        assert "norm" in measure.why_different([other], [x])
    tiny = torch.full((64,), torch.finfo(dtype).tiny, dtype=dtype)
    assert "norm" in measure.why_different([tiny * 2], [tiny]) and measure.why_different([tiny], [tiny.clone()]) == ""
    assert measure.why_different([x[:0]], [x[:0]]) == "" and "norm" in measure.why_different([x], [torch.zeros_like(x)])


def test_time_is_measured():
    timing = measure.Timing(warmup=1, repeat=3, delay=0)
    took = measure.milliseconds(lambda: time.sleep(0.01), timing, torch.device("cpu"))
    assert 9 < took < 100


RANKS = """
import sys, torch
from torch import distributed
from flashinfer.autotuner import AutoTuner, autotune, get_autotune_process_group, measure, set_autotune_process_group
sys.path.insert(0, sys.argv[3])
from test_autotuner import CONFIG, Double, choose
rank = int(sys.argv[1])
distributed.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
Double.tactics = (0, 1)
Double.milliseconds = [{-1: 9, 0: 1, 1: 2}, {-1: 9, 0: 5, 1: 2}][rank]
def made_up(call, timing, device):
    call()
    return Double.last
measure.milliseconds = made_up
set_autotune_process_group(distributed.group.WORLD)
assert get_autotune_process_group() is distributed.group.WORLD
tuner = AutoTuner.get()
with autotune():
    print(choose(tuner, runners=[Double()]))
    Double.tactics = (0, 1)[: 1 + rank]
    try:
        choose(tuner, runners=[Double()], op="other")
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.matrix
def test_ranks_agree(tmp_path):
    """On the sum of their times, in which neither rank's own best need win; and on their candidates."""
    arguments = [str(tmp_path / "rendezvous"), str(Path(__file__).parent)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    ranks = [subprocess.Popen([sys.executable, "-c", RANKS, str(rank), *arguments], **pipes) for rank in range(2)]
    for rank in ranks:
        out, err = rank.communicate(timeout=120)
        assert out.splitlines() == ["(0, 1)", "ranks tune other candidates: from 2 to 3 of them"], err


@pytest.mark.gpu
@pytest.mark.parametrize("mode, cold", [("auto", None), ("cuda_graph", None), ("eager", None), ("eager", True)])
def test_on_a_gpu(device, monkeypatch, mode, cold):
    class Sleeper(TunableRunner):
        def get_valid_tactics(self, inputs, profile):
            return [1, 2]

        def forward(self, inputs, tactic=-1, do_preparation=False):
            # apart by more than a GPU's other processes delay a kernel
            torch.cuda._sleep({-1: 60_000_000, 1: 30_000, 2: 30_000_000}[tactic])
            return inputs[0] + 1

    monkeypatch.setattr(AutoTuner, "_instance", None)
    tuner, runner, policy = AutoTuner.get(), Sleeper(), MeasurementPolicy(mode, cold)
    with flashinfer.autotune_v2(persistent_cache=False, measurement_policy=policy):
        assert tuner.choose_one("sleep", [runner], TuningConfig(), [torch.ones(4, device=device)]) == (runner, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = tuner.choose_one("other", [runner], TuningConfig(), [torch.ones(4, device=device)])
        assert found == (runner, -1)
