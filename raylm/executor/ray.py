"""Runs steps in Ray actors, one a device, in the engine's placement group."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raylm import garbage
from raylm.config.resolve import ResolvedEngine
from raylm.core.control import WorkerControl
from raylm.core.step import ModelInfo, Sampled, StepPlan
from raylm.core.structure import StructuredOutput
from raylm.errors import ConfigError, EngineDeadError, TransferError
from raylm.executor.patience import Patience
from raylm.executor.peers import WEIGHTS, PeerWorker, ask, watch
from raylm.executor.placement import Bundle, WorkerPlace, WorkerSeat, bundle_of_worker, rank_order, seat_of
from raylm.executor.step_channel import PlanReceiver, PlanSender, StepAddress, serve
from raylm.log import get_logger
from raylm.stacks import ProcessStacks, stacks_here

if TYPE_CHECKING:
    from raylm.models.from_peer import Manifest, WeightSender

T = TypeVar("T")

logger = get_logger(__name__)

_GRAMMARS = "grammars"
_LOOKS = "looks"
"""The concurrency group, of one thread, that says what a worker does while its step hangs."""
_POLL_MS = 100
"""How often a wait for a result looks whether the workers still live."""

CONTROL_LIMIT_S = 300.0
"""What workers may take for what they are told beside plans: writing the trace of a thousand steps takes long."""

_DEATH_NEWS_S = 0.5
"""How much later than its peers' errors the news of a worker's death may come."""


class WorkerActor:
    """Ray's face of one Worker: start it, then let it serve the step channel until the engine closes it."""

    def __init__(self, config: ResolvedEngine) -> None:
        from raylm import log

        log.configure(form=config.runtime.log_format)
        self._config = config
        self._tried_to_start = threading.Event()

    def place(self) -> WorkerPlace:
        context = ray.get_runtime_context()
        gpu_ids = [str(gpu) for gpu in ray.get_gpu_ids()]
        return WorkerPlace(context.get_node_id(), ray.util.get_node_ip_address(), gpu_ids, os.getpid())

    def meeting_point(self) -> str:
        """Where the workers find each other, on this worker's node."""
        from raylm.parallel.groups import MeetingPoint

        self._meeting = MeetingPoint(ray.util.get_node_ip_address(), timeout_s=self._config.runtime.start_timeout_s)
        return self._meeting.address

    def start(self, seat: WorkerSeat | None, peer: Any = None) -> ModelInfo:
        """Load the model, or the part of it that a worker with this seat has: from `peer`, the handle of the worker
        with this seat in another engine, if there is one and it can be done."""
        if seat is not None and seat.visible_gpus:
            # Read once, when CUDA starts. Ray shows each worker its own GPU alone; ranks read each other's memory.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seat.visible_gpus)
        begin = time.monotonic()
        from raylm.parallel.groups import Seat, set_up_libraries
        from raylm.worker.worker import Worker

        phases = {"import": time.monotonic() - begin}
        if self._config.load.from_peer:
            set_up_libraries(self._config.parallel, ray.util.get_node_ip_address())
        try:
            self._worker = Worker(
                self._config,
                seat=None if seat is None else Seat(*seat),
                peer=None if peer is None else PeerWorker(peer),
                progress=False,
            )
            info = self._worker.start()
            return info._replace(phases=phases | info.phases)
        finally:
            self._tried_to_start.set()

    def stacks(self, process: str) -> ProcessStacks:
        """What this worker does now."""
        return stacks_here(process)

    def wait_for_start(self) -> None:
        """Returns once `start` has ended, well or not. That this call fails tells a peer that this worker died."""
        self._tried_to_start.wait()

    def manifest(self) -> Manifest:
        """What this worker can lend. Raises TransferError."""
        return self._weights().manifest

    def send_weights(self, unique_id: bytes, limit_s: float, borrower: Any) -> None:
        """Connect to `borrower`, the WorkerActor that made the id, and send it the weights. Raises TransferError."""
        self._weights().send(unique_id, limit_s=limit_s, look=watch(ask(borrower.wait_for_start)))

    def prepare_grammar(self, structure: StructuredOutput) -> None:
        """Compile a grammar for the rows that will need it. Returns once it is; steps go on meanwhile."""
        future = self._worker.prepare(structure)
        if future is not None:
            future.result()

    def _weights(self) -> WeightSender:
        if self._worker.weights is None:
            raise TransferError("load.from_peer is off here")
        return self._worker.weights

    def serve_steps(self, address: StepAddress, answers: bool) -> None:
        """Run plans until the channel closes. A failure goes to the engine and ends the worker."""
        garbage.set_apart()
        channel = PlanReceiver(address, answers=answers)
        try:
            serve(channel, self._worker.submit, self._worker.control)
        except Exception as error:
            logger.exception("a step failed")
            channel.fail(error)
            # The engine has no torch, and would spend a second on importing it for an exception of torch.
            raise EngineDeadError(f"{type(error).__name__}: {error}") from None
        finally:
            channel.close()
            self._worker.close()


