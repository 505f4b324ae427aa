"""The page in a browser: it shows the records' numbers, live and as a file, without a script error."""

import asyncio
import json
import re
import shutil
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from async_rl.parts.dashboard.__main__ import DashboardServer
from async_rl.parts.dashboard.page import Dashboard
from async_rl.parts.dashboard.report import main as report_main
from async_rl.parts.dashboard.run_data import open_run
from async_rl.records.records import cut_run_records
from async_rl.shared.net.listener import listen
from tests.support.browser import CHROMIUM, Tab, browser_tab
from tests.support.synthetic_run import SCRIPT, SyntheticRun

pytestmark = [
    pytest.mark.browser,
    pytest.mark.distributed,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

PHONE_WIDTH = 375

BROKEN = {
    "fingerprint": 5,
    "prompt": ["x"],
    "responses": [None, {"reward": "x", "tokens": ["a", None], "rollout_logprobs": [], "trainer_logprobs": [1e308]}],
    "response_tokens_histogram": [["a", "b", "c"], [1, 2, 3]],
    "spans": [["publish", "a", "b"], [1, 2, 3]],
    "started_s": -1e308,
    "finished_s": 1e308,
    "num_responses": "5",
    "reward_mean": "x",
    "seconds": 1.7e308,
}
"""What no run writes."""


@asynccontextmanager
async def served(runs: list[SyntheticRun], token: str | None = None) -> AsyncIterator[str]:
    listener = listen("the dashboard", "127.0.0.1", 0, None)
    dashboard = Dashboard([open_run(run.run_dir) for run in runs])
    async with DashboardServer(dashboard, listener, token):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/dashboard/"


async def text_of(tab: Tab, name: str) -> str:
    text = await tab.value(f"document.getElementById('{name}').textContent")
    assert isinstance(text, str)
    return text


async def require_records(tab: Tab, run: SyntheticRun, number: int = 0) -> None:
    """The page's curves, tiles, period and proofs are those of a run's last iteration."""
    last = run.num_iterations - 1
    record = run.record(last)
    for name in ("reward_mean", "loss", "extra_metric_7", "logprob_gap_rms"):
        shown = f"document.querySelector('[data-metric={name}] [data-run=\"{number}\"]').dataset.value"
        assert float(await tab.value(shown)) == record[name]
    for name in ("reward_mean", "accuracy", "tokens_per_s"):
        shown = f"document.querySelectorAll('[data-tile={name}]')[{number}].dataset.value"
        assert float(await tab.value(shown)) == record[name]
    if number == 0:
        num_groups = len([row for row in run.groups(last) if row.get("is_trained", True)])
        summary = await text_of(tab, "period-summary")
        assert f"Iteration {last}: {num_groups} groups" in summary
        kept = 100 * float(str(record["merged_share"]))
        share = re.search(r", ([\d.]+)% of the values with adapters changed by it, ", summary)
        assert share is not None and abs(float(share[1]) - kept) <= 0.5, summary
        assert f"All {run.num_iterations} proofs hold" in await text_of(tab, "proof-summary")
        assert await tab.value("document.querySelector('#proof-table tbody td').textContent") == str(last)


async def require_no_overflow(tab: Tab) -> None:
    assert await tab.value("document.documentElement.scrollWidth <= innerWidth")


async def num_pixels(tab: Tab, selector: str, color: str) -> int:
    """How many pixels of a canvas have the colour that the theme calls so."""
    count = await tab.value(
        f"(() => {{ const canvas = document.querySelector({selector!r}), context = canvas.getContext('2d');"
        "const data = new Uint32Array(context.getImageData(0, 0, canvas.width, canvas.height).data.buffer);"
        f"context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue('--{color}');"
        "context.globalAlpha = 1; context.fillRect(0, 0, 1, 1);"
        "const [wanted] = new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer);"
        "return data.filter((pixel) => pixel === wanted).length; })()"
    )
    assert isinstance(count, int)
    return count


async def require_drawn(tab: Tab, selector: str) -> None:
    """A canvas has more than one colour."""
    await tab.wait_for(f"document.querySelector({selector!r}) !== null")
    colors = await tab.value(
        f"(() => {{ const canvas = document.querySelector({selector!r});"
        "const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;"
        "return new Set(new Uint32Array(data.buffer)).size; })()"
    )
    assert colors > 2


def test_the_page_shows_the_records_follows_the_run_and_survives_a_resume(tmp_path: Path) -> None:
    first = SyntheticRun(tmp_path / "first", num_iterations=30, num_left_out=2)
    second = SyntheticRun(tmp_path / "second", num_iterations=20, seed=1)
    first.write(last=29)
    second.write()
    evaluation = {"iteration": 20, "set": "words", "complete": True, "truncated_share": 0.25}
    (first.run_dir / "evaluations.jsonl").write_text(json.dumps(evaluation) + "\n")
    of_trained_weights = {**evaluation, "truncated_share": 0.5}
    (second.run_dir / "evaluations.jsonl").write_text(json.dumps(of_trained_weights) + "\n")
    for run, rate in ((first, 1e-6), (second, 1e-5)):
        settings = {"optimizer": {"learning_rate": rate}, "train": {"iterations": 30}}
        (run.run_dir / "config.json").write_text(json.dumps(settings))

    async def look() -> None:
        async with served([first, second]) as url, browser_tab() as tab:
            await tab.open(url)
            await require_records(tab, second, number=1)
            await require_drawn(tab, "[data-metric=reward_mean] canvas")
            await require_drawn(tab, "#period-canvas")
            await require_drawn(tab, "#instances-canvas")
            for part in ("rollout", "training", "publish", "step"):
                assert await num_pixels(tab, "#period-canvas", part) > 100, part
            assert "2 groups left out" in await text_of(tab, "left-out")
            timed = [row for row in first.groups(28) if "started_s" in row]
            started = min(row["started_s"] for row in timed)
            median = statistics.median(row["finished_s"] - started for row in timed)
            assert f"1.5 times the median of {median:.3g} s" in await text_of(tab, "stragglers")
            drawn = (
                'document.querySelector(\'[data-metric="eval/words/truncated_share"] [data-run="0"]\').dataset.value'
            )
            assert await tab.value(drawn) == "0.25"
            assert await tab.value(drawn.replace('"0"', '"1"')) == "0.5", "of the weights after the last iteration"
            rows = "[...document.querySelectorAll('#settings-body > table [data-setting]')].map((row) => row.innerText)"
            assert await tab.value(rows) == ["optimizer.learning_rate\t1e-06\t1e-05"], "what differs stands first"
            numbers = "import('./format.js').then((own) => [5e17, 999999, 1e30].map((each) => own.formatNumber(each)))"
            assert await tab.value(numbers) == ["500P", "1M", "1.0e30"]
            assert len(await tab.value("[...document.querySelectorAll('#instances-table tbody tr')].map(String)")) == 2

            first.write(first=29)
            await tab.wait_for("document.querySelector('[data-tile=iterations]').dataset.value === '30'")
            await tab.wait_for("document.getElementById('period-iteration').value === '29'")
            await require_records(tab, first)

            for name in ("samples", "proof"):
                await tab.value(f"document.getElementById('{name}-older').click()")
            await tab.wait_for("document.getElementById('samples-summary').textContent.startsWith('11 to 20 of 90 ')")
            cut_run_records(first.run_dir, first_iteration=15)
            await tab.wait_for("document.querySelector('[data-tile=iterations]').dataset.value === '15'")
            assert "All 15 proofs hold" in await text_of(tab, "proof-summary")
            assert await tab.value("document.querySelectorAll('#proof-table tbody tr').length") == 15
            await tab.wait_for("document.getElementById('samples-summary').textContent.startsWith('1 to 10 of ')")
            assert tab.errors == []

    asyncio.run(look())


def test_texts_of_a_run_are_no_markup_and_samples_can_be_chosen(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=6)
    run.write()

    async def look() -> None:
        async with served([run]) as url, browser_tab() as tab:
            await tab.open(url)
            assert SCRIPT in await text_of(tab, "samples-list")
            assert await tab.value("document.title") == "run · async-rl"
            assert await tab.value("document.querySelectorAll('#samples-list script').length") == 0
            (sample, *_) = [row for row in run.samples(5) if row["index"] == 0]
            response = sample["responses"][0]
            gaps = [a - b for a, b in zip(response["trainer_logprobs"], response["rollout_logprobs"], strict=True)]
            tokens = "document.querySelector('#samples-list .tokens').children"
            shown = await tab.value(f"[...{tokens}].map((token) => Number(token.dataset.gap))")
            assert shown == gaps
            assert await tab.value(f"{tokens}[0].style.backgroundColor !== ''")
            fill = "document.getElementById('samples-highest').value = '-0.25'"
            await tab.value(f"{fill}; document.getElementById('samples-form').requestSubmit()")
            await tab.wait_for("document.getElementById('samples-summary').textContent.startsWith('1 to 6 of 6 ')")
            assert tab.errors == []

    asyncio.run(look())


@pytest.mark.nightly
def test_records_that_are_broken_do_not_break_the_page(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=6)
    run.write()
    for name in ("metrics", "ledger", "timeline", "samples"):
        path = run.run_dir / f"{name}.jsonl"
        *others, last = [json.loads(line) for line in path.read_text().splitlines()]
        broken = [
            json.dumps({**last, **{key: value for key in last if key not in ("iteration", "index")}})
            for value in (None, "x", 2**63, 1e308, -1e308, float("nan"), [None], {"a": [None]}, 10**400)
        ]
        rows = [*map(json.dumps, others), *broken, json.dumps({**last, **BROKEN}), json.dumps(last)[:40]]
        path.write_text("\n".join(rows))

    async def look() -> None:
        async with served([run]) as url, browser_tab() as tab:
            for over in ("iteration", "hours"):
                await tab.open(url)
                await tab.value(
                    f"const axis = document.getElementById('x-axis'); axis.value = '{over}';"
                    "axis.dispatchEvent(new Event('change')); scrollTo(0, document.body.scrollHeight)"
                )
                await require_drawn(tab, "[data-metric=reward_mean] canvas")
                assert "proofs fail" in await text_of(tab, "proof-summary")
                assert "of 18 recorded groups" in await text_of(tab, "samples-summary")
                assert await tab.value("document.getElementById('message').hidden")
            await tab.value("document.getElementById('samples-text').value = 'nowhere'")
            assert tab.errors == []

    asyncio.run(look())


@pytest.mark.nightly
def test_light_dark_and_a_phones_width_differ_in_colours_and_fit(tmp_path: Path) -> None:
    run = SyntheticRun(
        tmp_path / "a-run-with-a-name-that-is-longer-than-a-phone-is-wide-in-any-font", num_iterations=12
    )
    run.write()
    background = "getComputedStyle(document.body).backgroundColor"

    async def look() -> None:
        async with served([run]) as url, browser_tab() as tab:
            await tab.open(url, theme="light")
            light = await tab.value(background)
            await tab.open(url, theme="dark", width=PHONE_WIDTH)
            dark = await tab.value(background)
            assert light != dark
            await require_no_overflow(tab)
            await require_records(tab, run)
            await tab.value("document.getElementById('theme').click()")
            assert await tab.value(background) == light
            assert tab.errors == []

    asyncio.run(look())


def test_a_run_without_records_and_a_wrong_token_are_said_in_words(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=1)
    run.run_dir.mkdir()
    (run.run_dir / "launch.json").write_text(json.dumps({}))

    async def look() -> None:
        async with browser_tab() as tab:
            async with served([run]) as url:
                await tab.open(url)
                assert "No iteration is complete yet" in await text_of(tab, "overview")
                run.write()
                await tab.wait_for("document.querySelector('[data-tile=iterations]')?.dataset.value === '1'")
                await require_records(tab, run)
                shutil.rmtree(run.run_dir)
                await tab.wait_for("document.getElementById('period-body').hidden")
                assert "No iteration is complete yet" in await text_of(tab, "overview")
                run.write()
                await tab.wait_for("document.querySelector('[data-tile=iterations]')?.dataset.value === '1'")
                assert tab.errors == []
            async with served([run], token="secret") as url:
                await tab.call("Page.navigate", {"url": url})
                await tab.wait_for("document.getElementById('token-form')?.hidden === false")
                await tab.open(f"{url}#token=secret")
                await require_records(tab, run)
                assert "secret" not in await tab.value("location.href")

    asyncio.run(look())


@pytest.mark.nightly
def test_many_instances_and_one_iteration_are_drawn_in_a_bounded_height(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path / "run", num_iterations=1, num_groups=80)
    run.write()
    (proof,) = [json.loads(line) for line in (run.run_dir / "ledger.jsonl").read_text().splitlines()]
    proof["logprob_gaps"]["instances"] = {f"http://10.0.0.{i}:80": {"tokens": i, "rms": 1e-6} for i in range(80)}
    (run.run_dir / "ledger.jsonl").write_text(json.dumps(proof) + "\n")
    rows = [{**row, "logprob_gaps": {f"http://10.0.0.{row['index']}:80": {}}} for row in run.groups(0)]
    (run.run_dir / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def look() -> None:
        async with served([run]) as url, browser_tab() as tab:
            await tab.open(url, width=PHONE_WIDTH)
            assert "The 32 of 80 instances that finished last" in await text_of(tab, "period-bands")
            assert "The 64 that came last are drawn" in await text_of(tab, "instances-summary")
            for name in ("period", "instances"):
                assert await tab.value(f"document.getElementById('{name}-canvas').clientHeight < 1500")
            # The one point is in the middle of its chart, between iterations.
            chart = "document.querySelector('[data-metric=reward_mean] canvas')"
            await tab.wait_for(f"{chart} !== null")
            middle = (
                f"(() => {{ const canvas = {chart}, half = canvas.width / 2; return new Set(new Uint32Array("
                "canvas.getContext('2d').getImageData(half, 20, half / 2, canvas.height / 2).data.buffer)).size; })()"
            )
            assert await tab.value(middle) > 2
            assert tab.errors == []

    asyncio.run(look())


def test_a_report_opens_from_a_file_with_the_same_numbers(tmp_path: Path) -> None:
    runs = [SyntheticRun(tmp_path / name, num_iterations=12 + i) for i, name in enumerate(("first", "second"))]
    for run in runs:
        run.write()
    output = tmp_path / "report.html"
    assert report_main([*(str(run.run_dir) for run in runs), "-o", str(output)]) == 0

    async def look() -> None:
        async with browser_tab() as tab:
            await tab.open(output.as_uri())
            for number, run in enumerate(runs):
                await require_records(tab, run, number)
            await require_drawn(tab, "#period-canvas")
            await tab.value("document.getElementById('period-back').click()")
            await tab.wait_for("document.getElementById('period-summary').textContent.startsWith('Iteration 10:')")
            await tab.open(output.as_uri(), theme="dark", width=PHONE_WIDTH)
            await require_no_overflow(tab)
            assert tab.errors == []

    asyncio.run(look())
