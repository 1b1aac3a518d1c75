"""raylm as a stage of a Ray Data pipeline of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raylm.config.base import parse
from raylm.config.engine import EngineConfig

if TYPE_CHECKING:
    from ray.data import Dataset


@dataclass(frozen=True, slots=True)
class Processor:
    """Called with a dataset, gives one with the columns answer, response and error added."""

    config: EngineConfig
    engines: int | None
    batch_size: int
    max_tokens: int

    def __call__(self, dataset: Dataset) -> Dataset:
        from raylm.batch.pool import plan_pool
        from raylm.batch.stage import RowStage, Stage, run_stage
        from raylm.executor.cluster import cluster_nodes

        stage = Stage(RowStage, {"max_tokens": self.max_tokens}, self.batch_size, "pyarrow")
        pool = plan_pool(self.config, self.engines, cluster_nodes())
        return run_stage(dataset, stage, pool, batch_requests=self.batch_size)


def processor(
    config: EngineConfig | str, *, engines: int | None = None, batch_size: int = 64, max_tokens: int = 128
) -> Processor:
    """A stage that answers every row of a dataset.

    A row asks by its columns: `prompt` (a string or token ids), or `messages` (OpenAI's), with more of the request's
    parameters as columns if need be; or `url` and `body` (JSON, or a struct). Added are `answer` (the first choice's
    text), `response` (the body that the server would send, JSON) and `error` (a sentence); what is not there is null.

    config: an engine's configuration, or just its model: a folder, a .gguf file or a demo name.
    engines: how many; by default as many as the cluster has room for when the dataset is given.
    batch_size: rows a batch; several batches are in each engine at a time, so that it never runs empty between them.
    max_tokens: for prompts whose row says nothing.
    """
    if isinstance(config, str):
        config = parse(EngineConfig, {"model": {"path": config}}, source="processor(...)")
    return Processor(config, engines, batch_size, max_tokens)
