// Where the page's data is from: a server that follows the runs, or the page itself, if it is a report.

const RETRY_S = 2;

export class Refused extends Error {}

/** Records from the server; `token` is what it may ask for. */
export class LiveSource {
  constructor(token) {
    this.token = token;
  }

  async runs() {
    return this.#get("runs", {});
  }

  async records(run, { generation, numRecords, numProofs }) {
    return this.#get("records", { run, generation, num_records: numRecords, num_proofs: numProofs });
  }

  async about(run) {
    return this.#get("about", { run });
  }

  async period(run, iteration) {
    return this.#get("period", { run, iteration });
  }

  async samples(run, wanted, skip, limit) {
    return this.#get("samples", { run, ...wanted, skip, limit });
  }

  /** Calls `onStates` whenever records change, and `onStatus` with "live" or "lost"; never returns. */
  async follow(onStates, onStatus) {
    for (;;) {
      try {
        await this.#readEvents(onStates, onStatus);
      } catch (error) {
        if (error instanceof Refused) throw error;
      }
      onStatus("lost");
      await new Promise((resolve) => setTimeout(resolve, 1000 * RETRY_S));
    }
  }

  // EventSource cannot send a token, so the events are read here.
  async #readEvents(onStates, onStatus) {
    const response = await this.#fetch("events");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onStatus("live");
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) if (event.startsWith("data: ")) await onStates(JSON.parse(event.slice(6)));
    }
  }

  async #get(name, query) {
    return (await this.#fetch(`${name}?${new URLSearchParams(query)}`)).json();
  }

  async #fetch(path) {
    const headers = this.token ? { Authorization: `Bearer ${this.token}` } : {};
    const response = await fetch(`api/${path}`, { headers });
    if (response.status === 401) throw new Refused("The server asks for the token of the run.");
    if (!response.ok) throw new Error(`${path.split("?")[0]}: ${response.status} ${(await response.text()).slice(0, 300)}`);
    return response;
  }
}

/** Records inside the page. */
export class EmbeddedSource {
  constructor(data) {
    this.data = data;
  }

  async runs() {
    return this.data;
  }

  async records(run) {
    return this.data.runs[run].records;
  }

  async about(run) {
    return this.data.runs[run].about;
  }

  async period(run, iteration) {
    const found = this.data.runs[run].periods.find((period) => period.iteration === iteration);
    return found ?? { iteration, groups: [], isMissing: true };
  }

  async samples(run, wanted, skip, limit) {
    const rows = this.data.runs[run].samples.filter((row) => isWanted(row, wanted));
    return { total: rows.length, rows: rows.slice(skip, skip + limit) };
  }
}

function isWanted(row, { iteration, lowest, highest, text }) {
  if (iteration !== "" && row.iteration !== Number(iteration)) return false;
  const least = lowest === "" ? -Infinity : Number(lowest);
  const most = highest === "" ? Infinity : Number(highest);
  const isOpen = lowest === "" && highest === "";
  if (!isOpen && !row.responses.some(({ reward }) => reward >= least && reward <= most)) return false;
  const all = [row.prompt ?? "", ...Object.values(row.row ?? {}), ...row.responses.map((response) => response.text ?? "")].join(" ").toLowerCase();
  return all.includes(text.toLowerCase());
}
