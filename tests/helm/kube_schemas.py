"""Manifests against the schemas of Kubernetes and of the custom resources in schemas/."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml
from rendered import Document

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = ("1.28", "1.37")


def check(document: Document) -> None:
    """Raises jsonschema.ValidationError (kubernetes_validate's is one) where a manifest is not what its kind allows."""
    kind, version = str(document["kind"]), str(document["apiVersion"])
    if kind in ("RayService", "RayJob", "RayCronJob", "ServiceMonitor", "PodMonitor", "HTTPRoute"):
        jsonschema.Draft7Validator(custom_schema(version, kind)).validate(document)
        return
    for release in KUBERNETES:
        kubernetes_validate.validate(document, release, strict=True)


@cache
def custom_schema(api_version: str, kind: str) -> Document:
    group, version = api_version.split("/")
    path = SCHEMAS / f"{group}_{kind.lower()}s.yaml.gz"
    definition = yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)
    (schema,) = (
        entry["schema"]["openAPIV3Schema"] for entry in definition["spec"]["versions"] if entry["name"] == version
    )
    return closed(schema)


def closed(schema: Document) -> Document:
    """The same schema without room for unknown keys, which an API server would drop without a word."""
    inner = {
        key: {name: closed(part) for name, part in value.items()}
        if key == "properties"
        else closed(value)
        if key in ("items", "additionalProperties") and isinstance(value, dict)
        else value
        for key, value in schema.items()
    }
    if "properties" in inner and not inner.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    return inner
