"""What the sources may not do: turn bytes into objects or code by ways that run whatever the bytes say."""

import ast

import pytest

from tests.support import ROOT

PACKAGES = ("async_rl", "inference_service", "trainer", "deploy")
FORBIDDEN = {"eval", "exec", "compile", "os.system", "os.popen", "marshal.load", "marshal.loads", "yaml.load"}
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"}
BETWEEN_PARENT_AND_CHILD = {
    "async_rl/shared/workers/child.py",
    "async_rl/shared/workers/worker.py",
}
"""The parent pickles over a pipe that nobody else has an end of; the child answers in JSON."""

OF_THE_USER = {"async_rl/shared/programs/by_value.py"}
"""Functions that a user gave, in the folder of the run, as a file that `python:` names would be."""

IN_A_SANDBOX = "async_rl/parts/sandbox/inside/"
"""Its job is to run programs, where they harm nobody."""


def offences(source: str) -> list[str]:
    """Every call in the source that would execute data, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"line {node.lineno}: import of {name}" for name in names if name.split(".")[0] in PICKLES]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            unsafe_load = name == "torch.load" and keywords.get("weights_only") != "True"
            shell = name.startswith("subprocess.") and keywords.get("shell", "False") != "False"
            pickled = keywords.get("allow_pickle", "False") != "False"
            if name in FORBIDDEN or unsafe_load or shell or pickled:
                found.append(f"line {node.lineno}: {name}(...)")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled_evaluated_or_run_by_a_shell(package: str) -> None:
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in sorted((ROOT / package).rglob("*.py"))}
    allowed = {path for path in found if path.startswith(IN_A_SANDBOX)}
    allowed |= BETWEEN_PARENT_AND_CHILD | OF_THE_USER
    assert not {path: lines for path, lines in found.items() if lines and path not in allowed}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "subprocess.run(line, shell=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(source: str) -> None:
    assert offences(source)
    assert not offences("torch.load(path, weights_only=True)\nmodel.eval()\nsubprocess.run(['ls'])\nre.compile('x')")
