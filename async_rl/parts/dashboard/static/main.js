// The page: fetches the records of all runs, keeps them, and lets each section show its part.

import { Curves } from "./curves.js";
import { byId, element, formatNumber, formatSeconds, runColor } from "./format.js";
import { Instances } from "./instances.js";
import { Period } from "./period.js";
import { Proof } from "./proof.js";
import { Samples } from "./samples.js";
import { EmbeddedSource, LiveSource, Refused } from "./source.js";

const TOKEN_KEY = "async-rl-token";
const THEME_KEY = "async-rl-theme";
const NUM_RECENT = 10;

/** What is known of one run: its columns have one entry per iteration, null where a record has no number. */
class Run {
  constructor(number, { name, dir, periods }) {
    this.number = number;
    this.name = name;
    this.dir = dir;
    this.isVisible = true;
    // Of a report: the iterations whose groups it has.
    this.periods = periods?.map((period) => period.iteration);
    this.clear(-1);
  }

  clear(generation) {
    this.generation = generation;
    this.iterations = [];
    this.hours = [];
    this.columns = new Map();
    this.proofs = [];
    this.numIterations = null;
    this.about = { state: "", cause: null, log: [], settings: {} };
    // Figures of the evaluation after the last iteration, of the trained weights: there is no record of that iteration.
    this.after = { iteration: null, hours: null, values: new Map() };
  }

  have() {
    return { generation: Math.max(0, this.generation), numRecords: this.generation < 0 ? 0 : this.iterations.length, numProofs: this.generation < 0 ? 0 : this.proofs.length };
  }

  /** Adds what the source has sent. */
  add({ generation, num_iterations, metrics, proofs, evaluations }) {
    if (generation !== this.generation) this.clear(generation);
    this.numIterations = num_iterations;
    const before = metrics.first;
    this.iterations.length = before;
    this.iterations.push(...metrics.iterations);
    this.hours.length = before;
    this.hours.push(...metrics.hours);
    for (const name of Object.keys(metrics.columns)) {
      if (!this.columns.has(name)) this.columns.set(name, new Array(before).fill(null));
    }
    const none = new Array(metrics.iterations.length).fill(null);
    for (const [name, column] of this.columns) {
      column.length = before;
      column.push(...(metrics.columns[name] ?? none));
    }
    this.proofs.length = proofs.first;
    this.proofs.push(...proofs.rows);
    // A report of a long run has all proofs that failed, but not all of the others.
    this.numProofs = proofs.total ?? this.proofs.length;
    this.#addEvaluations(evaluations);
  }

  /** Columns of evaluations, at the iterations after which they were made. */
  #addEvaluations(evaluations) {
    this.numEvaluations = evaluations.length;
    const place = new Map(this.iterations.map((iteration, i) => [iteration, i]));
    const trained = (this.iterations.at(-1) ?? -1) + 1;
    this.after = { iteration: trained, hours: (this.hours.at(-1) ?? 0) + 1e-6, values: new Map() };
    for (const record of evaluations) {
      const at = place.get(record.iteration);
      if ((at === undefined && record.iteration !== trained) || !record.complete) continue;
      for (const [name, value] of Object.entries(record)) {
        if (!EVALUATION_FIGURE.test(name) || typeof value !== "number") continue;
        const column = `eval/${record.set}/${name}`;
        if (!this.columns.has(column)) this.columns.set(column, new Array(this.iterations.length).fill(null));
        if (at === undefined) this.after.values.set(column, value);
        else this.columns.get(column)[at] = value;
      }
    }
  }

  latest(name) {
    return this.after.values.get(name) ?? this.columns.get(name)?.findLast((value) => value !== null);
  }

  /** A column with what it is drawn over, `iteration` or `hours`. */
  curve(name, over) {
    const places = over === "hours" ? this.hours : this.iterations;
    const column = this.columns.get(name);
    if (!this.after.values.has(name)) return [places, column];
    return [[...places, this.after[over]], [...column, this.after.values.get(name)]];
  }
}

const LOOK_S = 10;
const EVALUATION_FIGURE = /^(accuracy|pass@|avg@|reward|response_tokens_mean|truncated_share)/;

class Page {
  constructor(source) {
    this.source = source;
    this.runs = [];
  }

