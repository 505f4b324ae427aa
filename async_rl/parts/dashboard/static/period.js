// One iteration over time: the groups of each instance, the trainer's windows, publish and step.

import { byId, element, fillTable, formatNumber, formatSeconds, preparedCanvas, roundTicks, themeColor } from "./format.js";
import { showLengths } from "./lengths.js";

const LANES_HEIGHT = 420;
const TRAINER_HEIGHT = 26;
const LABEL_HEIGHT = 19;
const AXIS_HEIGHT = 26;
const TICK_WIDTH = 75;
const MAX_BANDS = 32;
const MAX_STRAGGLERS = 5;
const STRAGGLER_FACTOR = 1.5;
// A period consists of windows and waits: the windows are drawn.
const DRAWN_SPANS = ["publish", "step"];

export class Period {
  constructor(runs, source) {
    this.runs = runs;
    this.source = source;
    this.bars = [];
    this.isNewest = true;
    this.asked = 0;
    byId("period-run").addEventListener("change", () => this.follow());
    byId("period-newest").addEventListener("change", (event) => {
      this.isNewest = event.target.checked;
      if (this.isNewest) this.follow();
    });
    byId("period-iteration").addEventListener("change", (event) => this.#choose(Number(event.target.value)));
    byId("period-back").addEventListener("click", () => this.#choose(this.#neighbour(-1)));
    byId("period-next").addEventListener("click", () => this.#choose(this.#neighbour(1)));
    const canvas = byId("period-canvas");
    canvas.addEventListener("pointermove", (event) => this.#showTip(event));
    canvas.addEventListener("pointerleave", () => (byId("period-tip").hidden = true));
    addEventListener("resize", () => this.redraw());
  }

  get #run() {
    return this.runs[Number(byId("period-run").value || 0)];
  }

  /** Shows the newest iteration, if the user wants it to follow the run. */
  async follow() {
    const last = this.#iterations().at(-1);
    byId("period-body").hidden = last === undefined;
    if (last === undefined) {
      this.asked += 1;
      this.period = null;
      byId("period-summary").textContent = "No iteration is complete yet.";
    } else if (this.isNewest || !this.period || this.run !== this.#run) {
      await this.#load(last);
    } else if (this.generation !== this.run.generation) {
      // What is shown was trained again.
      await this.#load(this.iteration);
    }
  }

  #iterations() {
    return this.#run.periods ?? this.#run.iterations;
  }

  #choose(iteration) {
    this.isNewest = false;
    byId("period-newest").checked = false;
    return this.#load(iteration);
  }

  #neighbour(step) {
    const all = this.#iterations();
    const at = all.indexOf(this.iteration);
    return all[Math.max(0, Math.min(all.length - 1, at + step))] ?? this.iteration;
  }

