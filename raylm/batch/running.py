"""Answering a shard with the engine of this process."""

from __future__ import annotations

import asyncio
import time

import msgspec

from raylm.batch.answer import Answerer
from raylm.batch.requests import BadLine, BatchRequest, Result
from raylm.batch.shards import Shard, requests_of
from raylm.batch.work import Report, Totals, WorkFolder, count
from raylm.generation.lines import one_line


async def run_shard(answerer: Answerer, folder: WorkFolder, shard: Shard, *, keep_order: bool) -> Report:
    """Answer a shard's lines and keep the results, in the order of the lines or of their ends.

    Raises EngineDeadError, and then has kept nothing.
    """
    started = time.time()
    if await asyncio.to_thread(folder.has, shard):
        # The task is one that is run again, and it had got beyond this shard.
        return Report(shard.index, shard.num_requests, Totals(), started, started)
    requests = await asyncio.to_thread(list, requests_of(shard, model=answerer.name))
    results = await answer_all(answerer, requests, keep_order=keep_order)
    lines = [one_line(msgspec.json.encode(result)) for result in results]
    await asyncio.to_thread(folder.write, shard, lines)
    totals = Totals()
    for line in lines:
        count(line, totals)
    return Report(shard.index, shard.num_requests, totals, started, time.time())


async def answer_all(answerer: Answerer, requests: list[BatchRequest | BadLine], *, keep_order: bool) -> list[Result]:
    """The results of all requests, in their order or in that of their ends. Raises EngineDeadError."""
    tasks = [asyncio.create_task(answerer.answer(request)) for request in requests]
    try:
        return [await task for task in (tasks if keep_order else asyncio.as_completed(tasks))]
    finally:
        for task in tasks:
            task.cancel()
