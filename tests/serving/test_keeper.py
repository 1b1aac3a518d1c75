"""The keeper of `raylm serve`, with a server that starts what Ray does: a process in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.hangup import ended_by_hangup

SERVER = """
import os, signal, subprocess, sys, threading
from raylm.serving.program.keeper import fork_keeper

if (code := fork_keeper(leave_s=0.5)) is not None:
    sys.exit(code)
sleep = [sys.executable, "-c", "import signal; signal.pause()"]
others = [subprocess.Popen(sleep, process_group=group) for group in (None, 0)]
try:
    print(os.getpid(), *[other.pid for other in others], flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    assert all(other.poll() is None for other in others), "a signal to the group has ended them first"
    for other in others if "clean" in sys.argv else []:
        other.terminate()
        other.wait()
    print("ended in order", flush=True)
    sys.exit(5)
"""


@pytest.fixture
def start():
    keepers = []

    def start_server(*words, nohup=False):
        server = [sys.executable, "-c", SERVER, *words]
        command = ["nohup", *server] if nohup else ended_by_hangup(server)
        keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        keepers.append(keeper)
        processes = [psutil.Process(int(pid)) for pid in keeper.stdout.readline().split()]
        keepers.extend(processes)
        return keeper, processes

    yield start_server
    for process in keepers:
        if isinstance(process, subprocess.Popen):
            process.stdout.close()
            process.kill()
            process.wait(60)
        elif process.is_running():
            process.kill()


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_group_lets_the_server_end_in_order(start, number):
    keeper, processes = start("clean")
    # Twice, as `timeout` does: once its child, once the group.
    keeper.send_signal(number)
    os.killpg(keeper.pid, number)
    assert keeper.wait(120) == 5
    assert keeper.stdout.read() == "ended in order\n"
    assert_gone(processes)


def test_a_hangup_counts_also_where_the_tests_ignore_it(start):
    """As in `nohup make test`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        keeper, processes = start("clean")
    finally:
        signal.signal(signal.SIGHUP, before)
    os.killpg(keeper.pid, signal.SIGHUP)
    assert keeper.wait(120) == 5
    assert_gone(processes)


def test_what_a_server_leaves_is_killed(start):
    keeper, processes = start()
    keeper.terminate()
    assert keeper.wait(120) == 5
    assert_gone(processes)


def test_a_server_that_is_killed_leaves_nothing(start):
    keeper, processes = start()
    processes[0].kill()
    assert keeper.wait(120) == 128 + signal.SIGKILL
    assert_gone(processes)


def test_a_keeper_that_is_killed_ends_the_server(start):
    keeper, processes = start("clean")
    keeper.kill()
    assert keeper.stdout.read() == "ended in order\n"
    assert_gone(processes)


def test_nohup_stays_in_force(start):
    keeper, processes = start("clean", nohup=True)
    assert all(ignores(pid, signal.SIGHUP) for pid in (keeper.pid, processes[0].pid))
    keeper.terminate()
    assert keeper.wait(120) == 5


def ignores(pid: int, number: signal.Signals) -> bool:
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigIgn"], 16) & 1 << (number - 1))
