"""A process with a client that stalls:

    python -m tests.engine.stalled_client ADDRESS SERVER_KEY PUBLIC SECRET COMMAND...

Commands, in order: `start NAME` begins a sequence of an executor that counts and waits for its first token, `sleep S`
holds the event loop, `stop` prints "stopped" and stops the whole process (SIGSTOP), `finish` reads every sequence to
its end and prints each as one line of JSON: [name's first letter, number of tokens, whether none was lost or came
twice, finish reason or the code of the error, message].
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from itertools import pairwise

from raylm.core.options import RequestOptions
from raylm.core.sampling import SamplingParams
from raylm.engine.client import EngineClient
from raylm.engine.link import KeyPair
from raylm.engine.streams import Sequences
from raylm.errors import RequestLost


async def main(address: str, server_key: str, public: str, secret: str, *commands: str) -> None:
    client = EngineClient(address, server_key=server_key.encode(), keys=KeyPair(public.encode(), secret.encode()))
    params = SamplingParams(temperature=0, ignore_eos=True)
    streams: dict[str, Sequences] = {}
    tokens: dict[str, list[int]] = {}
    for command in commands:
        verb, _, value = command.partition(" ")
        if verb == "start":
            streams[value] = client.generate([value], [1], params, RequestOptions())
            tokens[value] = (await anext(streams[value])).token_ids
        elif verb == "sleep":
            time.sleep(float(value))
        elif verb == "stop":
            print("stopped", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif verb == "finish":
            for name, stream in streams.items():
                print(json.dumps([name[0], *await finish(stream, tokens[name])]), flush=True)
            streams.clear()
    await client.close()


async def finish(stream: Sequences, tokens: list[int]) -> tuple[int, bool, str | None, str]:
    reason, message = None, ""
    try:
        async for delta in stream:
            tokens += delta.token_ids
            reason = delta.finish_reason
    except RequestLost as error:
        reason, message = error.code, str(error)
    is_whole = all(after == before % 60 + 1 for before, after in pairwise(tokens))
    return len(tokens), is_whole, reason, message


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
