// A histogram of response lengths of one iteration; for period.js.

import { element, formatNumber, themeColor } from "./format.js";

const HEIGHT = 190;
const MAX_BARS = 24;

/** Draws how long the responses of the groups are; a group's responses count with their mean. */
export function showLengths(box, groups) {
  const counted = groups.filter((group) => group.is_trained !== false && group.num_responses > 0 && typeof group.num_response_tokens === "number");
  if (!counted.length) {
    box.replaceChildren(element("p", { class: "note" }, "No groups."));
    return;
  }
  const bars = histogram(counted.map((group) => [group.num_response_tokens / group.num_responses, group.num_responses]));
  const plot = element("div");
  const text = `Tokens per response, each group's mean, ${counted.reduce((sum, group) => sum + group.num_responses, 0)} responses; from ${formatNumber(bars.lowest)} to ${formatNumber(bars.highest)}.`;
  box.replaceChildren(element("p", { class: "note" }, text), plot);
  const axis = { stroke: themeColor("muted"), font: "11px system-ui, sans-serif", grid: { stroke: themeColor("grid"), width: 1 }, ticks: { show: false } };
  const color = themeColor("rollout");
  new uPlot({
    width: Math.max(200, box.clientWidth),
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: { x: { time: false, range: [bars.lowest, bars.lowest + bars.size * bars.counts.length] }, y: { range: (_, __, most) => [0, most * 1.05] } },
    axes: [{ ...axis, size: 26, gap: 3 }, { ...axis, size: 44, gap: 3, values: (_, splits) => splits.map((value) => formatNumber(value)) }],
    series: [{}, { stroke: color, fill: `${color}aa`, paths: uPlot.paths.bars({ size: [0.92, 100], align: 1 }), points: { show: false } }],
  }, [bars.counts.map((_, i) => bars.lowest + i * bars.size), bars.counts], plot);
}

/** [value, weight] pairs in bars of the same size. */
export function histogram(pairs) {
  const values = pairs.map(([value]) => value);
  const lowest = Math.floor(Math.min(...values));
  const highest = Math.max(...values);
  const size = Math.max(1, Math.ceil((highest - lowest + 1) / MAX_BARS));
  const counts = new Array(Math.max(1, Math.floor((highest - lowest) / size) + 1)).fill(0);
  for (const [value, weight] of pairs) counts[Math.floor((value - lowest) / size)] += weight;
  return { lowest, highest, size, counts };
}
