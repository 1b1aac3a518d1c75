"""Write helm/raylm/values.schema.json: values_schema.yaml, and raylm's own configuration for service.args.

So helm refuses a wrong engine setting with the same limits as raylm itself. Run it after a change of raylm/config or of
values_schema.yaml; a test says when that was forgotten.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from raylm.config.application import AppConfig

HERE = Path(__file__).parent
TARGET = HERE / "raylm" / "values.schema.json"


def values_schema() -> str:
    """The content of values.schema.json."""
    schema = yaml.safe_load((HERE / "values_schema.yaml").read_text(encoding="utf-8"))
    application = AppConfig.model_json_schema()
    parts = {**application.pop("$defs"), "AppConfig": application}
    # In YAML an engine is its content, or the name of a file; if/then tells which of them an error is about.
    engine = parts["ModelDeployment"]["properties"]["engine"]
    parts["ModelDeployment"]["properties"]["engine"] = {
        "type": ["string", "object"],
        "if": {"type": "object"},
        "then": {"$ref": engine["$ref"]},
    }
    schema["$defs"].update(parts)
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(values_schema(), encoding="utf-8")
