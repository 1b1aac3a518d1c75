"""What a process says it does now."""

from __future__ import annotations

import asyncio
import os
import threading

from raylm.stacks import MAX_TASKS, stacks_here


def test_every_thread_is_there_with_its_code_and_without_its_values() -> None:
    gate = threading.Event()
    begun = threading.Event()

    def hang_here(secret: str) -> None:
        begun.set()
        gate.wait(60)

    thread = threading.Thread(target=hang_here, args=("sesame",), name="the-one-that-hangs")
    thread.start()
    assert begun.wait(60)
    found = stacks_here("engine 7")
    gate.set()
    thread.join()
    assert (found.process, found.pid, found.error) == ("engine 7", os.getpid(), None)
    assert "thread the-one-that-hangs" in found.stacks and "in hang_here" in found.stacks
    assert "sesame" not in found.stacks
    assert "thread MainThread" in found.stacks


async def test_tasks_are_there_but_not_thousands_of_them() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits_for_ever()) for _ in range(2 * MAX_TASKS)]
    await asyncio.sleep(0)
    text = stacks_here("ingress").stacks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "in waits_for_ever" in text
    assert text.count("\ntask ") <= MAX_TASKS and f"{MAX_TASKS + 1} tasks more" in text