  async start() {
    const about = await this.source.runs();
    this.runs.push(...about.runs.map((run, number) => new Run(number, run)));
    document.title = `${this.runs.map((run) => run.name).join(", ")} · async-rl`;
    this.sections = {
      curves: new Curves(this.runs),
      period: new Period(this.runs, this.source),
      instances: new Instances(this.runs),
      samples: new Samples(this.runs, this.source),
      proof: new Proof(this.runs),
    };
    this.#showRuns();
    for (const name of ["period", "instances", "samples", "proof"]) {
      const select = byId(`${name}-run`);
      select.replaceChildren(...this.runs.map((run) => element("option", { value: run.number }, run.name)));
      select.parentElement.hidden = this.runs.length < 2;
    }
    byId("theme").addEventListener("click", () => this.#switchTheme());
    await Promise.all(this.runs.map((run) => this.#fetch(run)));
    await this.#show();
    document.documentElement.dataset.ready = "true";
    if (!about.is_live) {
      showStatus("report");
      return;
    }
    setInterval(() => this.#lookAgain(), 1000 * LOOK_S);
    await this.source.follow((states) => this.#onStates(states), showStatus);
  }

  async #onStates(states) {
    const changed = this.runs.filter((run, i) => {
      const { generation, num_records, num_proofs, num_evaluations } = states[i];
      const isKnown = run.generation === generation && run.iterations.length === num_records && run.proofs.length === num_proofs;
      return !(isKnown && run.numEvaluations === num_evaluations);
    });
    if (!changed.length) return;
    await Promise.all(changed.map((run) => this.#fetch(run)));
    await this.#show();
  }

  async #fetch(run) {
    run.add(await this.source.records(run.number, run.have()));
    run.about = await this.source.about(run.number);
  }

  /** Whether the runs still go on: no record tells that. */
  async #lookAgain() {
    const before = JSON.stringify(this.runs.map((run) => run.about));
    try {
      await Promise.all(this.runs.map(async (run) => { run.about = await this.source.about(run.number); }));
    } catch {
      return; // The status says that the connection is lost.
    }
    if (JSON.stringify(this.runs.map((run) => run.about)) !== before) this.#showOverview();
  }

  async #show() {
    const { curves, period, instances, samples, proof } = this.sections;
    this.#showOverview();
    curves.update();
    instances.update();
    proof.update();
    await Promise.all([period.follow(), samples.follow()]);
    byId("message").hidden = true;
  }

  #showRuns() {
    byId("runs").replaceChildren(...this.runs.map((run) => {
      const chip = element("button", { class: "chip", type: "button", "aria-pressed": "true", title: run.dir }, element("span", { class: "dot", color: runColor(run.number) }), run.name);
      chip.addEventListener("click", () => {
        run.isVisible = !run.isVisible;
        chip.setAttribute("aria-pressed", String(run.isVisible));
        this.sections.curves.redraw();
      });
      return chip;
    }));
  }

  #showOverview() {
    byId("overview").replaceChildren(...this.runs.flatMap((run) => overviewOf(run, this.runs.length > 1)));
    const settings = JSON.stringify(this.runs.map((run) => run.about.settings));
    if (settings !== this.settingsShown) showSettings(this.runs);
    this.settingsShown = settings;
  }

  #switchTheme() {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    remember("localStorage", THEME_KEY, theme);
    document.documentElement.dataset.theme = theme;
    this.#redraw();
  }

  #redraw() {
    this.sections.curves.redraw();
    this.sections.period.redraw();
    this.sections.instances.update();
  }
}

function overviewOf(run, hasOthers) {
  const head = hasOthers ? [element("div", { class: "run-name" }, element("span", { class: "dot", color: runColor(run.number) }), run.name)] : [];
  head.push(...stateOf(run.about));
  if (!run.iterations.length) {
    return [...head, element("p", { class: "note" }, "No iteration is complete yet.")];
  }
  const done = run.iterations.at(-1) + 1;
  const failed = run.proofs.filter((proof) => proof.on_policy !== true).length;
  const tiles = [
    tile(run.numIterations ? `${done} / ${run.numIterations}` : done, "iterations", done),
    ...["reward_mean", "accuracy"].filter((name) => run.columns.has(name)).map((name) => {
      const value = run.latest(name);
      return tile(formatNumber(value, name === "accuracy" ? "share" : ""), name === "accuracy" ? "accuracy" : "mean reward", value, name);
    }),
    tile(formatNumber(run.latest("response_tokens_mean")), "tokens/response", run.latest("response_tokens_mean"), "response_tokens_mean"),
    tile(formatNumber(run.latest("tokens_per_s")), "tokens/s", run.latest("tokens_per_s"), "tokens_per_s"),
    tile(formatSeconds(run.latest("seconds")), "per iteration", run.latest("seconds"), "seconds"),
    run.numIterations > done ? tile(remainingTime(run, done), "to go") : tile(formatSeconds(3600 * run.hours.at(-1)), "in all iterations"),
    tile(failed ? element("span", { class: "bad" }, `${failed} fail`) : element("span", { class: "good" }, `${run.numProofs} hold`), "on-policy proofs", run.numProofs - failed, "proofs"),
  ];
  return [...head, element("div", { class: "tiles" }, ...tiles)];
}

