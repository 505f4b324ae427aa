// One small chart per column of the records, all runs in it; drawn when it comes into view.

import { byId, element, formatNumber, formatSeconds, formatTicks, runColor, themeColor } from "./format.js";
import { GROUPS, describeMetric } from "./metric_names.js";

const HEIGHT = 168;
const MARGIN = "300px";
const AXIS_WIDTH = 48;
const DIGIT_WIDTH = 6.3;
// Between iterations there is nothing.
const WHOLE_STEPS = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((factor) => factor * 10 ** power)).flat();
// Of a value: a curve that moves by less is a constant, whose last digits are no news.
const ROUNDING = 1e-6;
// Those are written with their unit.
const UNITS_OF_VALUES = ["share", "bytes"];

/** The section of curves. `runs` are the state of the page: see main.js. */
export class Curves {
  constructor(runs) {
    this.runs = runs;
    this.cards = new Map();
    this.groups = new Map();
    this.settings = { over: "iteration", smoothing: 0, find: "" };
    this.sync = uPlot.sync("curves");
    this.viewer = new IntersectionObserver((entries) => entries.forEach((entry) => this.#onView(entry)), { rootMargin: MARGIN });
    for (const [id, key] of [["x-axis", "over"], ["smoothing", "smoothing"]]) {
      byId(id).addEventListener("change", (event) => {
        this.settings[key] = key === "smoothing" ? Number(event.target.value) : event.target.value;
        this.redraw();
      });
    }
    byId("find").addEventListener("input", (event) => {
      this.settings.find = event.target.value.trim().toLowerCase();
      this.#filter();
    });
    addEventListener("resize", () => this.redraw());
  }

  /** Shows what the runs have by now; charts out of view are redrawn when they come into it. */
  update() {
    const names = new Set(this.runs.flatMap((run) => [...run.columns.keys()]));
    for (const name of names) if (!this.cards.has(name)) this.#addCard(describeMetric(name));
    for (const card of this.cards.values()) {
      this.#showLatest(card);
      card.isStale = true;
      if (card.isVisible) this.#draw(card);
    }
  }

  /** Draws anew, in other colours, sizes or settings. */
  redraw() {
    for (const card of this.cards.values()) {
      card.chart?.destroy();
      card.chart = null;
    }
    this.update();
  }

  #addCard(metric) {
    const values = element("span", { class: "values" });
    const plot = element("div", { class: "plot" });
    const unit = metric.unit && !UNITS_OF_VALUES.includes(metric.unit) ? element("span", { class: "unit" }, ` ${metric.unit}`) : null;
    const head = element("div", { class: "curve-head", title: metric.name }, element("b", {}, metric.title, unit), values);
    const root = element("article", { class: "card", "data-metric": metric.name }, head, plot);
    const card = { metric, root, plot, values, chart: null, isVisible: false, isStale: true };
    this.cards.set(metric.name, card);
    const grid = this.#gridOf(metric.group);
    const later = [...grid.children].find((other) => {
      const { place, name } = this.cards.get(other.dataset.metric).metric;
      return place > metric.place || (place === metric.place && name > metric.name);
    });
    grid.insertBefore(root, later ?? null);
    this.viewer.observe(root);
    this.#filter();
  }

  #gridOf(group) {
    if (!this.groups.has(group)) {
      const grid = element("div", { class: "grid" });
      const section = element("div", { class: "curve-group", "data-group": group }, element("h3", {}, group), grid);
      const later = GROUPS.slice(GROUPS.indexOf(group) + 1).map((name) => this.groups.get(name)).find(Boolean);
      byId("curve-groups").insertBefore(section, later?.parentElement ?? null);
      this.groups.set(group, grid);
    }
    return this.groups.get(group);
  }

