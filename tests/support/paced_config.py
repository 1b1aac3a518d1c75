"""The Serve config file's content of an endpoint whose engines have no model (tests/support/paced.py)."""

from __future__ import annotations

from typing import Any

_FIRST_TOKEN = 1000
_NUM_TOKENS = 997


def position_token(position: int) -> int:
    """The token that a paced engine gives at this position, whatever the prompt says."""
    return _FIRST_TOKEN + position % _NUM_TOKENS


def paced_config(
    port: int, *, ingresses: int, engines: int, model: dict[str, Any], face: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`model`: args of build_paced; `face`: those of the ingress."""
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": "raylm.serving.app:build_ingress",
                "args": face or {},
                "deployments": [{"name": "OpenAIIngress", "num_replicas": ingresses}],
            },
            {
                "name": "m",
                "route_prefix": None,
                "import_path": "tests.support.paced:build_paced",
                "args": model,
                "deployments": [{"name": "ModelReplica", "num_replicas": engines}],
            },
        ],
    }
