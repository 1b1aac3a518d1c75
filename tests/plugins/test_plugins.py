"""One package that registers a plug-in of every group, installed as packages are: a folder of metadata beside it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raylm import LLM, SamplingParams, plugins
from raylm.api.metrics import HttpMetrics
from raylm.api.operations import operations
from raylm.config.base import parse
from raylm.config.engine import EngineConfig, SchedulerConfig
from raylm.config.serving import HttpConfig
from raylm.core.load import Load
from raylm.core.policies import make_policy
from raylm.errors import ConfigError
from raylm.generation.parsing.families import model_format
from raylm.generation.served_model import EngineStats
from raylm.models import registry
from raylm.serving.stat_loggers import StatLoggers
from tests.support import checkpoints

GROUPS = {
    "raylm.models": "ARCHITECTURES",
    "raylm.schedulers": "LastFirst",
    "raylm.tool_parsers": "CALLS",
    "raylm.reasoning_parsers": "REASONING",
    "raylm.routes": "routes",
    "raylm.stat_loggers": "Counter",
}
CODE = """
from raylm.api.identity import INFERENCE
from raylm.api.operations import Operation
from raylm.core.policies import FCFSPolicy
from raylm.generation.parsing import formats
from raylm.models.families.llama import ARCHITECTURES as LLAMA

ARCHITECTURES = {"ExtraForCausalLM": LLAMA["LlamaForCausalLM"]}
CALLS, REASONING = formats.HERMES, formats.THINK
MADE = []


class LastFirst(FCFSPolicy):
    def __init__(self, config):
        super().__init__()
        self.config = config


async def hello(call):
    return b'"hello"'


def routes(catalog, config):
    return [Operation("GET", "/v1/hello", INFERENCE, hello)]


class Counter:
    def __init__(self, model, engine_id):
        self.told = []
        MADE.append((model, engine_id, self))

    def record(self, stats):
        if stats.load.running > 1:
            raise RuntimeError("enough")
        self.told.append(stats)
"""


def install(folder: Path, name: str, groups: dict[str, str], code: str) -> None:
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[{group}]\nextra = {name}:{thing}\n" for group, thing in groups.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    registry.families.cache_clear()
    plugins.registered.cache_clear()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    forget()
    return folder


@pytest.fixture
def package(place: Path, request: pytest.FixtureRequest) -> str:
    name = f"raylm_extra_{abs(hash(request.node.name))}"
    install(place, name, GROUPS, CODE)
    return name


def test_a_model(package: str, tmp_path: Path) -> None:
    folder = checkpoints.llama(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    prompts, params = [[1, 2, 3, 4]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    texts = []
    for architecture in ("LlamaForCausalLM", "ExtraForCausalLM"):
        (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        llm = LLM(str(folder), device="cpu", progress=False)
        texts.append(llm.generate(prompts, params, progress=False)[0].outputs[0].token_ids)
        llm.close()
    assert texts[0] == texts[1]


def test_a_scheduler(package: str) -> None:
    config = parse(EngineConfig, {"model": {"path": "x"}, "scheduler": {"policy": "extra"}}, source="test")
    assert make_policy(config.scheduler).config == config.scheduler
    with pytest.raises(ConfigError, match="'scheduler.policy' has the value 'none': it must be one of fcfs, .*, extra"):
        parse(EngineConfig, {"model": {"path": "x"}, "scheduler": {"policy": "none"}}, source="test")


def test_formats(package: str) -> None:
    named = model_format("", calls="extra", reasoning="extra")
    assert named == model_format("", calls="hermes", reasoning="think")
    with pytest.raises(ValueError, match="'other' is no format of calls: it is auto, none, .*extra"):
        model_format("", calls="other")


def test_a_route(package: str) -> None:
    table = operations({}, HttpConfig(), HttpMetrics({}))
    (found,) = [operation for operation in table if operation.path == "/v1/hello"]
    assert asyncio.run(found.run(None)) == b'"hello"'


def test_a_stat_logger_that_fails_is_left_out(package: str) -> None:
    loggers = StatLoggers("model", "engine")
    made = __import__(package).MADE
    ((model, engine_id, counter),) = made
    assert (model, engine_id) == ("model", "engine")
    for running in (1, 2, 1):
        loggers.record(EngineStats("model", "engine", Load(running, 0, 0.0)))
    assert [stats.load.running for stats in counter.told] == [1]


def test_one_name_in_two_packages(package: str, place: Path) -> None:
    install(place, package + "_again", {"raylm.schedulers": "LastFirst"}, CODE)
    with pytest.raises(ConfigError, match=f"'extra' .* is in several packages: {package}.*; allowed: one"):
        make_policy(SchedulerConfig(policy="extra"))


@pytest.mark.parametrize(
    ("group", "code", "message"),
    [
        ("raylm.models", "thing = 1", r"'extra' \(raylm.models\) is 1; allowed: a dict of families"),
        (
            "raylm.models",
            "from raylm.models.families.llama import ARCHITECTURES as thing",
            "'extra' .* has 'LLaMAForCausalLM', which raylm has",
        ),
        ("raylm.models", "import no_such_module", "'extra' .* of raylm_bad_.* cannot be loaded: No module named"),
        ("raylm.routes", "thing = 3", r"'extra' \(raylm.routes\) gives 3; allowed: a list of operations"),
        (
            "raylm.routes",
            "from raylm.api.operations import Operation\nthing = [Operation('GET', '/v1/models', None, None)]",
            "'extra' .* has GET /v1/models, which is there",
        ),
        ("raylm.stat_loggers", "thing = 3", r"'extra' \(raylm.stat_loggers\) is 3; allowed"),
        ("raylm.tool_parsers", "thing = 3", r"the plug-in 'extra' \(raylm.tool_parsers\) is no CallFormat, but 3"),
    ],
)
def test_what_is_no_plugin(place: Path, request: pytest.FixtureRequest, group: str, code: str, message: str) -> None:
    install(place, f"raylm_bad_{abs(hash(request.node.name))}", {group: "thing"}, code)
    use = {
        "raylm.models": registry.families,
        "raylm.routes": lambda: operations({}, HttpConfig(), HttpMetrics({})),
        "raylm.stat_loggers": lambda: StatLoggers("model", "engine"),
        "raylm.tool_parsers": lambda: model_format("", calls="extra"),
    }[group]
    with pytest.raises((ConfigError, ValueError), match=message):
        use()
