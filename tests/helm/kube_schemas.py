"""Manifests against the schemas of Kubernetes and of the custom resources in schemas/."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

from tests.helm.rendered import Document

SCHEMAS = Path(__file__).parent / "schemas"
CUSTOM = (
    "RayService",
    "RayCluster",
    "RayJob",
    "RayCronJob",
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
    "HTTPRoute",
)
KUBERNETES = ("1.28", "1.37")


def check(document: Document) -> None:
    """Raises jsonschema.ValidationError (kubernetes_validate's is one) where a manifest is not what its kind allows."""
    kind, version = str(document["kind"]), str(document["apiVersion"])
    if kind in CUSTOM:
        jsonschema.Draft7Validator(custom_schema(version, kind)).validate(document)
        return
    for release in KUBERNETES:
        kubernetes_validate.validate(document, release, strict=True)


@cache
def custom_schema(api_version: str, kind: str) -> Document:
    return closed(_definition(api_version, kind)["schema"]["openAPIV3Schema"])


def subresources(api_version: str, kind: str) -> Document:
    return _definition(api_version, kind).get("subresources", {})


@cache
def _definition(api_version: str, kind: str) -> Document:
    group, version = api_version.split("/")
    path = SCHEMAS / f"{group}_{kind.lower()}s.yaml.gz"
    definition = yaml.load(gzip.decompress(path.read_bytes()), Loader=yaml.CSafeLoader)
    (entry,) = (one for one in definition["spec"]["versions"] if one["name"] == version)
    return entry


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
