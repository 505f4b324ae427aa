// The ledger: what was proven of each optimizer step.

import { byId, element, fillTable, formatNumber } from "./format.js";

const PER_PAGE = 20;

export class Proof {
  constructor(runs) {
    this.runs = runs;
    this.skip = 0;
    byId("proof-run").addEventListener("change", () => this.#turnTo(0));
    byId("proof-violations").addEventListener("change", () => this.#turnTo(0));
    byId("proof-newer").addEventListener("click", () => this.#turnTo(Math.max(0, this.skip - PER_PAGE)));
    byId("proof-older").addEventListener("click", () => this.#turnTo(this.skip + PER_PAGE));
  }

  update() {
    const { proofs, numProofs } = this.runs[Number(byId("proof-run").value || 0)];
    const failed = proofs.filter((proof) => proof.on_policy !== true);
    showSummary(proofs, numProofs, failed);
    const wanted = byId("proof-violations").checked ? failed : proofs;
    // A run that resumes has fewer proofs than before.
    this.skip = Math.max(0, Math.min(this.skip, PER_PAGE * (Math.ceil(wanted.length / PER_PAGE) - 1)));
    const rows = wanted.slice(Math.max(0, wanted.length - this.skip - PER_PAGE), wanted.length - this.skip).reverse();
    byId("proof-newer").disabled = this.skip === 0;
    byId("proof-older").disabled = this.skip + PER_PAGE >= wanted.length;
    const heads = ["iteration", "proof", ["groups", "number"], ["responses", "number"], ["tokens", "number"], ["continued", "number"], ["gap RMS", "number"], ["its limit", "number"], ["largest gap", "number"], "version", "fingerprint", "digest of samples"];
    fillTable(byId("proof-table"), heads, rows.map(proofRow));
  }

  #turnTo(skip) {
    this.skip = skip;
    this.update();
  }
}

function showSummary(proofs, total, failed) {
  const summary = byId("proof-summary");
  if (!proofs.length) {
    summary.textContent = "The ledger has no proof yet.";
    return;
  }
  const verdict = failed.length
    ? element("strong", { class: "bad" }, `${failed.length} of ${total} proofs fail`)
    : element("strong", { class: "good" }, `All ${total} proofs hold`);
  const unjudged = proofs.filter((proof) => proof.unjudged).length;
  const text = failed.length
    ? ": no step was taken where one fails."
    : ": every response was sampled from the version that its iteration trained, and every prompt contributed exactly its responses, once.";
  const thinned = total > proofs.length ? ` This report shows ${proofs.length} of them.` : "";
  summary.replaceChildren(verdict, text, thinned, unjudged ? ` In ${unjudged} of them the log-probs could not be judged: ${proofs.findLast((proof) => proof.unjudged).unjudged}.` : "");
}

function proofRow(proof) {
  const holds = proof.on_policy === true;
  const verdict = element("div", {}, element("span", { class: holds ? "good" : "bad" }, holds ? "✓ holds" : `✗ ${proof.num_violations ?? "?"} violations`));
  for (const violation of proof.violations) verdict.append(element("div", { class: "mono" }, violation));
  const number = (value) => [formatNumber(value), "number"];
  return [
    proof.iteration,
    proof.violations.length ? [verdict, "wrap"] : verdict,
    [proof.num_groups ?? "–", "number"],
    [proof.num_responses ?? "–", "number"],
    [proof.num_response_tokens ?? "–", "number"],
    [(proof.num_continued ?? 0) + (proof.num_resampled ?? 0), "number"],
    number(proof.rms),
    number(proof.largest_rms),
    number(proof.max_logprob_gap),
    element("code", {}, proof.weight_version ?? "–"),
    element("code", { title: proof.fingerprint }, String(proof.fingerprint ?? "–").slice(0, 12)),
    element("code", {}, proof.samples ?? "–"),
  ];
}
