"""An application behind a real HTTP server, for clients that bring their own connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of `app`, such as http://127.0.0.1:1234, while the block runs."""
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready.set()

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        server = Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
        thread.start()
        assert ready.wait(120), "the server did not start"
        try:
            yield f"http://127.0.0.1:{own.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(120)
            assert not thread.is_alive(), "the server did not stop"