class RayExecutor:
    """WorkerActors behind a step channel. The death, failure or silence of one of them raises EngineDeadError."""

    def __init__(
        self,
        config: ResolvedEngine,
        *,
        group: PlacementGroup,
        resources: Bundle,
        release: Callable[[], None],
        peers: Sequence[Any] = (),
    ) -> None:
        """`release` is called once the workers have gone. `peers` are the workers of a live engine, by rank, to get the
        weights from."""
        self._config = config
        self._peers = peers
        self._release = release
        self._workers = [_start_worker(config, group, resources, index) for index in range(config.parallel.num_workers)]
        self._places: list[WorkerPlace] = []
        self._channel: PlanSender | None = None
        self._serving: list[ray.ObjectRef[None]] = []
        self._patience = Patience(config.runtime.step_timeout_s)
        self._order_limit_s = 0.0
        """What the order in hand may take; 0 while there is none."""

    def start(self) -> ModelInfo:
        begin = time.monotonic()
        deadline = begin + self._config.runtime.start_timeout_s
        places: list[WorkerPlace] = self._all([worker.place.remote() for worker in self._workers], deadline)
        phases = {"workers": time.monotonic() - begin}
        order = rank_order(places, ray.get_runtime_context().get_node_id())
        places, self._workers = [places[index] for index in order], [self._workers[index] for index in order]
        self._places = places
        if len(self._workers) == 1:
            seats: list[WorkerSeat | None] = [None]
        else:
            met: list[str] = self._all([self._workers[0].meeting_point.remote()], deadline)
            seats = [seat_of(rank, places, met[0]) for rank in range(len(places))]
        infos: list[ModelInfo] = self._all(
            [
                worker.start.remote(seat, peer)
                for worker, seat, peer in zip(self._workers, seats, self._peer_of_each(), strict=True)
            ],
            deadline,
        )
        self._channel = PlanSender(_hosts(places))
        answering = len(self._workers) - self._config.parallel.tensor
        self._serving = [
            worker.serve_steps.remote(address, rank == answering)
            for rank, (worker, address) in enumerate(zip(self._workers, self._channel.addresses, strict=True))
        ]
        try:
            self._channel.wait_for_workers(look=self.check, deadline=deadline)
        except BaseException:
            self._channel.close()
            raise
        slowest = max(infos, key=lambda info: sum(info.phases.values()))
        return infos[answering]._replace(phases=phases | slowest.phases)

    def submit(self, plan: StepPlan) -> None:
        self._started().send(plan, look=self.check)
        self._patience.sent(plan.total_tokens, time.monotonic())

    @property
    def patience_s(self) -> float:
        """How long the workers may take for what they have been given, before they count as hung. Asked by any
        thread."""
        return max(self._patience.limit_s, self._order_limit_s)

    @property
    def done(self) -> bool:
        return self._started().has_result()

    def result(self) -> Sampled:
        channel, timeout = self._started(), self._patience.limit_s
        deadline = time.monotonic() + timeout
        while True:
            try:
                result = channel.receive(_POLL_MS)
            except EngineDeadError as failure:
                # Ranks fail when another one dies, and they are heard first.
                raise self._death(_DEATH_NEWS_S) or failure from None
            if result is not None:
                self._patience.answered(time.monotonic())
                return result
            self.check()
            if time.monotonic() > deadline:
                raise EngineDeadError(
                    f"the workers hang: a step had no result after {timeout:.3g} s (runtime.step_timeout_s, or more "
                    "where such steps have taken longer)"
                )

    def control(self, op: WorkerControl) -> list[str]:
        # The plans before it come first, and a trace takes its time.
        self._order_limit_s = CONTROL_LIMIT_S + self._patience.limit_s
        try:
            return self._started().tell(op, look=self.check, deadline=time.monotonic() + self._order_limit_s)
        finally:
            self._order_limit_s = 0.0
            self._patience.resumed(time.monotonic())

    def prepare(self, structure: StructuredOutput) -> _Preparing:
        # The workers of the last stage alone sample, and keep grammars.
        samplers = self._workers[-self._config.parallel.tensor :]
        return _Preparing(
            [worker.prepare_grammar.options(concurrency_group=_GRAMMARS).remote(structure) for worker in samplers]
        )

    def check(self) -> None:
        if (death := self._death(0)) is not None:
            raise death
        done, _ = ray.wait(self._serving, timeout=0)
        if not done:
            return
        try:
            ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise EngineDeadError(f"{self._name(done[0])} failed in a step: {error.cause}") from None
        except ray.exceptions.RayActorError:
            raise EngineDeadError(f"{self._name(done[0])} died") from None
        raise EngineDeadError(f"{self._name(done[0])} left its step loop")

    def _death(self, timeout_s: float) -> EngineDeadError | None:
        """The death of a worker; None where none has died. Waits up to `timeout_s` while some still serve."""
        ended, _ = ray.wait(self._serving, num_returns=len(self._serving), timeout=timeout_s)
        for ref in ended:
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError as error:
                logger.error("%s died: %s", self._name(ref), error)
                return EngineDeadError(f"{self._name(ref)} died")
            except ray.exceptions.RayError:
                pass  # It failed in a step; it has said so itself.
        return None

    def _name(self, ref: ray.ObjectRef[None]) -> str:
        """The worker that serves `ref`, for people."""
        rank = self._serving.index(ref)
        place = self._places[rank]
        return f"worker {rank} of {len(self._places)} (process {place.pid} on {place.node_ip})"

    def stacks(self, limit_s: float) -> list[ProcessStacks]:
        """What every worker does now. Asked by any thread; a process that is stopped does not answer in time."""
        processes = [f"worker {rank} of {len(self._workers)}" for rank in range(len(self._workers))]
        refs = [
            worker.stacks.options(concurrency_group=_LOOKS).remote(process)
            for worker, process in zip(self._workers, processes, strict=True)
        ]
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=limit_s) if refs else ([], [])
        found = []
        for process, place, ref in zip(processes, self._places, refs, strict=True):
            silent = ProcessStacks(process, place.node_ip, place.pid, "", f"it has not answered within {limit_s:g} s")
            try:
                found.append(ray.get(ref) if ref in answered else silent)
            except ray.exceptions.RayError as error:
                found.append(silent._replace(error=f"it has gone: {error}"))
        return found

    def shutdown(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._give_up()
        if self._workers:
            self._workers = []
            self._release()

    @property
    def config(self) -> ResolvedEngine:
        return self._config

    @property
    def workers(self) -> list[Any]:
        """Their handles, by rank once `start` has returned."""
        return list(self._workers)

    def _peer_of_each(self) -> list[Any]:
        peers, self._peers = self._peers, ()
        if peers and len(peers) != len(self._workers):
            logger.warning("load.from_peer: the peer has %d workers, this engine %d", len(peers), len(self._workers))
            peers = ()
        return list(peers) or [None] * len(self._workers)

    def _started(self) -> PlanSender:
        if self._channel is None:
            raise RuntimeError("the executor has not been started")
        return self._channel

    def _all(self, refs: Sequence[ray.ObjectRef[T]], deadline: float) -> list[T]:
        """Every value. The first failure counts, however long the others would take: they may wait for who failed."""
        timeout = self._config.runtime.start_timeout_s
        waiting = list(refs)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=max(deadline - time.monotonic(), 0))
            if not done:
                self._give_up()
                raise EngineDeadError(
                    f"{len(waiting)} of {len(self._workers)} workers were not ready after "
                    f"runtime.start_timeout_s {timeout:g} s"
                )
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                self._give_up()
                if isinstance(error.cause, ConfigError):
                    raise ConfigError(str(error.cause)) from None
                raise EngineDeadError(f"a worker failed while it loaded the model: {error.cause}") from None
            except ray.exceptions.RayActorError as error:
                self._give_up()
                raise EngineDeadError(f"a worker died while it loaded the model: {error}") from None
        values: list[T] = ray.get(list(refs))
        return values

    def _give_up(self) -> None:
        """End workers that may wait for each other for ever."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)


class _Preparing:
    """Grammars that the workers compile."""

    def __init__(self, refs: list[ray.ObjectRef[None]]) -> None:
        self._refs = refs

    def wait(self, seconds: float) -> bool:
        done, _ = ray.wait(self._refs, num_returns=len(self._refs), timeout=seconds)
        return len(done) == len(self._refs)


def _start_worker(config: ResolvedEngine, group: PlacementGroup, resources: Bundle, index: int) -> Any:
    bundle = bundle_of_worker(index, num_workers=config.parallel.num_workers, num_bundles=group.bundle_count)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return (
        ray.remote(concurrency_groups={WEIGHTS: 1, _GRAMMARS: 2, _LOOKS: 1})(WorkerActor)
        .options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy, max_restarts=0
        )
        .remote(config)
    )


def _hosts(places: Sequence[WorkerPlace]) -> list[str | None]:
    """For each worker the address of this node that it needs for its plans; None on this node itself."""
    here, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
    return [None if place.node_id == here else address for place in places]
