"""Runs the code of a notebook in order, in one plain Python process: `python -m tests.support.notebook FILE MODEL`.

In place of a kernel: a cell's text is known to tracebacks, and the value of its last expression is shown as HTML.
"""

import ast
import json
import linecache
import sys
from pathlib import Path
from typing import Any

NAME = "Qwen/Qwen3-0.6B"
"""The model that the notebooks name; MODEL takes its place."""


def run(file: Path, model: str) -> None:
    main: dict[str, Any] = vars(sys.modules["__main__"])
    for number, cell in enumerate(json.loads(file.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        text, name = "".join(cell["source"]).replace(NAME, model), f"<cell {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        module = ast.parse(text, name)
        last = module.body.pop() if isinstance(module.body[-1], ast.Expr) else None
        exec(compile(module, name, "exec"), main)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), main)
            shown = value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)
            print(f"[{number}] {shown[:500]}", flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
