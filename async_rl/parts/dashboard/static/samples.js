// Prompts, responses, rewards, and each token's log-probs at the trainer and at the instance.

import { byId, element, formatNumber } from "./format.js";

const PER_PAGE = 10;
const SMALLEST_EXPONENT = -6;

export class Samples {
  constructor(runs, source) {
    this.runs = runs;
    this.source = source;
    this.skip = 0;
    this.asked = 0;
    byId("samples-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#turnTo(0);
    });
    byId("samples-run").addEventListener("change", () => this.#turnTo(0));
    byId("samples-newer").addEventListener("click", () => this.#turnTo(Math.max(0, this.skip - PER_PAGE)));
    byId("samples-older").addEventListener("click", () => this.#turnTo(this.skip + PER_PAGE));
  }

  /** Shows what is new, unless the user reads older samples; those may be gone where the run has resumed. */
  async follow() {
    if (this.generation !== this.#run.generation) this.skip = 0;
    if (this.skip === 0) await this.load();
  }

  get #run() {
    return this.runs[Number(byId("samples-run").value || 0)];
  }

  async load() {
    this.asked += 1;
    const asked = this.asked;
    this.generation = this.#run.generation;
    const value = (name) => byId(`samples-${name}`).value;
    const wanted = { iteration: value("iteration"), lowest: value("lowest"), highest: value("highest"), text: value("text") };
    const { total, rows } = await this.source.samples(this.#run.number, wanted, this.skip, PER_PAGE);
    if (asked !== this.asked) return;
    const last = Math.min(total, this.skip + PER_PAGE);
    byId("samples-summary").textContent = total ? `${this.skip + 1} to ${last} of ${total} recorded groups, newest first.` : "No recorded group is like this.";
    byId("samples-newer").disabled = this.skip === 0;
    byId("samples-older").disabled = last >= total;
    byId("samples-list").replaceChildren(...rows.map(sampleCard));
  }

  #turnTo(skip) {
    this.skip = skip;
    return this.load();
  }
}

function sampleCard(row) {
  const facts = [`iteration ${row.iteration}`, `group ${row.index}`, `prompt ${row.prompt_id ?? "?"}`, `version ${row.weight_version ?? "?"}`];
  return element(
    "article",
    { class: "card sample" },
    element("div", { class: "sample-head" }, ...facts.map((fact) => element("span", {}, fact))),
    row.prompt === undefined ? null : element("p", { class: "text prompt" }, row.prompt),
    ...Object.entries(row.row ?? {}).map(([name, value]) => element("p", { class: "text row" }, element("b", {}, `${name}: `), String(value))),
    element("div", { class: "responses" }, ...(Array.isArray(row.responses) ? row.responses : []).map(responseCard)),
  );
}

function responseCard(response) {
  const parts = Object.entries(response.reward_parts ?? {}).map(([name, reward]) => `${name} ${formatNumber(reward)}`);
  const facts = [
    element("span", { class: "reward", "data-value": response.reward }, `reward ${formatNumber(response.reward)}`),
    ...parts.map((part) => element("span", {}, part)),
    element("span", {}, `${response.num_tokens} tokens`),
    element("span", {}, response.finish_reason ?? ""),
    response.status ? element("span", {}, `${response.status}, ${response.num_turns} turns`) : null,
  ].filter(Boolean);
  return element("div", { class: "response" }, element("div", { class: "sample-head" }, ...facts), textOf(response));
}

/** The text; where tokens are recorded, these, each coloured by its gap, and the text as a whole if it goes on. */
function textOf(response) {
  const { tokens, rollout_logprobs: rollout, trainer_logprobs: trainer } = response;
  if (!Array.isArray(tokens) || !Array.isArray(rollout) || !Array.isArray(trainer)) return element("p", { class: "text" }, response.text ?? "");
  const shown = element("p", { class: "text tokens" }, ...tokens.map((text, i) => tokenSpan(text, rollout[i], trainer[i])));
  if (tokens.length >= response.num_tokens) return shown;
  const whole = element("details", {}, element("summary", {}, `the first ${tokens.length} tokens of ${response.num_tokens}; all as text`), element("p", { class: "text" }, response.text ?? ""));
  return element("div", {}, shown, whole);
}

function tokenSpan(text, rollout, trainer) {
  const isKnown = typeof rollout === "number" && typeof trainer === "number";
  const gap = isKnown ? trainer - rollout : null;
  const title = isKnown ? `instance ${rollout}, trainer ${trainer}: gap ${gap.toExponential(2)} nats` : "a log-prob is no finite number";
  const span = element("span", { title, "data-gap": gap ?? "" }, text);
  const depth = gap ? (Math.log10(Math.abs(gap)) - SMALLEST_EXPONENT) / -SMALLEST_EXPONENT : 0;
  if (depth > 0) span.style.backgroundColor = `rgba(var(--${gap < 0 ? "lower" : "higher"}), ${Math.min(1, depth).toFixed(2)})`;
  return span;
}
