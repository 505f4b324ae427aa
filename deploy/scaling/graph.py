"""`async-rl plan --graph CONFIG`: the stages of a config (`async_rl/config/pipeline.py`), as text or as SVG."""

from html import escape

from async_rl.config.pipeline import Pipeline, Stage

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 172, 58, 62, 26, 24
"""Of a box, unless a name is longer, of the space between boxes, and around all, in pixels."""

LETTER = 9
"""As wide as most letters of a name at most."""

COLOURS = {"instances": "#d7e8fb", "producer": "#e2f2dd", "service": "#fdf0cf", "trainer": "#f6dede"}


def text_of(pipeline: Pipeline) -> str:
    """A line for each stage, in the order of the calls; those of one number need nothing of each other."""
    rows = [("", "stage", "place", "kind", "reads", "writes")]
    for number, wave in enumerate(pipeline.waves, start=1):
        for stage in wave:
            kind = f"{stage.kind}, weights {stage.weights}" if stage.weights else stage.kind
            rows.append(
                (str(number), stage.name, stage.place, kind, ", ".join(stage.reads) or "-", ", ".join(stage.writes))
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def svg_of(pipeline: Pipeline) -> str:
    """The same as a picture: a column for each number, an arrow from what writes to what reads."""
    box = max(WIDTH, LETTER * max(len(stage.name) for stage in pipeline.stages))
    places = {
        stage.name: (MARGIN + x * (box + GAP_X), MARGIN + y * (HEIGHT + GAP_Y))
        for x, wave in enumerate(pipeline.waves)
        for y, stage in enumerate(wave)
    }
    width = 2 * MARGIN + len(pipeline.waves) * (box + GAP_X) - GAP_X
    height = 2 * MARGIN + max(map(len, pipeline.waves)) * (HEIGHT + GAP_Y) - GAP_Y
    writers = {name: stage for stage in pipeline.stages for name in stage.writes}
    arrows: dict[tuple[str, str], list[str]] = {}
    for stage in pipeline.stages:
        for name in stage.reads:
            arrows.setdefault((writers[name].name, stage.name), []).append(name)
    parts = [
        _arrow(places[begin], places[end], box, number / len(arrows), names)
        for number, ((begin, end), names) in enumerate(arrows.items())
    ]
    parts += [_box(stage, places[stage.name], box) for stage in pipeline.stages]
    marker = (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12">{marker}{"".join(parts)}</svg>\n'
    )


def _box(stage: Stage, place: tuple[int, int], width: int) -> str:
    x, y = place
    small = 'font-size="9"'
    lines = (
        (stage.name, 'font-weight="bold"'),
        (f"{stage.kind}, {stage.place}", small),
        (f"weights {stage.weights}" if stage.weights else "", small),
    )
    texts = "".join(
        f'<text x="{x + width / 2:g}" y="{y + 19 + 15 * i}" text-anchor="middle" {style}>{escape(line)}</text>'
        for i, (line, style) in enumerate(lines)
    )
    colour = COLOURS[stage.place]
    return f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" fill="{colour}" stroke="#555"/>{texts}'


def _arrow(begin: tuple[int, int], end: tuple[int, int], width: int, lane: float, names: list[str]) -> str:
    """`lane`, from 0 to 1, is its place in the space below the row where it begins, if it passes columns."""
    x1, y1, x2, y2 = begin[0] + width, begin[1] + HEIGHT / 2, end[0], end[1] + HEIGHT / 2
    half = GAP_X / 2
    if x2 - x1 <= GAP_X:
        path = f"M{x1} {y1:g}C{x1 + half:g} {y1:g} {x2 - half:g} {y2:g} {x2} {y2:g}"
    else:
        y = begin[1] + HEIGHT + 4 + lane * (GAP_Y - 8)
        path = (
            f"M{x1} {y1:g}C{x1 + half:g} {y1:g} {x1 + half:g} {y:.1f} {x1 + GAP_X} {y:.1f}H{x2 - GAP_X}"
            f"C{x2 - half:g} {y:.1f} {x2 - half:g} {y2:g} {x2} {y2:g}"
        )
    what = escape(", ".join(names))
    return f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#end)"><title>{what}</title></path>'
