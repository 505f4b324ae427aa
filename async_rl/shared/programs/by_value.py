"""Functions and classes of scripts and notebooks by value: a file `NAME.py` that a setting names as
`python:NAME.py:NAME`, and beside it `NAME.pkl`, which it loads; written by `async_rl.api`, loaded by workers.

The text of `NAME.py` changes with the code, what the code refers to, and nothing else: it identifies a reward as any
other file does, and a resumed run compares it. The number of a line and the name of a notebook's cell do not count.
"""

import functools
import hashlib
import inspect
import io
import linecache
import pickle
import re
import sys
import textwrap
from collections import ChainMap
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar, TypeVar

from async_rl.errors import ConfigError
from async_rl.shared.files import write_file
from async_rl.shared.programs.user_file import PREFIX

MODULE = '''"""{setting} of this run, as it was given in Python; async_rl wrote this file, and the one that it loads.

Its code, and all that it refers to, have the sha256 {digest}.
"""

{source}
from async_rl.shared.programs.by_value import load_value

{name} = load_value(__file__)
'''


@dataclass(frozen=True, slots=True)
class Pickled:
    """A function or class as bytes; `texts` are of the cells and lines of code that are in no file, by their names."""

    content: bytes
    digest: str
    texts: dict[str, list[str]]
    source: str

    def write(self, setting: str, path: Path) -> None:
        """Writes `path`, a .py file, and the .pkl file beside it, into a folder that exists.

        Raises:
            WriteFailed: it cannot be written.
        """
        found_in = [str(Path(each).absolute()) for each in sys.path]  # an empty one is the working directory
        write_file(path.with_suffix(".pkl"), pickle.dumps((found_in, self.texts)) + self.content)
        text = MODULE.format(setting=setting, digest=self.digest, source=self.source, name=path.stem)
        write_file(path, text)


def setting_of(path: Path) -> str:
    """The value of a setting that names what `Pickled.write` has written to this path."""
    return f"{PREFIX}{path}:{path.stem}"


def pickled(setting: str, value: Any) -> Pickled:
    """The value of a setting, pickled with all that it refers to but modules, which its workers import.

    Raises:
        ConfigError: something that it refers to cannot be sent to another process; names it.
    """
    names: set[str] = set()
    try:
        content = _pickled(value, names)
        without_places = _pickled(value, None)
    except Exception as error:
        raise ConfigError(
            f"{setting}: {_culprit(value)} cannot be sent to the processes that run it: {error}; make it inside the "
            "function, or in a module that the function imports"
        ) from error
    digest = hashlib.sha256(without_places + _module_of(value)).hexdigest()
    texts = {name: lines for name in names if not Path(name).is_file() and (lines := linecache.getlines(name))}
    return Pickled(content, digest, texts, _source_of(value))


def load_value(file: str) -> Any:
    """What `Pickled.write` wrote beside this file. Its modules are found where those of its writer were."""
    with Path(file).with_suffix(".pkl").open("rb") as content:
        found_in, texts = pickle.load(content)
        sys.path += [each for each in found_in if each not in sys.path]
        for name, lines in texts.items():
            # For tracebacks: without a time of change the cache keeps them.
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        return pickle.load(content)


def _pickled(value: Any, names: set[str] | None) -> bytes:
    """With the places of its code, for tracebacks, whose files `names` gets; or, where that is None, without, and the
    same in each process."""
    # Imported here: only functions need it.
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduced(code: CodeType) -> tuple[Any, ...]:
        if names is None:
            return _made_code, ("", *reduce_code(code.replace(co_firstlineno=1, co_linetable=b""))[1])
        names.add(code.co_filename)
        return _made_code, (code.co_filename, *reduce_code(code)[1])

    sets: dict[int, tuple[int, Any]] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap(
            {CodeType: reduced, _CACHED: _reduced_cache}, cloudpickle.Pickler.dispatch_table
        )

        def persistent_id(self, each: Any) -> Any:
            if names is not None:
                return None
            if type(each) in _SETS:
                # Its order is that of hashes, which each process has its own of. One that holds itself comes again.
                if id(each) in sets:
                    return sets[id(each)][0]
                sets[id(each)] = len(sets), each
                return sorted(each, key=_order)
            return each.__name__ if isinstance(each, TypeVar) else None

        def reducer_override(self, each: Any) -> Any:
            found = super().reducer_override(each)
            if found is NotImplemented:
                return _refuse_name_in_main(each) if type(each) not in self.dispatch_table else found
            if names is None and isinstance(each, type) and isinstance(found, tuple):
                # By this number a worker knows a class again; it is made by chance.
                return found[0], tuple(None if _is_number(one) else one for one in found[1]), *found[2:]
            if names is None and isinstance(each, FunctionType) and isinstance(found, tuple):
                # The globals that it is made with: the path of its script, which may be moved, is one of them.
                code, base, *others = found[1]
                places = {name: value for name, value in base.items() if name not in ("__file__", "__path__")}
                return found[0], (code, places, *others), *found[2:]
            return found

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


_SETS = (set, frozenset)
_CACHED = type(functools.cache(len))


def _order(value: Any) -> str:
    """Of a set's elements, as far as they have one that is the same in each process."""
    if isinstance(value, set | frozenset):
        return repr(sorted(map(_order, value)))
    if isinstance(value, tuple):
        return repr([_order(each) for each in value])
    return repr(value) if isinstance(value, str | bytes | int | float | None) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _reduced_cache(function: Any) -> Any:
    """Of `functools.cache`, which alone are pickled by their names: those of `__main__` by value, without answers."""
    if function.__module__ != "__main__" and "<locals>" not in function.__qualname__:
        return function.__reduce__()
    return _made_cache, (function.__wrapped__, function.cache_parameters())


def _made_cache(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _refuse_name_in_main(value: Any) -> Any:
    """
    Raises:
        PicklingError: it would be looked up in the `__main__` of a worker, which has no such name.
    """
    if getattr(value, "__module__", None) == "__main__" and isinstance(named := value.__reduce_ex__(4), str):
        raise pickle.PicklingError(f"{named} is pickled as a name of __main__, which other processes do not have")
    return NotImplemented


def _made_code(file: str, *arguments: Any) -> CodeType:
    """In the worker. cloudpickle alone leaves the name of the file out."""
    return CodeType(*arguments).replace(co_filename=file)


def _culprit(value: Any) -> str:
    """The variable that keeps a function from being pickled, or else the value itself."""
    try:
        used = inspect.getclosurevars(inspect.unwrap(value))
    except (TypeError, ValueError):
        return f"{value!r:.200}"
    for name, each in {**used.globals, **used.nonlocals}.items():
        try:
            _pickled(each, None)
        except Exception:
            return f"its variable {name!r} ({type(each).__name__})"
    return f"{value!r:.200}"


def _module_of(value: Any) -> bytes:
    """The file of a module that its workers import: the pickle has its name alone."""
    try:
        file = Path(inspect.getsourcefile(value) or "") if value.__module__ != "__main__" else None
        return file.read_bytes() if file is not None and file.is_file() else b""
    except (AttributeError, TypeError, OSError):
        return b""


def _source_of(value: Any) -> str:
    """Its text as comments, to be read; empty where Python does not have it."""
    try:
        source = textwrap.dedent(inspect.getsource(value))
    except (TypeError, OSError):
        return ""
    return "".join(f"#     {line}".rstrip() + "\n" for line in source.splitlines())
