"""A way to an address whose connections a test can cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def relay(address: str, *, unnoticed: bool = False) -> AsyncIterator[tuple[str, list[asyncio.StreamWriter]]]:
    """Another address of `address`, and both ends of each connection, the clients' first. With `unnoticed`, who is at
    `address` does not hear that the other end of a connection has gone: to him it is only silent."""
    host, port = address.removeprefix("tcp://").split(":")
    ends: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, closes: bool) -> None:
        with_data = True
        while with_data:
            try:
                data = await reader.read(65536)
                writer.write(data)
                await writer.drain()
                with_data = bool(data)
            except ConnectionError:
                with_data = False
        if closes:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        ends.extend((writer, there_writer))
        await asyncio.gather(
            carry(reader, there_writer, closes=not unnoticed), carry(there_reader, writer, closes=True)
        )

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}", ends
    finally:
        listener.close()
        for end in ends:
            end.close()
