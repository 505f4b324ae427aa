// Numbers as text, elements without markup in strings, and colours of the present theme; for all other scripts.

const MAX_TICK_DIGITS = 6;
const SUFFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k", 1e3]];

/** A number in at most about seven characters, with its unit where one follows without a space. */
export function formatNumber(value, unit = "") {
  if (typeof value !== "number" || Number.isNaN(value)) return "–";
  if (unit === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)}%`;
  if (unit === "bytes") return formatBytes(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e21)) return value.toExponential(1).replace("e-", "e−").replace("e+", "e");
  // As it is shown: 999,999 is 1M, not 1000k.
  const shown = size >= 1e4 ? Number(size.toPrecision(3)) : size;
  for (const [least, suffix, by] of SUFFIXES) if (shown >= least) return `${trimmed(value / (by ?? least), 3)}${suffix}`;
  return Number.isInteger(value) ? String(value) : trimmed(value, size >= 100 ? 4 : 3);
}

export function formatSeconds(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 1) return `${trimmed(1000 * seconds, 3)} ms`;
  if (seconds < 120) return `${trimmed(seconds, 3)} s`;
  if (seconds < 7200) return `${trimmed(seconds / 60, 3)} min`;
  return `${trimmed(seconds / 3600, 3)} h`;
}

function formatBytes(value) {
  const [by, suffix] = bytesScale(value);
  return `${trimmed(value / by, 3)}${suffix}`;
}

function bytesScale(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB"];
  const step = value > 0 ? Math.max(0, Math.min(names.length - 1, Math.floor(Math.log2(value) / 10))) : 0;
  return [2 ** (10 * step), ` ${names[step]}`];
}

/** The labels of an axis: all in the same unit, with as many digits as tell them apart. */
export function formatTicks(values, unit = "") {
  if (!values.length) return [];
  const size = Math.max(...values.map(Math.abs));
  const [by, suffix] = scaleOf(size, unit);
  const step = (values.length > 1 ? Math.abs(values[1] - values[0]) : size) / by;
  let digits = 0;
  while (digits < MAX_TICK_DIGITS && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 * step * 10 ** digits) digits += 1;
  return values.map((value) => (value === 0 && suffix.startsWith("e") ? "0" : `${Number((value / by).toFixed(digits))}${suffix}`));
}

function scaleOf(size, unit) {
  if (unit === "share") return [0.01, "%"];
  if (unit === "bytes") return bytesScale(size);
  const power = size > 0 ? Math.floor(Math.log10(size)) : 0;
  if (power < -3 || power >= 15) return [10 ** power, `e${String(power).replace("-", "−")}`];
  const found = SUFFIXES.find(([least]) => size >= least);
  return found ? [found[2] ?? found[0], found[1]] : [1, ""];
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

/** An element; texts from runs become text nodes, so that no markup in them has a meaning. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "color") made.style.setProperty("--color", value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

/** A table's rows in place of those it has; a cell is a text, an element, or [content, class]. */
export function fillTable(table, heads, rows) {
  const cell = (tag, content) => (Array.isArray(content) ? element(tag, { class: content[1] }, content[0]) : element(tag, {}, content));
  const body = element("tbody", {}, ...rows.map((row) => element("tr", {}, ...row.map((content) => cell("td", content)))));
  table.replaceChildren(element("thead", {}, element("tr", {}, ...heads.map((head) => cell("th", head)))), body);
}

export function themeColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function runColor(number) {
  return `var(--run-${number % 8})`;
}

/** A canvas of the width of its box and this height, ready to draw on in CSS pixels. */
export function preparedCanvas(canvas, height) {
  const width = Math.max(200, canvas.parentElement.clientWidth);
  const scale = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return [context, width];
}

/** About `count` round values between 0 and `end`. */
export function roundTicks(end, count) {
  const raw = end / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const ticks = [];
  for (let number = 0; number <= count && number * step <= end * 1.0001; number += 1) ticks.push(Number((number * step).toPrecision(12)));
  return ticks;
}

export function byId(id) {
  return document.getElementById(id);
}
