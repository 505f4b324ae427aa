// Which instances sampled the tokens of which iteration: who came, who left, and how the work was shared.

import { byId, fillTable, formatNumber, preparedCanvas, themeColor } from "./format.js";

const ROW_HEIGHT = 18;
const LABEL_WIDTH = 178;
const NARROW_LABEL_WIDTH = 104;
const AXIS_HEIGHT = 22;
const MAX_ROWS = 64;

export class Instances {
  constructor(runs) {
    this.runs = runs;
    byId("instances-run").addEventListener("change", () => this.update());
    addEventListener("resize", () => this.update());
  }

  update() {
    const run = this.runs[Number(byId("instances-run").value || 0)];
    const found = presenceOf(run.proofs);
    const canvas = byId("instances-canvas");
    const summary = byId("instances-summary");
    if (!found.instances.length) {
      summary.textContent = "The ledger names no instances yet.";
      canvas.hidden = true;
      byId("instances-table").replaceChildren();
      return;
    }
    canvas.hidden = false;
    const hidden = found.instances.length - MAX_ROWS;
    summary.textContent = `${found.instances.length} ${found.instances.length === 1 ? "instance" : "instances"} sampled trained tokens; the deeper the colour, the more tokens, compared with the instance that had most in the iteration.${hidden > 0 ? ` The ${MAX_ROWS} that came last are drawn.` : ""}`;
    draw(canvas, { ...found, instances: found.instances.slice(-MAX_ROWS), largest: largestOf(found) });
    showTable(found);
  }
}

/** From the proofs: iterations, and for each instance its tokens by the number of the iteration. */
export function presenceOf(proofs) {
  const iterations = [...new Set(proofs.map((proof) => proof.iteration))];
  const place = new Map(iterations.map((iteration, i) => [iteration, i]));
  const totals = new Array(iterations.length).fill(0);
  const byUrl = new Map();
  for (const proof of proofs) {
    for (const [url, [tokens, rms]] of Object.entries(proof.instances)) {
      if (!byUrl.has(url)) byUrl.set(url, { url, tokens: new Map(), largestRms: 0 });
      const instance = byUrl.get(url);
      const at = place.get(proof.iteration);
      instance.tokens.set(at, (instance.tokens.get(at) ?? 0) + (tokens ?? 0));
      instance.largestRms = Math.max(instance.largestRms, rms ?? 0);
      totals[at] += tokens ?? 0;
    }
  }
  return { iterations, totals, instances: [...byUrl.values()] };
}

/** Of each iteration: the most tokens of an instance. */
function largestOf({ iterations, instances }) {
  const largest = new Array(iterations.length).fill(0);
  for (const { tokens } of instances) for (const [at, own] of tokens) largest[at] = Math.max(largest[at], own);
  return largest;
}

function draw(canvas, { iterations, largest, instances }) {
  const [context, width] = preparedCanvas(canvas, instances.length * ROW_HEIGHT + AXIS_HEIGHT);
  const left = width < 520 ? NARROW_LABEL_WIDTH : LABEL_WIDTH;
  const cell = (width - left) / iterations.length;
  instances.forEach(({ url, tokens }, row) => {
    const top = row * ROW_HEIGHT;
    context.fillStyle = themeColor("grid");
    context.fillRect(left, top + 2, width - left, ROW_HEIGHT - 4);
    context.fillStyle = themeColor("muted");
    context.fillText(shortened(context, url.replace(/^https?:\/\//, ""), left - 8), 0, top + 13);
    context.fillStyle = themeColor("rollout");
    for (const [at, own] of tokens) {
      context.globalAlpha = 0.25 + 0.75 * (largest[at] ? own / largest[at] : 0);
      context.fillRect(left + at * cell, top + 2, Math.max(1, cell - (cell > 4 ? 0.6 : 0)), ROW_HEIGHT - 4);
    }
    context.globalAlpha = 1;
  });
  context.fillStyle = themeColor("muted");
  const last = String(iterations.at(-1));
  context.fillText(`iteration ${iterations[0]}`, left, instances.length * ROW_HEIGHT + 15);
  if (iterations.length > 1) context.fillText(last, width - context.measureText(last).width, instances.length * ROW_HEIGHT + 15);
  canvas.setAttribute("aria-label", `${instances.length} instances over ${iterations.length} iterations; the table below has the figures`);
}

function shortened(context, text, width) {
  let shown = text;
  while (shown.length > 4 && context.measureText(shown).width > width) shown = `…${shown.slice(2)}`;
  return shown;
}

function showTable({ iterations, totals, instances }) {
  const all = totals.reduce((sum, tokens) => sum + tokens, 0);
  const heads = ["instance", ["first iteration", "number"], ["last", "number"], ["iterations", "number"], ["tokens", "number"], ["share", "number"], ["largest gap RMS", "number"]];
  fillTable(byId("instances-table"), heads, instances.map(({ url, tokens, largestRms }) => {
    const places = [...tokens.keys()];
    const own = [...tokens.values()].reduce((sum, count) => sum + count, 0);
    return [
      url,
      [iterations[Math.min(...places)], "number"],
      [iterations[Math.max(...places)], "number"],
      [places.length, "number"],
      [formatNumber(own), "number"],
      [formatNumber(all ? own / all : 0, "share"), "number"],
      [formatNumber(largestRms), "number"],
    ];
  }));
}
