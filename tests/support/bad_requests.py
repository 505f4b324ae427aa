"""HTTP requests that a server must refuse, made from its OpenAPI document; for `fuzzing`.

A request is bad for exactly one reason, and otherwise as the document specifies: a value that no schema allows, a
missing or extra field, a body that is not JSON, a wrong content type, method, path, query or token, or bytes that are
not HTTP.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from hypothesis import strategies as st

from tests.support.schema_values import Schemas, dumps

JSON = "application/json"
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW")


class BadRequest(NamedTuple):
    """`is_http`: the connection can be reused; other requests get their own, closed for writing after it."""

    reason: str
    method: str
    raw: bytes
    is_http: bool = True

    def __repr__(self) -> str:
        return f"{self.reason}: {self.raw[:2000]!r}"


NO_JSON = st.one_of(
    st.sampled_from(
        [b"", b"{", b"}", b"[", b'{"a":', b'"', b"nul", b"{'a': 1}", b"\xff\xfe\x00", b'{"a": "\xff\xfe"}']
    ),
    st.sampled_from([b"[" * 200_000, b'{"a":' * 50_000, b"\xef\xbb\xbf{}x", b"// no\n{}", b"1 2", b"0x10", b"+1"]),
    st.binary(max_size=60).filter(lambda data: not _is_json(data)),
)
NO_HTTP = st.one_of(
    st.binary(min_size=1, max_size=80).map(lambda data: b"\x01" + data + b"\r\n\r\n"),
    st.sampled_from(
        [
            b"GET\r\n\r\n",
            b"GET /version\r\n\r\n",
            b"GET /version HTTP/9.9\r\nHost: x\r\n\r\n",
            b"GET /version HTTP/1.1\r\n\r\n",
            b"GET /a b c HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
            b"POST /pause HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
            b"POST /pause HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ]
    ),
    st.sampled_from([b"No colon", b"Spa ce: 1", b": empty", b"X\x00Y: 1", b"X: a\x00b", b"X: a\x0bb\x7f"]).map(
        lambda line: b"GET /version HTTP/1.1\r\nHost: x\r\n" + line + b"\r\n\r\n"
    ),
)


class Attacks:
    """All kinds of bad requests to the server that `document` describes; with a `token`, the server must require it."""

    def __init__(self, document: Mapping[str, Any], token: str | None, open_paths: frozenset[str]) -> None:
        self._schemas = Schemas(document)
        self._token = token
        self._operations = [
            (path, method.upper(), operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        self._paths = {path: set(methods) for path, methods in document["paths"].items()}
        self._with_body = [o for o in self._operations if "requestBody" in o[2]]
        self._with_query = [
            (path, method, parameter)
            for path, method, operation in self._operations
            for parameter in operation.get("parameters", [])
            if parameter["in"] == "query"
        ]
        self._guarded = [o for o in self._operations if o[0] not in open_paths]

    def all_kinds(self) -> st.SearchStrategy[BadRequest]:
        # Most errors are possible in bodies.
        kinds = [*[self.bad_body()] * 5, self.no_json(), self.content_type(), self.method(), self.path()]
        kinds.append(NO_HTTP.map(lambda raw: BadRequest("no HTTP", "GET", raw, is_http=False)))
        if self._with_query:
            kinds.append(self.query())
        if self._token is not None:
            kinds.append(self.token())
        return st.one_of(kinds)

    def bad_body(self) -> st.SearchStrategy[BadRequest]:
        def to(path: str, method: str, operation: Mapping[str, Any]) -> st.SearchStrategy[BadRequest]:
            bodies = self._schemas.broken(_body_schema(operation))
            return bodies.map(lambda body: self._request("bad body", method, path, dumps(body)))

        return st.one_of([to(*operation) for operation in self._with_body])

    def no_json(self) -> st.SearchStrategy[BadRequest]:
        operations = [o for o in self._with_body if o[2]["requestBody"].get("required")]
        return st.builds(
            lambda o, data: self._request("no JSON", o[1], o[0], data), st.sampled_from(operations), NO_JSON
        )

    def content_type(self) -> st.SearchStrategy[BadRequest]:
        def build(operation: Any, kind: str) -> BadRequest:
            body = dumps(self._schemas.minimal(_body_schema(operation[2])))
            return self._request("content type", operation[1], operation[0], body, kind)

        kinds = [
            "text/plain",
            "application/x-www-form-urlencoded",
            "multipart/form-data",
            "application/xml",
            "",
            "\xff",
        ]
        return st.builds(build, st.sampled_from(self._with_body), st.sampled_from(kinds))

    def method(self) -> st.SearchStrategy[BadRequest]:
        wrong = [(p, m) for p, known in self._paths.items() for m in METHODS if m.lower() not in known]
        return st.sampled_from(wrong).map(lambda pair: self._request("method", pair[1], pair[0], b""))

    def path(self) -> st.SearchStrategy[BadRequest]:
        known = sorted(self._paths)
        near = st.builds(
            lambda path, tail: path + tail,
            st.sampled_from(known),
            st.sampled_from(["/", "/x", "%00", "//", "/..", "é"]),
        )
        junk = st.one_of(near, st.text(max_size=30).map(lambda text: "/" + text))
        legal = junk.map(lambda path: quote(path, safe="/%", errors="surrogatepass"))
        unknown = legal.filter(lambda path: path not in self._paths and "/openapi.json" not in path)
        return st.builds(lambda p, m: self._request("path", m, p, b""), unknown, st.sampled_from(("GET", "POST")))

    def query(self) -> st.SearchStrategy[BadRequest]:
        def build(where: Any, value: str) -> BadRequest:
            path, method, parameter = where
            return self._request("query", method, f"{path}?{parameter['name']}={quote(value, safe='')}", b"")

        values = st.one_of(st.sampled_from(["", "junk", "2", "-1", "NaN", "a" * 5000]), st.characters(codec="utf-8"))
        return st.tuples(st.sampled_from(self._with_query), values).flatmap(
            lambda pair: (
                st.nothing()
                if self._schemas.may_accept(pair[0][2]["schema"], pair[1])
                else st.just(build(pair[0], pair[1]))
            )
        )

    def token(self) -> st.SearchStrategy[BadRequest]:
        wrong = [None, b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Bearer \xc3\xa9\xff", b"Basic YTpi", b"\xff"]
        wrong += [f"{scheme} {self._token}x".encode() for scheme in ("Bearer", "bearer", "Token")]

        def build(operation: Any, header: bytes | None) -> BadRequest:
            path, method, rest = operation
            body = dumps(self._schemas.minimal(_body_schema(rest))) if "requestBody" in rest else b""
            return self._request("token", method, path, body, authorization=header)

        return st.builds(build, st.sampled_from(self._guarded), st.sampled_from(wrong))

    def _request(
        self,
        reason: str,
        method: str,
        target: str,
        body: bytes,
        content_type: str = JSON,
        authorization: bytes | str | None = "own",
    ) -> BadRequest:
        lines = [
            f"{method} {target} HTTP/1.1".encode(),
            b"Host: x",
            b"Content-Length: %d" % len(body),
            b"Content-Type: " + content_type.encode("latin-1"),
        ]
        if authorization == "own":
            authorization = None if self._token is None else f"Bearer {self._token}".encode()
        if isinstance(authorization, bytes):
            lines.append(b"Authorization: " + authorization)
        return BadRequest(f"{reason}: {method} {target[:80]}", method, b"\r\n".join(lines) + b"\r\n\r\n" + body)


def _body_schema(operation: Mapping[str, Any]) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = operation["requestBody"]["content"][JSON]["schema"]
    return schema


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True
