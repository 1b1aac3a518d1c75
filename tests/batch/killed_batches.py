"""Runs a batch that is killed at one moment after another, and goes on with it. A program of its own, because it forks.

python -m tests.batch.killed_batches FOLDER in.jsonl     prints one line of JSON a moment
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from raylm.batch.job import BatchSettings, run_batch
from raylm.batch.shards import Shard
from raylm.batch.work import Report, WorkFolder
from tests.batch.batch_fakes import in_process, settings

importlib.import_module("pyarrow.parquet")  # Once, before the forks.
DONE, KILLED = 0, -signal.SIGKILL


def main(folder: Path, source: Path, suffix: str) -> None:
    for moment in range(1000):
        place = folder / str(moment)
        place.mkdir()
        job = settings(source, place / f"out{suffix}")
        status = _in_child(lambda job=job, moment=moment: _run_until(job, moment))
        finished = sorted(path.name for path in place.glob("*.batch/shard-*.jsonl"))
        again = _in_child(lambda job=job, place=place: _run(job, place / "begun"))
        begun = (place / "begun").read_text().split() if (place / "begun").exists() else []
        left = sorted(path.name for path in place.rglob("*") if path.is_file() and path.name != "begun")
        print(json.dumps({"status": status, "again": again, "finished": finished, "begun": begun, "left": left}))
        if status == DONE:
            return
    raise AssertionError("the batch never came to its end")


def _in_child(run: Callable[[], None]) -> int:
    """The exit code of a forked process that runs `run`; minus the signal that ended it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run_until(job: BatchSettings, moment: int) -> None:
    """Run the batch, killed before or after one of the calls that change what is on disk."""
    left = iter(range(moment, -1, -1))

    def tick() -> None:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def ticking(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            tick()
            result = function(*arguments)
            tick()
            return result

        return call

    os.fsync = ticking(os.fsync)
    os.replace = ticking(os.replace)
    LocalFileSystem.rm_file = ticking(LocalFileSystem.rm_file)
    run_batch(job, in_process)


def _run(job: BatchSettings, log: Path) -> None:
    def distribute(todo: list[Shard], job: BatchSettings, folder: WorkFolder) -> Generator[Report]:
        log.write_text("\n".join(f"shard-{shard.index:08d}.jsonl" for shard in todo))
        return in_process(todo, job, folder)

    run_batch(job, distribute)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
