"""Runs assertions against a module in another sandbox (`calls.py`): its functions are calls of that sandbox.

Nothing of the module's code runs here. Messages to the outside: `?` and a call, or `=` and whether a test passed.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys

from async_rl.parts.sandbox.inside.confinement import confine, receive, send
from async_rl.parts.sandbox.inside.plain_data import dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class SolutionLost(BaseException):
    """The module's process has ended, or was too slow."""


class Solution:
    """The other sandbox; `lost` if it did not answer a call of the current test."""

    def __init__(self, connection: int) -> None:
        self.lost = False
        self._connection = connection

    def ask(self, do: str, target: str | int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        send(self._connection, b"?" + dumps([do, target, list(args), kwargs], _number).encode())
        answer = receive(self._connection)
        if not answer:
            self.lost = True
            raise SolutionLost
        outcome, value, more = loads(answer, lambda number: Remote(self, number))
        if outcome == "raised":
            kind = getattr(builtins, value)
            raise kind(more) if issubclass(kind, Exception) else RuntimeError(value)
        for arg, changed in zip(args, more, strict=True):
            _change(arg, changed)
        return value


def _change(arg: Any, changed: Any) -> None:
    """Does to a test's own argument what the function did to its copy."""
    if type(arg) is type(changed) is list:
        arg[:] = changed
    elif type(arg) is type(changed) and type(arg) in (dict, set):
        arg.clear()
        arg.update(changed)


class Remote:
    """An object of the module. It equals nothing but itself: its own equality is not asked."""

    def __init__(self, solution: Solution, target: str | int) -> None:
        self.__dict__["_remote"] = solution, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _ask(self, "call", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask(self, "get", (name,))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", (key,))

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __iter__(self) -> Any:
        return iter(_ask(self, "items"))

    def __bool__(self) -> bool:
        return True


def _ask(remote: Remote, do: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    solution, target = remote.__dict__["_remote"]
    return solution.ask(do, target, args, kwargs or {})


def _number(value: Any) -> int:
    target = value.__dict__["_remote"][1] if type(value) is Remote else None
    if not isinstance(target, int):
        raise TypeError(f"a test gives the solution a {type(value).__name__}: expected plain data")
    return target


def main(connection: int, request: dict[str, Any]) -> None:
    """Runs the tests in their order; ends after the last one."""
    confine(request)
    sys.set_int_max_str_digits(0)
    solution = Solution(connection)
    names: dict[str, Any] = {"__name__": "tests"}
    wanted = _names_of(request["setup"], *request["tests"])
    # A name of Python's own means Python's, and one that the tests define is theirs, even if they fail before they do:
    # a module that defines `abs`, or `math`, or a test's `check`, must not judge itself.
    names.update({name: __import__(name) for name in wanted & sys.stdlib_module_names})
    theirs = wanted & set(request["names"]) - sys.stdlib_module_names - set(dir(builtins)) - _bound_by(request["setup"])
    names.update({name: Remote(solution, name) for name in theirs})
    if request["entry"] is not None:
        names["__entry__"] = _entry(solution, request["entry"], request["names"])
    _passes(request["setup"], names, solution)
    for test in request["tests"]:
        send(connection, b"=" + bytes([_passes(test, names, solution)]))
    os._exit(0)


def _entry(solution: Solution, name: str, defined: list[str]) -> Any:
    """The function under test, or the method of LeetCode's class, of a new object for each call."""
    if name in defined:
        return Remote(solution, name)
    return lambda *args, **kwargs: getattr(Remote(solution, "Solution")(), name)(*args, **kwargs)


def _passes(test: str, names: dict[str, Any], solution: Solution) -> bool:
    solution.lost = False
    try:
        exec(compile(test, "<test>", "exec"), names)
    except BaseException:
        return False
    # A test that catches everything has not seen its failure.
    return not solution.lost


def _bound_by(source: str) -> set[str]:
    """Names that the statements of a module bind; not those in its functions and classes."""
    found: set[str] = set()
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):
        return found
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        waiting += ast.iter_child_nodes(node)
    return found


def _names_of(*sources: str) -> set[str]:
    found = set()
    for source in sources:
        try:
            found |= {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        except (SyntaxError, ValueError, RecursionError):
            continue
    return found