  #filter() {
    for (const { metric, root } of this.cards.values()) {
      root.hidden = !`${metric.name} ${metric.title} ${metric.group}`.toLowerCase().includes(this.settings.find);
    }
    for (const grid of this.groups.values()) grid.parentElement.hidden = [...grid.children].every((card) => card.hidden);
  }

  #onView(entry) {
    const card = this.cards.get(entry.target.dataset.metric);
    card.isVisible = entry.isIntersecting;
    if (card.isVisible && card.isStale) this.#draw(card);
  }

  #showLatest({ metric, values }, at = null) {
    const shown = this.runs.filter((run) => run.isVisible && run.columns.has(metric.name));
    values.replaceChildren(...shown.map((run) => {
      const value = at ? at.get(run.number) : run.latest(metric.name);
      const text = metric.unit === "s" ? formatSeconds(value) : formatNumber(value, metric.unit);
      return element("span", { color: runColor(run.number), "data-run": run.number, "data-value": value ?? "" }, text);
    }));
  }

  #draw(card) {
    const runs = this.runs.filter((run) => run.isVisible && run.columns.has(card.metric.name) && run.iterations.length);
    const tables = runs.map((run) => this.#table(run, card.metric.name));
    const series = runs.flatMap((run) => this.#series(run));
    const key = series.map(({ label, width }) => `${label} ${width}`).join("|");
    const data = tables.length ? uPlot.join(tables) : [[]];
    if (card.chart && card.key === key) {
      card.chart.setData(data);
    } else {
      card.chart?.destroy();
      card.key = key;
      card.chart = runs.length ? new uPlot(this.#options(card, series), data, card.plot) : null;
    }
    card.isStale = false;
  }

  #table(run, name) {
    const [over, column] = run.curve(name, this.settings.over);
    return this.settings.smoothing ? [over, column, smoothed(column, this.settings.smoothing)] : [over, column];
  }

  #series(run) {
    const stroke = themeColor(`run-${run.number % 8}`);
    const common = { label: String(run.number), spanGaps: true, points: { show: run.iterations.length < 3 } };
    if (!this.settings.smoothing) return [{ ...common, stroke, width: 1.5 }];
    return [{ ...common, stroke: `${stroke}55`, width: 1 }, { ...common, stroke, width: 2 }];
  }

  #options(card, series) {
    const axis = { stroke: themeColor("muted"), font: "11px system-ui, sans-serif", grid: { stroke: themeColor("grid"), width: 1 }, ticks: { show: false } };
    const unit = card.metric.unit === "s" ? "" : card.metric.unit;
    return {
      width: card.plot.clientWidth,
      height: HEIGHT,
      padding: [10, 10, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "curves", scales: ["x", null] }, points: { size: 6 }, y: false },
      scales: { x: { time: false, range: spanOf }, y: { range: (_, lowest, highest) => rangeOf(lowest, highest, unit) } },
      axes: [
        { ...axis, size: 26, gap: 3, space: 56, ...(this.settings.over === "iteration" ? { incrs: WHOLE_STEPS } : {}) },
        { ...axis, size: (_, labels) => axisWidth(labels), gap: 3, space: 26, values: (_, splits) => formatTicks(splits, unit) },
      ],
      series: [{}, ...series],
      hooks: { setCursor: [(chart) => this.#showCursor(card, chart)] },
    };
  }

  #showCursor(card, chart) {
    if (chart.cursor.idx === null || chart.cursor.idx === undefined) {
      this.#showLatest(card);
      return;
    }
    const at = new Map();
    // Of a smoothed curve, too, the record's own value is named: the first series of a run.
    chart.series.slice(1).forEach(({ label }, i) => {
      if (!at.has(Number(label))) at.set(Number(label), chart.data[i + 1][chart.cursor.idx]);
    });
    this.#showLatest(card, at);
  }
}

function axisWidth(labels) {
  return Math.max(AXIS_WIDTH, 10 + DIGIT_WIDTH * Math.max(0, ...(labels ?? []).map((label) => label.length)));
}

/** From the first to the last entry; one alone is in the middle. */
function spanOf({ data: [places] }, first, last) {
  if (places?.length !== 1) return [first ?? 0, last ?? 1];
  const [place] = places;
  const room = Number.isInteger(place) ? 0.5 : place / 2;
  return [place - room, place + room];
}

/** Room above and below. What is constant, or differs by rounding only, is drawn in the middle, but for 0 and shares, whose
 * axis is that of all shares. */
function rangeOf(lowest, highest, unit) {
  if (lowest === null || highest === null || (lowest === 0 && highest === 0)) return [0, 1];
  if (!Number.isFinite(1.12 * (highest - lowest))) return [-Number.MAX_VALUE / 4, Number.MAX_VALUE / 4];
  const size = Math.max(Math.abs(lowest), Math.abs(highest));
  if (highest - lowest <= ROUNDING * size) {
    if (unit === "share" && lowest >= 0 && highest <= 1) return [0, 1];
    return [lowest - 0.1 * size, highest + 0.1 * size];
  }
  const room = 0.06 * (highest - lowest);
  return [lowest >= 0 && lowest < room ? 0 : lowest - room, highest + room];
}

/** Exponential means over about `size` entries, without a bias at the beginning. */
function smoothed(column, size) {
  const keep = 1 - 2 / (size + 1);
  let sum = 0;
  let weight = 0;
  return column.map((value) => {
    if (value === null) return null;
    sum = keep * sum + value;
    weight = keep * weight + 1;
    return sum / weight;
  });
}
