"""Chooses the CPU or the GPU suite before Triton is imported, seeds torch, and gives tests their device."""

import gc
import os
import re

import pytest


def pytest_addoption(parser):
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="random calls of tests/fuzz, in all")
    parser.addoption("--fuzz-seed", type=int, default=0, metavar="S", help="the seed of the first call")
    parser.addoption("--hostile", default="0", metavar="N", help="wrong calls beside each public call, or all of them")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; chosen by -m gpu or FLASHINFER_TEST_GPU=1")
    config.addinivalue_line("markers", "site: opens the built documentation in a browser; chosen by -m site")
    config.addinivalue_line("markers", "matrix: compiles many kernels, or takes long; chosen by -m matrix")
    config.addinivalue_line("markers", "minutes: takes minutes, and begins first")
    if os.environ.get("FLASHINFER_TEST_GPU") == "1" and config.option.markexpr.startswith("not gpu"):
        config.option.markexpr = "gpu"
    if not _is_gpu_suite(config):
        # Triton chooses interpreter or compiler when a kernel is decorated, so this stands before any import of it.
        os.environ["TRITON_INTERPRET"] = "1"


def _is_gpu_suite(config):
    return re.search(r"(?<!not )\bgpu\b", config.option.markexpr) is not None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and tests stay to the end: the garbage collector, which took a third of this time, looks at none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config, items):
    """Marks are set before they choose tests. Of those chosen, what takes minutes begins first."""
    _set_suites(config, items)
    result = yield
    total, workers = len(items), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    long = [item for item in items if item.get_closest_marker("minutes")]
    items[:] = [item for item in items if item not in long]
    for place, item in enumerate(long):
        # xdist gives each worker a part of the list: at the head of each stands one.
        items.insert(place * total // workers, item)
    return result


def _set_suites(config, items):
    """A test that takes its device from the suite belongs to both; one marked gpu to the GPU suite alone.

    With --hostile all, one case of each test is left, by the reference.
    """
    if config.getoption("hostile") == "all":
        cases = {(item.module, item.originalname): item for item in reversed(items) if "portable" not in item.name}
        items[:] = [item for item in items if cases.get((item.module, item.originalname)) is item]
    if not _is_gpu_suite(config):
        return
    chosen = {item: getattr(item, "callspec", None) and item.callspec.params.get("device") for item in items}
    for item, device in chosen.items():
        if "device" in getattr(item, "fixturenames", ()) and device is None:
            item.add_marker(pytest.mark.gpu)
    on_cpu = [item for item, device in chosen.items() if device == "cpu"]
    config.hook.pytest_deselected(items=on_cpu)
    items[:] = [item for item in items if chosen[item] != "cpu"]


@pytest.fixture(scope="session")
def device(pytestconfig):
    """The device of the suite that runs: CUDA device 0 with -m gpu, else the CPU."""
    import torch

    return torch.device("cuda", 0) if _is_gpu_suite(pytestconfig) else torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter(pytestconfig):
    if not _is_gpu_suite(pytestconfig):
        from tests import interpreter

        interpreter.make_quick()


@pytest.fixture(scope="session", autouse=True)
def kernels_take_what_the_reference_takes():
    from tests import taken

    with taken.checked():
        yield


@pytest.fixture(scope="session")
def card_cache(tmp_path_factory, pytestconfig):
    """A folder of kernels for all cards that are not there, of all workers of a run: theirs lie side by side."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if hasattr(pytestconfig, "workerinput") else base) / "card"


@pytest.fixture(scope="session")
def on_card(card_cache):
    """Calls a function of the test's module in a process with a card that is not there; it gets the card."""
    from tests.core.card_process import card_process

    with card_process(card_cache) as call:
        yield call


@pytest.fixture(autouse=True)
def seed(pytestconfig):
    import torch

    # torch.manual_seed notes the stack it was called from for every device that is not there yet.
    (torch.manual_seed if _is_gpu_suite(pytestconfig) else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def guarded_memory():
    """What the package and the tests allocate lies between canaries, and undefined memory is poison."""
    from flashinfer.testing import guard

    with guard.watch():
        yield


@pytest.fixture(scope="session", autouse=True)
def hostile_calls(pytestconfig):
    """With --hostile, each public call of a test is made first with one argument wrong; what was wrong ends the run."""
    wanted = pytestconfig.getoption("hostile")
    if wanted == "0":
        yield
        return
    from tests.fuzz.intercept import Hostile, intercepted

    calls = Hostile(pytestconfig.getoption("fuzz_seed"), 0 if wanted == "all" else int(wanted))
    with intercepted(calls.visit):
        yield
    print(f"\n{calls.made} hostile calls, {calls.refused} refused, {len(calls.wrong)} kinds wrong")
    print(*(f"  {name} {count}" for name, count in sorted(calls.made_of.items())), sep="\n")
    assert not calls.wrong, "\n".join(calls.wrong.values())


@pytest.fixture(autouse=True)
def memory_goes_back(request):
    """After a test that held much of a GPU's memory, return it: other processes of the suite share the device."""
    yield
    if _is_gpu_suite(request.config):
        import torch

        if torch.cuda.memory_reserved() > 1 << 30:
            torch.cuda.empty_cache()
