"""A request that fails while it is sampled ends with an error; those beside it do not notice."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raylm import LLM, EngineConfig, SamplingParams, StructuredOutput
from raylm.errors import RaylmError
from raylm.worker.sampling import processors
from tests.support import checkpoints

PROMPT = [5, 6, 7]
PLAIN = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DIGITS = StructuredOutput("regex", "[0-9]{30}")


class Raises:
    """Works until some row has ten tokens."""

    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        if int(num_tokens.max()) >= 10:
            raise IndexError("no tenth")
        return logits


class WrongShape:
    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        return logits[:, :3]


class ForbidsDigits:
    def __call__(self, logits: Tensor, token_ids: Tensor, num_tokens: Tensor) -> Tensor:
        return logits.index_fill(1, torch.arange(3, 100), -torch.inf)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = {"raises": "Raises", "shape": "WrongShape", "forbids": "ForbidsDigits"}
    entries = [
        importlib.metadata.EntryPoint(name, f"{__name__}:{value}", processors.GROUP) for name, value in made.items()
    ]
    config = {
        "model": {"path": str(checkpoints.llama(tmp_path_factory.mktemp("llama"))), "max_model_len": 64},
        "generation": {"logits_processors": list(made)},
        "runtime": {"device": "cpu", "plans_in_flight": 2},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processors, "entry_points", lambda *, group: entries)
        llm = LLM(EngineConfig.model_validate(config), progress=False)
    yield llm
    llm.close()


@pytest.mark.parametrize(
    ("name", "structure", "message"),
    [
        ("raises", None, "logits_processors: raises raised IndexError: no tenth"),
        ("shape", None, "logits_processors: shape raised "),
        ("forbids", DIGITS, "structure: the text does not meet its grammar any more"),
    ],
)
def test_it_fails_alone(llm: LLM, name: str, structure: StructuredOutput | None, message: str) -> None:
    expected = llm.generate([PROMPT], PLAIN, progress=False)[0].outputs[0].token_ids
    failing = replace(PLAIN, logits_processors=(name,), structure=structure, ignore_eos=structure is None)
    first, broken, last = llm.generate([PROMPT] * 3, [PLAIN, failing, PLAIN], progress=False)
    assert first.outputs[0].token_ids == last.outputs[0].token_ids == expected
    assert first.outputs[0].message is None
    (output,) = broken.outputs
    assert output.finish_reason == "error" and output.message is not None and output.message.startswith(message)
    if name == "raises":
        assert output.token_ids == expected[: len(output.token_ids)] and len(output.token_ids) == 7


def test_a_stream_that_fails_raises(llm: LLM) -> None:
    failing = replace(PLAIN, logits_processors=("shape",))
    with pytest.raises(RaylmError, match="shape raised"):
        list(llm.stream(PROMPT, failing))