  async #load(iteration) {
    if (!Number.isInteger(iteration) || iteration < 0) return;
    this.asked += 1;
    const asked = this.asked;
    const run = this.#run;
    const period = await this.source.period(run.number, iteration);
    if (asked !== this.asked) return;
    Object.assign(this, { run, iteration, period, generation: run.generation });
    byId("period-iteration").value = iteration;
    this.redraw();
  }

  redraw() {
    if (!this.period) return;
    const timed = this.period.groups.filter((group) => typeof group.started_s === "number" && typeof group.finished_s === "number");
    this.stragglers = stragglersOf(timed);
    this.#summarize(timed);
    this.#draw(timed);
    showStragglers(timed, this.stragglers);
    showLeftOut(this.period.groups.filter((group) => group.is_trained === false));
    showLengths(byId("lengths"), this.period);
  }

  #summarize(timed) {
    const { groups, seconds, publish_s, merged_share, iteration } = this.period;
    const trained = groups.filter((group) => group.is_trained !== false);
    const summary = byId("period-summary");
    if (!groups.length) {
      summary.textContent = this.period.isMissing
        ? `The report does not have the groups of iteration ${iteration}; of this run it has ${this.run.periods.length} iterations.`
        : `timeline.jsonl has no groups of iteration ${iteration}: they are not written yet, or no longer kept.`;
      return;
    }
    const elsewhere = trained.length - timed.length;
    const parts = [`Iteration ${iteration}: ${trained.length} groups`, `${formatSeconds(seconds)} in all`, `publish ${formatSeconds(publish_s)}`];
    if (typeof merged_share === "number") parts.push(`${formatNumber(merged_share, "share")} of the values with adapters changed by it`);
    if (this.period.wait_s !== null && this.period.wait_s !== undefined) parts.push(`the trainer waited ${formatSeconds(this.period.wait_s)}`);
    if (elsewhere > 0) parts.push(`${elsewhere} groups of other replicas have no times here`);
    summary.textContent = `${parts.join(", ")}.`;
  }

  #draw(timed) {
    const all = bandsOf(timed);
    const bands = lastOf(all);
    byId("period-bands").textContent = bands.length < all.length ? `The ${bands.length} of ${all.length} instances that finished last are drawn.` : "";
    const numLanes = bands.reduce((sum, band) => sum + band.lanes.length, 0);
    const laneHeight = Math.max(1, Math.min(12, LANES_HEIGHT / Math.max(1, numLanes)));
    const height = bands.reduce((sum, band) => sum + LABEL_HEIGHT + band.lanes.length * laneHeight + 5, 0) + LABEL_HEIGHT + TRAINER_HEIGHT + AXIS_HEIGHT;
    const canvas = byId("period-canvas");
    const [context, width] = preparedCanvas(canvas, height);
    const end = Math.max(this.period.seconds ?? 0, ...timed.map((group) => Math.max(group.finished_s, group.train_finished_s ?? 0)), 1e-6);
    const x = (seconds) => (seconds / end) * (width - 2) + 1;
    this.bars = [];
    drawGrid(context, x, end, height);
    let y = 0;
    for (const band of bands) {
      label(context, `${band.name}: ${band.num} groups`, y);
      y += LABEL_HEIGHT;
      for (const lane of band.lanes) {
        for (const group of lane) this.#bar(context, this.#colorOf(group), x(group.started_s), x(group.finished_s), y, laneHeight, group);
        y += laneHeight;
      }
      y += 5;
    }
    label(context, "trainer", y);
    this.#drawTrainer(context, timed, x, y + LABEL_HEIGHT);
    canvas.setAttribute("aria-label", `Timeline of iteration ${this.period.iteration}: ${timed.length} groups on ${all.length} instances, ${formatSeconds(end)}`);
  }

  #colorOf(group) {
    if (this.stragglers.includes(group)) return themeColor("straggler");
    return group.attempts > 1 || group.num_continued > 0 ? themeColor("repeated") : themeColor("rollout");
  }

  #drawTrainer(context, timed, x, y) {
    context.fillStyle = themeColor("grid");
    context.fillRect(x(0), y, x(this.period.seconds ?? 0) - x(0), TRAINER_HEIGHT);
    for (const window of windowsOf(timed)) {
      const text = `training of ${window.num} groups, ${formatSeconds(window.end - window.start)}`;
      this.#bar(context, themeColor("training"), x(window.start), x(window.end), y, TRAINER_HEIGHT, text);
    }
    for (const [name, start, end] of spansOf(this.period)) {
      const text = `${name === "step" ? "optimizer step" : name}, ${formatSeconds(end - start)}`;
      this.#bar(context, themeColor(name === "step" ? "step" : "publish"), x(start), x(end), y, TRAINER_HEIGHT, text);
    }
  }

  #bar(context, color, left, right, top, height, about) {
    const gap = height > 3 ? 1 : 0;
    const width = Math.max(1, right - left - (right - left > 3 ? 0.6 : 0));
    context.fillStyle = color;
    context.fillRect(left, top, width, height - gap);
    this.bars.push({ left, right: left + width, top, bottom: top + height, about });
  }

  #showTip(event) {
    const box = event.target.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const tip = byId("period-tip");
    const bar = this.bars.findLast(({ left, right, top, bottom }) => x >= left - 1 && x <= right + 1 && y >= top && y < bottom);
    tip.hidden = !bar;
    if (!bar) return;
    tip.textContent = typeof bar.about === "string" ? bar.about : describeGroup(bar.about);
    tip.style.left = `${Math.max(0, Math.min(x + 14, box.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 16}px`;
  }
}

/** The last groups to finish, of those that finish far later than most do. */
export function stragglersOf(timed) {
  if (timed.length < 4) return [];
  const [start, median] = startAndMedian(timed);
  const sorted = [...timed].sort((a, b) => b.finished_s - a.finished_s);
  return sorted.slice(0, MAX_STRAGGLERS).filter((group) => group.finished_s - start > STRAGGLER_FACTOR * median);
}

/** When the first group began, and how long after that half of the groups had finished. */
function startAndMedian(timed) {
  const start = Math.min(...timed.map((group) => group.started_s));
  const finished = timed.map((group) => group.finished_s - start).sort((a, b) => a - b);
  const middle = (finished.length - 1) / 2;
  return [start, (finished[Math.floor(middle)] + finished[Math.ceil(middle)]) / 2];
}

