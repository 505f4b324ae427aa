"""An API server of Kubernetes as far as helm asks one before a change: its kinds, and its objects."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAMESPACE = "rl"


def _plural(kind: str) -> str:
    return kind.lower().removesuffix("y") + ("ies" if kind.endswith("y") else "s")


def _group_path(api_version: str) -> str:
    return f"/apis/{api_version}" if "/" in api_version else f"/api/{api_version}"


def _answers(kinds: Sequence[Any], objects: Sequence[Any]) -> dict[str, Any]:
    """Bodies by path: the API's description of itself, with the kinds of some objects; and objects in the namespace."""
    resources: dict[str, list[Any]] = {}
    for each in kinds:
        kind = each["kind"]
        resources.setdefault(each["apiVersion"], []).append(
            {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get", "create"]}
        )
    versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in resources if "/" in name]
    groups = [
        {"name": each["groupVersion"].split("/")[0], "versions": [each], "preferredVersion": each} for each in versions
    ]
    found: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
    }
    for name, listed in resources.items():
        found[_group_path(name)] = {"kind": "APIResourceList", "groupVersion": name, "resources": listed}
    for each in objects:
        path = f"{_group_path(each['apiVersion'])}/namespaces/{NAMESPACE}/{_plural(each['kind'])}"
        found[f"{path}/{each['metadata']['name']}"] = each
    return found


@contextmanager
def api_server(kinds: Sequence[Any], objects: Sequence[Any]) -> Iterator[str]:
    """The URL of a server that knows the kinds of some objects and has `objects`; it changes nothing."""
    answers = _answers(kinds, objects)
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or missing).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
