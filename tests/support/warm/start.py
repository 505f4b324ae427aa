"""A start of a program as data: taken from what `subprocess` was asked for, and carried out after a fork."""

import fcntl
import importlib
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

TRAINS = ("async_rl.trainer", "trainer.verify")

STARTS_OTHERS = (
    *TRAINS,
    "async_rl.producer",
    "async_rl.torchrun",
    "async_rl.shared.programs.process_guard",
    "deploy.kubernetes.training_pod",
    "deploy.local.evaluate",
    "deploy.local.run",
    "deploy.quickstart",
    "deploy.slurm.task",
    "deploy.verify",
    "torch.distributed.run",
)
"""Programs that get a warm interpreter of their own, from which their children are forked."""

LEAVES = (
    *("async_rl.evaluation", "inference_service", "trainer", "trainer.export"),
    *("deploy.quickstart.warm_start", "trainer.verify.distance"),
    *("async_rl.checks.preflight.trial", "async_rl.rollouts.rewards.worker", "async_rl.rollouts.agents.program_worker"),
    *("tests.support.code_worker", "tests.support.receiving_instance"),
    *("tests.support.scripted_instance", "tests.support.stream_receiver", "tests.support.warm.facts"),
)
"""Programs whose children, if any, are started in the ordinary way."""

TRAINING_RANKS = "tests.support.trainer."
"""So begin the names of the tests' own training ranks."""

ROOT = Path(__file__).parents[3]
PACKAGES = ("async_rl", "deploy", "inference_service", "tests", "trainer")
PACKAGES_OF_STARTERS = ("async_rl", "deploy")

READ_BY_IMPORTS = (
    *("ASCEND_", "ATEN_", "CUDA_", "DNNL_", "GLIBC_", "GOMP_", "HF_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_"),
    *("LD_", "MALLOC_", "MKL_", "ONEDNN_", "OPENBLAS_", "PYTHON", "PYTORCH_", "SSL_", "TORCH", "TRANSFORMERS_", "USE_"),
    "XDG_",
)
"""Beginnings of variables that Python, the C library, torch, transformers and aiohttp read when they are loaded."""

READ_LATER = (
    *("CUDA_VISIBLE_DEVICES", "ONEDNN_PRIMITIVE_", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "TORCHELASTIC_"),
    "TORCH_NCCL_",
)
"""Among these, what is read later, or is carried out here."""

PATH = "PYTHONPATH"

STARTED = 3
"""In a fork: the end of the pipe that its starter reads until it is closed."""

LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Start:
    """One start of `python [-u] -m module`, whose descriptors are sent beside it: standard input, output and error,
    and the pipe that the starter reads until the program runs. In place of python a script for it may stand."""

    words: list[str]
    module: str
    environment: dict[str, str]
    directory: str
    session: bool
    group: int
    before: str | None
    ignored: list[int]
    blocked: list[int]
    umask: int
    cores: list[int]
    limits: list[tuple[int, int, int]]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Start":
        return cls(**json.loads(text))

    @property
    def starts_others(self) -> bool:
        return self.module in STARTS_OTHERS

    @property
    def command(self) -> list[str]:
        """As the kernel shows it."""
        return [sys.executable, *self.words] if self.script else self.words

    @property
    def script(self) -> str | None:
        return None if self.words[0] == sys.executable else self.words[0]


def start_of(
    words: Sequence[str | bytes | os.PathLike[str]],
    environment: Mapping[str, str],
    directory: str | None,
    session: bool,
    group: int,
    before: Callable[[], Any] | None,
    warm: Mapping[str, str],
) -> Start | None:
    """What a warm interpreter with the environment `warm` is to do; None if it cannot do it."""
    texts = [os.fsdecode(word) for word in words]
    options = texts[1:3] if texts[1:2] == ["-u"] else texts[1:2]
    module = texts[len(options) + 1] if options[-1:] == ["-m"] and len(texts) > len(options) + 1 else ""
    is_known = module in STARTS_OTHERS or module in LEAVES or module.startswith(TRAINING_RANKS)
    where = Path.cwd() / (directory or "")
    if not is_known or not _is_python(texts[0]) or not _has_imports_of(warm, environment, str(where)):
        return None
    name = None if before is None else _name_of(before)
    if not where.is_dir() or _has_its_own(where, module) or (before is not None and name is None):
        return None
    return Start(
        words=texts,
        module=module,
        environment=dict(environment),
        directory=str(where),
        session=session,
        group=group,
        before=name,
        ignored=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
        blocked=[int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        umask=_umask(),
        cores=sorted(os.sched_getaffinity(0)),
        limits=[(limit, *resource.getrlimit(limit)) for limit in LIMITS],
    )


def _is_python(program: str) -> bool:
    """Whether it is this interpreter, or a script that names it in its first line."""
    if program == sys.executable:
        return True
    try:
        with Path(program).open("rb") as file:
            return file.readline() == f"#!{sys.executable}\n".encode()
    except OSError:
        return False


def _has_its_own(directory: Path, module: str) -> bool:
    """Whether the program would import other packages in it than those that the warm interpreter has imported."""
    packages = PACKAGES_OF_STARTERS if module in STARTS_OTHERS and module not in TRAINS else PACKAGES
    files = (directory / name for package in packages for name in (package, f"{package}.py"))
    return any(file.exists() and file.resolve().parent != ROOT for file in files)


def _has_imports_of(warm: Mapping[str, str], environment: Mapping[str, str], directory: str) -> bool:
    """Whether imports read the same in both, but for a working directory that PYTHONPATH begins with."""
    expected, given = _of_imports(warm), _of_imports(environment)
    if given != expected and _begins_with(given, directory):
        _, _, rest = given.pop(PATH).partition(os.pathsep)
        given |= {PATH: rest} if rest else {}
    return given == expected


def _of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BY_IMPORTS) and not name.startswith(READ_LATER)
    }


