"""Who may import whom, read from the sources' own import statements."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("async_rl", "inference_service", "trainer", "deploy")

MAY_IMPORT = {
    "async_rl": {"async_rl"},
    "inference_service": {
        "inference_service",
        "async_rl.types",
        "async_rl.errors",
        "async_rl.programs.failure_report",
        "async_rl.programs.command_line",
        "async_rl.programs.extras",
        "async_rl.config.sections",
        "async_rl.protocol.inference",
        "async_rl.weights.store",
        "async_rl.weights.stream",
        "async_rl.net.http_guard",
        "async_rl.net.local_address",
        "async_rl.weights.snapshot",
    },
    "trainer": {"trainer", "async_rl"},
    "deploy": {
        "deploy",
        "async_rl.programs.command_line",
        "async_rl.programs.extras",
        "async_rl.config.sections",
        "async_rl.config.file",
        "async_rl.errors",
        "async_rl.programs.failure_report",
        "async_rl.tracking.balance",
        "async_rl.preflight",
    },
}


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports; `from a import b` counts as `a` (and, for our packages, as `a.b` too)."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            if module in OURS:
                modules |= {f"{module}.{alias.name}" for alias in node.names}
            else:
                modules.add(module)
    return modules


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", OURS)
def test_packages_import_only_what_the_architecture_allows(package: str) -> None:
    allowed = MAY_IMPORT[package]
    for path in sources(package):
        ours = {m for m in imported_modules(path) if m.split(".")[0] in OURS}
        bad = {m for m in ours if not any(m == a or m.startswith(a + ".") for a in allowed)}
        assert not bad, f"{path.relative_to(ROOT)} imports {sorted(bad)}; {package} may import {sorted(allowed)}"


def test_only_algorithms_and_what_moves_weights_import_torch_in_async_rl() -> None:
    with_torch = {
        str(path.relative_to(ROOT / "async_rl"))
        for path in sources("async_rl")
        if any(module.split(".")[0] == "torch" for module in imported_modules(path))
    }
    assert {name for name in with_torch if not name.startswith("algorithms/")} <= {
        "collectives.py",
        "weight_store.py",
        "weight_stream.py",
        "weight_snapshot.py",
    }


def test_no_package_imports_in_a_cycle() -> None:
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in OURS
        for path in sources(package)
    }
    graph = {name: {m for m in imported_modules(path) if m in modules and m != name} for name, path in modules.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, "import cycle: " + " -> ".join((*trail, name))
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
