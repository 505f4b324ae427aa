// A histogram of response lengths of one iteration; for period.js.

import { element, formatNumber, themeColor } from "./format.js";

const HEIGHT = 190;
const MAX_BARS = 20;

/** Draws how long the rollouts of a period are: by the record's histogram, or else by the means of its groups. */
export function showLengths(box, period) {
  const recorded = (period.response_tokens_histogram ?? []).filter((bucket) => bucket.length === 3 && bucket.every((cell) => typeof cell === "number"));
  const buckets = recorded.length ? recorded : bucketsOfGroups(period.groups);
  if (!buckets.length) {
    box.replaceChildren(element("p", { class: "note" }, "No lengths are recorded."));
    return;
  }
  const plot = element("div");
  const total = buckets.reduce((sum, [, , count]) => sum + count, 0);
  const what = recorded.length ? "rollouts" : "responses, each with the mean of its group";
  box.replaceChildren(element("p", { class: "note" }, `Sampled tokens of ${formatNumber(total)} ${what}.`), plot);
  drawBars(plot, Math.max(200, box.clientWidth), buckets);
}

function drawBars(plot, width, buckets) {
  const axis = { stroke: themeColor("muted"), font: "11px system-ui, sans-serif", ticks: { show: false } };
  const color = themeColor("rollout");
  const labels = (_, splits) => splits.map((at) => (Number.isInteger(at) && buckets[at] ? formatNumber(buckets[at][0]) : ""));
  new uPlot({
    width,
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    // Buckets may have any widths: each has a place of the same size, which begins at its lower bound.
    scales: { x: { time: false, range: [0, buckets.length] }, y: { range: (_, __, most) => [0, most * 1.05] } },
    axes: [
      { ...axis, size: 26, gap: 3, space: 36, grid: { show: false }, values: labels },
      { ...axis, size: 44, gap: 3, grid: { stroke: themeColor("grid"), width: 1 }, values: (_, splits) => splits.map((value) => formatNumber(value)) },
    ],
    series: [{}, { stroke: color, fill: `${color}aa`, paths: uPlot.paths.bars({ size: [0.9, 100], align: 1 }), points: { show: false } }],
  }, [buckets.map((_, i) => i), buckets.map(([, , count]) => count)], plot);
}

function bucketsOfGroups(groups) {
  const counted = groups.filter((group) => group.is_trained !== false && typeof group.num_responses === "number" && group.num_responses > 0 && typeof group.num_response_tokens === "number");
  if (!counted.length) return [];
  const means = counted.map((group) => [group.num_response_tokens / group.num_responses, group.num_responses]);
  const lowest = Math.floor(Math.min(...means.map(([mean]) => mean)));
  const highest = Math.max(...means.map(([mean]) => mean));
  const size = Math.max(1, Math.ceil((highest - lowest + 1) / MAX_BARS));
  const buckets = Array.from({ length: Math.floor((highest - lowest) / size) + 1 }, (_, i) => [lowest + i * size, lowest + (i + 1) * size, 0]);
  for (const [mean, num] of means) buckets[Math.min(buckets.length - 1, Math.floor((mean - lowest) / size))][2] += num;
  return buckets;
}
