"""How long the parts of the engine's steps take."""

from __future__ import annotations

from raylm.core.histogram import Buckets, Histogram
from raylm.core.measures import STEP_BOUNDS, TOKENS_BOUNDS


class StepMeter:
    """Histograms of the step loop's stages. With two plans in flight `delay` (the next plan waits for requests) and
    `wait` (for the result) are the part of a step's time on the device that the other stages do not hide."""

    def __init__(self) -> None:
        self.delay = Histogram(STEP_BOUNDS)
        self.schedule = Histogram(STEP_BOUNDS)
        self.submit = Histogram(STEP_BOUNDS)
        self.wait = Histogram(STEP_BOUNDS)
        self.update = Histogram(STEP_BOUNDS)
        self.send = Histogram(STEP_BOUNDS)
        self.tokens = Histogram(TOKENS_BOUNDS)
        """Tokens that each step computes."""

    @property
    def seconds(self) -> dict[str, Buckets]:
        """By stage."""
        stages = {
            "delay": self.delay,
            "schedule": self.schedule,
            "submit": self.submit,
            "wait": self.wait,
            "update": self.update,
            "send": self.send,
        }
        return {name: histogram.buckets for name, histogram in stages.items()}
