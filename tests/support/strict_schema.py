"""Checks objects of Kubernetes strictly: unknown keys are errors, in custom resources as in core objects."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate

from tests.support import ROOT

CRDS = ROOT / "tests" / "deploy" / "kubernetes" / "crds"
CORE_VERSION = "1.37"

Object = Mapping[str, Any]


def check(thing: Object) -> None:
    """Checks one object, and what it holds of core objects.

    Raises:
        Exception: with the place that the schema does not allow.
    """
    resource = _resources().get((thing["apiVersion"], thing["kind"]))
    if resource is None:
        kubernetes_validate.validate(thing, CORE_VERSION, strict=True)
        return
    jsonschema.validate(thing, resource)
    for pod_spec in _pod_specs(resource, thing):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod_spec}
        kubernetes_validate.validate(pod, CORE_VERSION, strict=True)
    for template in thing["spec"].get("replicatedJobs", []):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": template["template"]["spec"]}
        kubernetes_validate.validate(job, CORE_VERSION, strict=True)


@cache
def _resources() -> dict[tuple[str, str], Any]:
    found = [json.loads(path.read_text()) for path in CRDS.glob("*.json")]
    return {(each["apiVersion"], each["kind"]): _closed(each["openAPIV3Schema"]) for each in found}


def _closed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` wherever it lists an object's properties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed.setdefault("additionalProperties", False)
    return closed


def _pod_specs(schema: Object, value: Any) -> Iterator[Object]:
    """The parts of `value` that `schema` leaves to Kubernetes' own PodSpec."""
    if schema.get("x-core") == "PodSpec":
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            if key in schema.get("properties", {}):
                yield from _pod_specs(schema["properties"][key], part)
    elif isinstance(value, list):
        for part in value:
            yield from _pod_specs(schema["items"], part)
