"""The demo model behind real Ray Serve, on the session's cluster."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from ports import free_port

QUEUE = 8
ROWS = 4


@pytest.fixture(scope="session")
def serve_url(ray_cluster: None) -> Iterator[str]:
    """http://127.0.0.1:PORT of a running application; Serve's Python proxy, as with a bare `serve run`."""
    port = free_port()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's and Serve's own, at import and start
        from ray import serve

        from raylm.serving.run import deploy
        from raylm.serving.serve_file import serve_config

        config = serve_config("deployments/llm.yaml", host="127.0.0.1", port=port)
        model = config["applications"][0]["args"]["models"][0]
        model["engine"] = {
            "model": {"path": "smollm2-135m", "max_model_len": 2048},
            "load": {"from_peer": True},  # Which a CPU cannot do: it reads files, after all that comes before.
            "cache": {"cpu_memory_gib": 0.25},
            "scheduler": {"max_num_seqs": ROWS, "max_num_batched_tokens": 256, "max_queued_requests": QUEUE},
        }
        deploy(config)
    yield f"http://127.0.0.1:{port}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        serve.shutdown()
