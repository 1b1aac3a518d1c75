"""How many of a mixture's experts a decode step goes to: a model whose routing collapses reads fewer weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from raylm.bench.report import TouchedResult
from raylm.bench.trace import Work, run_work
from raylm.config.engine import EngineConfig
from raylm.engine.factory import local_engine
from raylm.errors import ConfigError
from raylm.model_files.source import locate
from raylm.models.arch import ArchConfig, ExpertsSpec
from raylm.models.decoder import DecoderModel
from raylm.models.experts import Router


def experts_touched(config: EngineConfig, batches: Sequence[int], work: Work) -> list[TouchedResult]:
    """Run the work for as many requests as each of `batches` says, and count. Steps run without CUDA graphs and layer
    by layer: what a graph, or one operator for all layers, has chosen is not seen. Raises ConfigError where the model
    has no experts."""
    specs = [layer.mlp for layer in ArchConfig.from_source(locate(config.model.reference)).layers]
    spec = next((mlp for mlp in specs if isinstance(mlp, ExpertsSpec)), None)
    if spec is None:
        raise ConfigError(f"bench experts counts experts, but {config.model.served_name} has none")
    runtime = config.runtime.model_copy(update={"cuda_graphs": False})
    engine = local_engine(config.model_copy(update={"runtime": runtime}), progress=False)
    found = []
    try:
        for salt, batch in enumerate(batches):
            with _counted() as counts:
                run_work(engine, batch, work, salt=salt, watch=counts.watch())
            touched = sum(counts.touched) / len(counts.touched)
            random = spec.num_experts * (1 - (1 - spec.per_token / spec.num_experts) ** batch)
            found.append(
                TouchedResult(
                    bench="experts",
                    model=config.model.served_name,
                    batch=batch,
                    experts=spec.num_experts,
                    touched=touched,
                    at_random=random,
                    share=touched / random,
                )
            )
    finally:
        engine.shutdown()
    return found


class _Counts:
    """Of each layer and step that is watched, how many experts its tokens go to."""

    def __init__(self) -> None:
        self.touched: list[int] = []
        self._watching = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        self._watching = True
        yield
        self._watching = False

    def see(self, module: nn.Module, given: object, routed: tuple[Tensor, Tensor]) -> None:
        if self._watching and isinstance(module, Router):
            self.touched.append(routed[1].unique().numel())


@contextmanager
def _counted() -> Iterator[_Counts]:
    counts = _Counts()
    hooks = [register_module_forward_pre_hook(_layer_by_layer), register_module_forward_hook(counts.see)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _layer_by_layer(module: nn.Module, given: object) -> None:
    if isinstance(module, DecoderModel):
        module.runs_layers_together = False