function showStragglers(timed, stragglers) {
  const box = byId("stragglers");
  if (!stragglers.length) {
    const text = timed.length
      ? `None: no group finished later than ${STRAGGLER_FACTOR} times the median.`
      : "No times of groups.";
    box.replaceChildren(element("p", { class: "note" }, text));
    return;
  }
  const [start, median] = startAndMedian(timed);
  const table = element("table");
  const heads = ["group", "instance", ["finished", "number"], ["tokens", "number"], ["sent", "number"]];
  fillTable(table, heads, stragglers.map((group) => [
    `${group.index} (${group.prompt_id ?? "?"})`,
    instanceOf(group),
    [formatSeconds(group.finished_s - start), "number"],
    [formatNumber(group.num_response_tokens), "number"],
    [group.attempts > 1 ? `${group.attempts} times` : "once", "number"],
  ]));
  const note = element("p", { class: "note" }, `The last groups to finish, after more than ${STRAGGLER_FACTOR} times the median of ${formatSeconds(median)}.`);
  box.replaceChildren(note, element("div", { class: "scroll" }, table));
}

function showLeftOut(groups) {
  const box = byId("left-out");
  box.hidden = !groups.length;
  const chips = groups.map((group) => element("span", { title: `prompt ${group.prompt_id}` }, `${group.index}: ${formatNumber(group.reward_mean)}`));
  const text = "Sampled, but not trained: all rewards of each are equal, to the figure beside its index.";
  box.replaceChildren(
    element("h3", {}, `${groups.length} groups left out by dynamic sampling`),
    element("p", { class: "note" }, text),
    element("div", { class: "left-out-list" }, ...chips),
  );
}

/** The groups by instance, each group in the first lane that is free when it starts. */
function bandsOf(timed) {
  const bands = new Map();
  for (const group of [...timed].sort((a, b) => a.started_s - b.started_s)) {
    const name = instanceOf(group);
    if (!bands.has(name)) bands.set(name, { name, lanes: [], ends: [], num: 0 });
    const band = bands.get(name);
    let lane = band.ends.findIndex((end) => end <= group.started_s);
    if (lane < 0) lane = band.lanes.push([]) - 1;
    band.lanes[lane].push(group);
    band.ends[lane] = group.finished_s;
    band.num += 1;
  }
  return [...bands.values()].sort((a, b) => a.name.localeCompare(b.name, undefined, { numeric: true }));
}

/** As many as can be told apart: those that finish last, in the order in which they are. */
function lastOf(bands) {
  const end = (band) => Math.max(...band.ends);
  const last = new Set([...bands].sort((a, b) => end(b) - end(a)).slice(0, MAX_BANDS));
  return bands.filter((band) => last.has(band));
}

/** When the trainer trained: groups of one window have the same times. */
function windowsOf(timed) {
  const windows = new Map();
  for (const { train_started_s: start, train_finished_s: end } of timed) {
    if (typeof start !== "number" || typeof end !== "number") continue;
    const window = windows.get(start) ?? { start, end, num: 0 };
    window.num += 1;
    window.end = Math.max(window.end, end);
    windows.set(start, window);
  }
  return windows.values();
}

/** [name, start, end] of publish and steps; of a record without them, where these are as a rule. */
function spansOf({ spans, publish_s, step_s, seconds }) {
  if (spans?.length) return spans.filter(([name, start, end]) => DRAWN_SPANS.includes(name) && typeof start === "number" && typeof end === "number");
  const known = publish_s ? [["publish", 0, publish_s]] : [];
  return step_s && seconds ? [...known, ["step", seconds - step_s, seconds]] : known;
}

function instanceOf(group) {
  return group.instances.length === 1 ? group.instances[0] : group.instances.length ? "several instances" : "unknown instance";
}

function describeGroup(group) {
  const repeated = group.attempts > 1 || group.num_continued ? `\nsent ${group.attempts} times, ${group.num_continued ?? 0} responses continued` : "";
  return (
    `group ${group.index}, prompt ${group.prompt_id}\n${formatSeconds(group.finished_s - group.started_s)}, ` +
    `${group.num_responses} responses, ${group.num_response_tokens} tokens\nreward ${formatNumber(group.reward_mean)}${repeated}`
  );
}

function drawGrid(context, x, end, height) {
  context.fillStyle = themeColor("muted");
  context.strokeStyle = themeColor("grid");
  for (const seconds of roundTicks(end, Math.max(2, Math.min(8, x(end) / TICK_WIDTH)))) {
    const at = Math.round(x(seconds)) + 0.5;
    context.beginPath();
    context.moveTo(at, 0);
    context.lineTo(at, height - AXIS_HEIGHT + 6);
    context.stroke();
    const text = formatSeconds(seconds);
    context.fillText(text, Math.min(at, context.canvas.clientWidth - context.measureText(text).width), height - 4);
  }
}

function label(context, text, y) {
  context.fillStyle = themeColor("muted");
  context.fillText(text, 2, y + 14);
}
