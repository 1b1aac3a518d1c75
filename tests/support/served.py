"""The demo model behind real Ray Serve, on the session's cluster: fixtures for all tests of a running server."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ports import free_port

QUEUE = 8
ROWS = 4


class Served:
    """The session's endpoint. `config` is the Serve config file's content that it was deployed from."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.url = f"http://127.0.0.1:{config['http_options']['port']}"

    def changed(self) -> dict[str, Any]:
        """A copy of the configuration, to change and deploy."""
        return copy.deepcopy(self.config)

    def deploy(self, config: dict[str, Any]) -> None:
        """What `serve deploy` does; returns when every model answers."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray's and Serve's own, at import and start
            from tests.support.deployed import deploy

            deploy(config)


@pytest.fixture(scope="session")
def served(demo: None, ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running endpoint; Serve's Python proxy, as with a bare `serve run`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray import serve

        from raylm.serving.program.serve_file import serve_config

        config = serve_config("deployments/llm.yaml", host="127.0.0.1", port=free_port())
        config["applications"][1]["args"]["engine"] = {
            "model": {"path": "smollm2-135m", "max_model_len": 2048},
            "runtime": {"profile_folder": str(tmp_path_factory.mktemp("traces"))},
            "load": {"from_peer": True},  # Which a CPU cannot do: it reads files, after all that comes before.
            "cache": {"cpu_memory_gib": 0.25},
            "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 256, "max_queued_requests": QUEUE},
        }
        # A comment after a second of silence, for tests of streams that wait; a page that may call.
        http = {"keep_alive_s": 1.0, "cors_origins": ["https://chat.example.org"]}
        config["applications"][0]["args"] |= {"http": http}
    running = Served(config)
    running.deploy(config)
    yield running
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serve.shutdown()


@pytest.fixture(scope="session")
def serve_url(served: Served) -> str:
    """http://127.0.0.1:PORT of the session's endpoint."""
    return served.url
