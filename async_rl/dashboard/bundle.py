"""The dashboard's page as one file, with its scripts, styles and data inside; for `report`.

A browser loads no modules from other files of a disk, so each module becomes a function that returns what it exports.
"""

import base64
import hashlib
import re

from async_rl.dashboard.page import MODULES, static_file

_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (const|function|class) (\w+)", re.M)
_LOADED = re.compile(r'^<(?:link|script)\b[^>]*\b(?:href|src)="[^"]*"[^>]*>(?:</script>)?\n', re.M)


def one_page(title: str, data: str) -> str:
    """The page with `data`, a JSON text, from which it is drawn. Its policy allows these scripts and styles only."""
    style = static_file("uplot/uPlot.min.css") + static_file("style.css")
    library, own = static_file("uplot/uPlot.iife.min.js"), _joined_modules()
    policy = (
        f"default-src 'none'; script-src {_source(library)} {_source(own)}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head, body = _LOADED.sub("", static_file("index.html")).split("</head>\n")
    return (
        head.replace("<title>async-rl</title>", f"<title>{_escaped(title)}</title>").replace(
            '<meta charset="utf-8">\n',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        )
        + f"<style>{style}</style>\n</head>\n"
        + body.replace(
            "</body>",
            f'<script id="embedded" type="application/json">{embedded(data)}</script>\n'
            f"<script>{library}</script>\n<script>{own}</script>\n</body>",
        )
    )


def embedded(data: str) -> str:
    """JSON as the page holds it, without "<": an HTML parser ends a script at the first "</", in whatever text."""
    return data.replace("<", "\\u003c")


def _joined_modules() -> str:
    return '"use strict";\nconst modules = {};\n' + "".join(map(_as_function, MODULES))


def _as_function(name: str) -> str:
    """A module that sets `modules.NAME` to what it exports."""
    text = static_file(name)
    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    text = _IMPORT.sub(r"const \1 = modules.\2;", text)
    text = _EXPORT.sub(r"\1 \2", text)
    return f"modules.{name.removesuffix('.js')} = (() => {{\n{text}return {{ {exported} }};\n}})();\n"


def _source(content: str) -> str:
    """The source of a policy that allows exactly this content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