/** How the run stands; where it failed, why, and the last lines of its log. */
function stateOf({ state, cause, log }) {
  const shown = [element("p", { class: state.startsWith("failed") || state.startsWith("died") ? "state bad" : "state" }, state)];
  if (cause) shown.push(element("pre", { class: "cause" }, cause));
  if (log.length) shown.push(element("details", {}, element("summary", {}, "The end of the trainer's log"), element("pre", { class: "cause" }, log.join("\n"))));
  return shown;
}

/** The settings of the runs, a column each; of several runs those first in which they differ. */
function showSettings(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.about.settings)))];
  const rows = names.map((name) => ({ name, values: runs.map((run) => run.about.settings[name] ?? "–") }));
  const differing = rows.filter(({ values }) => new Set(values).size > 1);
  const isDiffering = runs.length > 1;
  byId("settings").hidden = !names.length;
  byId("settings-summary").textContent = isDiffering ? `${differing.length} of ${names.length} settings differ between the runs.` : `${names.length} settings.`;
  const tables = [...(isDiffering ? [settingsTable(runs, differing)] : []), element("details", {}, element("summary", {}, isDiffering ? "All settings" : "Show them"), settingsTable(runs, rows))];
  byId("settings-body").replaceChildren(...tables);
}

function settingsTable(runs, rows) {
  const head = element("tr", {}, ...["setting", ...runs.map((run) => run.name)].map((name) => element("th", {}, name)));
  const body = rows.map(({ name, values }) => element("tr", { "data-setting": name }, element("td", {}, name), ...values.map((value) => element("td", {}, value))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function tile(value, title, exact = "", name = title) {
  return element("div", { class: "tile", "data-tile": name, "data-value": exact ?? "" }, element("b", {}, value), element("span", {}, title));
}

function remainingTime(run, done) {
  const recent = (run.columns.get("seconds") ?? []).slice(-NUM_RECENT).filter((seconds) => seconds !== null);
  if (!recent.length) return "–";
  return formatSeconds((recent.reduce((sum, seconds) => sum + seconds, 0) / recent.length) * (run.numIterations - done));
}

function showStatus(status) {
  const shown = byId("status");
  shown.className = `status ${status}`;
  shown.textContent = { live: "live", lost: "no connection, trying again", report: "report" }[status];
}

function showError(error) {
  byId("message").hidden = false;
  byId("message").textContent = error.message;
  byId("token-form").hidden = !(error instanceof Refused);
}

// Storage may be forbidden, as in some browsers for a file, and in a notebook's frame: then the choice lasts as long as
// the page. Its name alone may be an error.
function remember(storage, key, value) {
  try {
    window[storage].setItem(key, value);
  } catch {
    document.documentElement.dataset.forgets = "true";
  }
}

function remembered(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

function givenToken() {
  return new URLSearchParams(location.hash.slice(1)).get("token");
}

/** The token of the address's fragment, which no server sees, or that of an earlier page. */
function tokenOf() {
  const given = givenToken();
  if (given) {
    remember("sessionStorage", TOKEN_KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  return given ?? remembered("sessionStorage", TOKEN_KEY);
}

function main() {
  // Of a section's own request, such as the samples that a form asks for.
  addEventListener("unhandledrejection", (event) => showError(event.reason));
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = remembered("localStorage", THEME_KEY) ?? (isDark ? "dark" : "light");
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    remember("sessionStorage", TOKEN_KEY, byId("token").value);
    location.reload();
  });
  // An address with a token, opened where the page is open already, loads nothing by itself.
  addEventListener("hashchange", () => givenToken() && location.reload());
  const embedded = byId("embedded");
  const source = embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new LiveSource(tokenOf());
  new Page(source).start().catch(showError);
}

main();
