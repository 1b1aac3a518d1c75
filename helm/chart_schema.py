"""Write helm/raylm/values.schema.json: values_schema.yaml, and raylm's own configuration for service.models,
service.ingress and service.front.

So helm refuses a wrong engine setting with the same limits as raylm itself. Run it after a change of raylm/config or of
values_schema.yaml; a test says when that was forgotten.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from raylm.config.application import IngressConfig, ModelDeployment
from raylm.config.base import FrozenConfig
from raylm.config.front import FrontConfig

HERE = Path(__file__).parent
TARGET = HERE / "raylm" / "values.schema.json"


def values_schema() -> str:
    """The content of values.schema.json."""
    schema = yaml.safe_load((HERE / "values_schema.yaml").read_text(encoding="utf-8"))
    parts: dict[str, Any] = {
        "ServiceModel": _section(ModelDeployment, {"replicas": "replicas", "autoscaling": "autoscaling"}),
        "ServiceIngress": _section(IngressConfig, {"replicas": "replicas"}),
        "ServiceFront": _front(),
    }
    for part in list(parts.values()):
        parts |= part.pop("$defs", {})
    # In YAML an engine is its content, or the name of a file; if/then tells which of them an error is about.
    model = parts["ServiceModel"]["properties"]
    model["engine"] = {
        "type": ["string", "object"],
        "if": {"type": "object"},
        "then": {"$ref": model["engine"]["$ref"]},
    }
    schema["$defs"].update(parts)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _section(config: type[FrozenConfig], of_serve: dict[str, str]) -> dict[str, Any]:
    """The schema of an application's args in the chart: its one endpoint is not named, options of Serve are beside."""
    schema = config.model_json_schema()
    del schema["properties"]["endpoint"]
    schema["properties"] |= {key: {"$ref": f"#/$defs/{name}"} for key, name in of_serve.items()}
    return schema


def _front() -> dict[str, Any]:
    """The schema of HAProxy's limits. Its certificate is a Secret's, and a socket of the pod reaches nobody."""
    schema = FrontConfig.model_json_schema()
    for key in ("tls", "unix_socket"):
        del schema["properties"][key]
    del schema["$defs"]
    return schema


if __name__ == "__main__":
    TARGET.write_text(values_schema(), encoding="utf-8")
