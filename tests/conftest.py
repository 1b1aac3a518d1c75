"""Shared by all tests. Helpers are in tests/support, those of one folder alone beside its tests."""

from __future__ import annotations

import atexit
import gc
import importlib.util
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from tempfile import mkdtemp

import pytest
from hypothesis import Phase, settings

from raylm.config.demo import DEMO_MODELS
from raylm.model_files.source import ModelSource, locate
from raylm.text.processor import TextProcessor

pytest_plugins = ["tests.support.served", "tests.support.held_loop", "tests.support.slow_threads"]

# Torch reads it when it is loaded: threads that wait for work sleep, where they would take the cores from each other.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Ray reads these when it is first imported, by whichever test does so first.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
# Serve gives up a proxy that takes over three times 5 s to start, as one does on two cores that compute meanwhile.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")

# No test asks the Hugging Face hub; those of downloads have one of their own on loopback.
os.environ["HF_HUB_OFFLINE"] = "1"

# Servers keep responses in the user's state folder: here in one of the session's own.
os.environ["XDG_STATE_HOME"] = mkdtemp(prefix="raylm-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

settings.register_profile("ci", max_examples=120, deadline=None)
settings.register_profile("nightly", max_examples=10_000, deadline=None)
settings.register_profile("unshrunk", max_examples=1_000, deadline=None, phases=[Phase.generate])
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hostile-requests", type=int, default=10_000, help="requests of tests/serving/test_hostile.py")
    parser.addoption("--hostile-seed", type=int, help="their seed, which is random otherwise and in the log")
    parser.addoption("--require-browser", action="store_true", help="tests of the page fail without a Chromium")
    parser.addoption("--contract-examples", type=int, default=100, help="requests of tests/contract, of all operations")
    parser.addoption("--slow-threads", choices=("main", "others"), help="threads that are held again and again")
    parser.addoption("--require-demo", action="store_true", help="tests of the demo model fail without it")


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: no collection of garbage looks through it again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def demo(request: pytest.FixtureRequest) -> None:
    """For whatever loads or reads the demo model. Without its package such a test is skipped; with --require-demo, as
    `make test` has it, it fails."""
    (model,) = DEMO_MODELS.values()
    if importlib.util.find_spec(model.package) is None:
        reason = f"needs the demo model: {model.install}"
        if request.config.getoption("--require-demo"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def smollm_source(demo: None) -> ModelSource:
    return locate("smollm2-135m")


@pytest.fixture(scope="session")
def smollm(smollm_source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    """The demo model's own tokenizer and chat template."""
    return TextProcessor.load(smollm_source, cache_dir=tmp_path_factory.mktemp("tokenizers"))


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A program that is run in this process prints raylm's lines to the stderr of its test, and not beyond it."""
    logger = logging.getLogger("raylm")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """A command that is run in this process sets what Ray and Serve are to read: other tests start processes too."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The session's one Ray cluster: small, on loopback. A process can have no second one.

    As in `raylm serve`, nothing of Ray's dashboard is started, and Serve comes without pandas: its processes start
    sooner.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # Ray's own, at import and start
        import ray

        from raylm.executor.local_head import local_heads

        # Not for `raylm serve` that a test starts: it does so by itself.
        patch.setenv("RAY_preload_python_modules", "raylm.serving.program.lean")
        with local_heads(lambda: None):
            ray.init("local", num_cpus=3, include_dashboard=False, namespace="serve", _node_ip_address="127.0.0.1")
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.shutdown()