def _begins_with(environment: Mapping[str, str], directory: str) -> bool:
    return environment.get(PATH, "").partition(os.pathsep)[0] == directory


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _name_of(function: Callable[[], Any]) -> str | None:
    """`module:function` under which it can be imported, also one of the program that runs; None if it has none."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "<")
    if module == "__main__":
        spec = sys.modules["__main__"].__spec__
        module = spec.name if spec else ""
    return f"{module}:{name}" if module and name.isidentifier() else None


def become(start: Start, descriptors: Sequence[int], set_by_imports: Mapping[str, str]) -> None:
    """Makes this process, a fresh fork, the one that `start` asks for; the fourth descriptor stays open as number 3.

    Variables that modules set when they are imported are what the starter gave, where it gave any.
    """
    spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, STARTED + 1) for descriptor in descriptors]
    for number, descriptor in enumerate(spare):
        os.dup2(descriptor, number)
    os.closerange(STARTED + 1, os.sysconf("SC_OPEN_MAX"))
    os.umask(start.umask)
    os.sched_setaffinity(0, start.cores)
    for limit, soft, hard in start.limits:
        if resource.getrlimit(limit) != (soft, hard):
            resource.setrlimit(limit, (soft, hard))
    if start.session:
        os.setsid()
    elif start.group >= 0:
        os.setpgid(0, start.group)
    _take_signals(start)
    os.chdir(start.directory)
    os.environ.clear()
    os.environ.update({**set_by_imports, **start.environment})


def _take_signals(start: Start) -> None:
    """As a new interpreter has them: those that the starter ignores stay ignored."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        ignored = number in start.ignored or number in (signal.SIGPIPE, signal.SIGXFSZ)
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        handler = signal.SIG_IGN if ignored else usual
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked)


def prepare_interpreter(start: Start, path: Sequence[str]) -> None:
    """Gives Python its own streams, arguments, search path and random numbers; `path` is that of the libraries."""
    if start.before is not None:
        module, name = start.before.split(":")
        getattr(importlib.import_module(module), name)()
    unbuffered = start.words[1] == "-u" or bool(start.environment.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = _stream(sys.stdin, BufferedReader(FileIO(0, "rb", closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(sys.stdout, _output(1), unbuffered)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(sys.stderr, _output(2), unbuffered, True)  # type: ignore[misc]
    sys.orig_argv = list(start.command)
    sys.argv = start.words if start.script else ["-m", *start.words[start.words.index("-m") + 2 :]]
    in_directory = _begins_with(start.environment, start.directory) and list(path[:1]) != [start.directory]
    of_module = not start.environment.get("PYTHONSAFEPATH")
    first = str(Path(start.script).parent) if start.script else start.directory
    sys.path[:] = [*[first] * of_module, *[start.directory] * in_directory, *path]
    importlib.invalidate_caches()
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(int(start.environment.get("OMP_NUM_THREADS") or len(start.cores)))


def _stream(
    like: TextIO, buffer: BufferedReader | BufferedWriter, unbuffered: bool = False, by_line: bool = False
) -> TextIOWrapper:
    return TextIOWrapper(
        buffer, like.encoding, like.errors, line_buffering=by_line or buffer.isatty(), write_through=unbuffered
    )


def _output(number: int) -> BufferedWriter:
    return BufferedWriter(FileIO(number, "wb", closefd=False))
