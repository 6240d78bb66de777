// The page of Foreword. Document text, file names and answers are untrusted: they only ever become text nodes.

const COLLECTION = "default";
const STAGES = ["extracting", "redacting", "chunking", "embedding", "storing", "warming"];
const FINAL = new Set(["ready", "partial", "failed", "cancelled"]);
const ANSWERABLE = new Set(["ready", "partial"]);
// Browsers open six connections to a host over HTTP/1.1; status streams must leave some for questions and other tabs.
const MAX_STATUS_STREAMS = 2;
// Other tabs and programs change the collection too, so it is looked at even when nothing happens here.
const LIST_POLL_MS = { busy: 2000, idle: 15000 };
const ENGINE_POLL_MS = { ready: 15000, waiting: 3000 };
// The bar fills up only when the first word is there, whatever the estimate said.
const READING_CAP = 0.97;

const byId = (id) => document.getElementById(id);

// ---- small tools

/** A new element; strings among the children become text nodes. */
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function showText(element, text) {
  element.textContent = text ?? "";
  element.hidden = !text;
}

const announce = (text) => { byId("announcer").textContent = text; };
const count = (number) => number.toLocaleString("en");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const roughly = (number) => count(number >= 1000 ? Math.round(number / 100) * 100 : number);
const preciseSeconds = (seconds) => `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;

function roughSeconds(seconds) {
  if (seconds < 1) return "under 1 s";
  return seconds < 90 ? `about ${Math.round(seconds)} s` : `about ${Math.round(seconds / 60)} min`;
}

function pageName(page, label) {
  return label && label !== String(page) ? `page ${page} (printed as ${label})` : `page ${page}`;
}

// ---- HTTP

/** A problem whose message can be shown to the reader as it is; `type` is the server's name for it, if it has one. */
class Refusal extends Error {
  constructor(message, type) {
    super(message);
    this.type = type;
  }
}

const UNREACHABLE = "The server cannot be reached. Check that Foreword is running, then try again.";

async function request(path, options, unreachable = UNREACHABLE) {
  const response = await fetch(path, options).catch((problem) => {
    throw problem.name === "AbortError" ? problem : new Refusal(unreachable);
  });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message
    ?? `The server answered ${response.status} without an explanation; look in its log, then try again.`;
  const wait = response.headers.get("Retry-After");
  return new Refusal(wait ? `${message} (Try again in ${wait} s.)` : message, body?.error?.type);
}

const getJson = async (path) => (await request(path)).json();
const documentPath = (id) => `/v1/documents/${encodeURIComponent(id)}`;

/** Server-sent events of a byte stream, which may be cut anywhere: inside a character, a line or a CRLF. */
async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  let name = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      // A CR at the very end may be half of a CRLF, so it waits for the next piece.
      const lines = (buffer + value).split(/\r\n|\n|\r(?!$)/);
      buffer = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { name, data: JSON.parse(data.join("\n")) };
          name = "message";
          data = [];
        } else {
          const [, field, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          if (field === "event") name = text;
          else if (field === "data") data.push(text);
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// ---- engine state

let engineReady = false;
let engineTimer;

async function checkEngine() {
  clearTimeout(engineTimer);
  // An answer that is not JSON comes from something in front of Foreword, and means the same as none.
  const state = await fetch("/ready").then((response) => response.json())
    .catch(() => ({ ready: false, text: "server not reachable; check that Foreword is running" }));
  engineReady = state.ready;
  const disk = state.kv_disk?.reason ? `, disk ${state.kv_disk.state}` : "";
  const text = engineReady
    ? `${state.model}, ${count(state.max_model_len)} tokens${disk}`
    : state.text ?? `engine starting… ${state.reason ?? ""}`;
  const element = byId("engine");
  element.title = disk && `What is read early is lost with a restart: ${state.kv_disk.reason}`;
  element.dataset.state = engineReady ? "ready" : "waiting";
  // Writing the same text again would make screen readers repeat it.
  if (element.textContent !== text) element.textContent = text;
  updateComposer();
  engineTimer = setTimeout(checkEngine, ENGINE_POLL_MS[element.dataset.state]);
}

// ---- documents

// What the next question goes on with: its id, documents and their names; or null. Each end of one is counted.
let conversation = null;
let ends = 0;
const rows = new Map();
const selection = new Set();
const statusStreams = new Map();
// Documents whose status stream broke once: polling is enough for them.
const polled = new Set();
let listTimer;

async function refreshDocuments() {
  let pace = "busy";
  try {
    const { documents } = await getJson(`/v1/documents?collection=${COLLECTION}`);
    showDocuments(documents);
    showText(byId("documents-problem"), "");
    const settled = ({ id, status, warm }) => (FINAL.has(status) && warm.state !== "warming") || statusStreams.has(id);
    if (documents.every(settled)) pace = "idle";
  } catch (problem) {
    showText(byId("documents-problem"), problem.message);
  }
  clearTimeout(listTimer);
  listTimer = setTimeout(refreshDocuments, LIST_POLL_MS[pace]);
}

function showDocuments(documents) {
  const present = new Set(documents.map((item) => item.id));
  for (const id of [...rows.keys()]) if (!present.has(id)) forgetDocument(id);
  const list = byId("document-list");
  documents.forEach((item, index) => {
    showDocument(item);
    const { element } = rows.get(item.id);
    // Rows in place are left alone: moving one would drop the keyboard focus inside it.
    if (list.children[index] !== element) list.insertBefore(element, list.children[index] ?? null);
  });
  byId("documents-empty").hidden = documents.length > 0;
  updateScope();
}

function showDocument(item) {
  if (!rows.has(item.id)) rows.set(item.id, new DocumentRow(item));
  rows.get(item.id).update(item);
  if (!FINAL.has(item.status)) watchDocument(item.id);
}

function forgetDocument(id) {
  closeStatusStream(id);
  rows.get(id).element.remove();
  rows.delete(id);
  selection.delete(id);
}

function watchDocument(id) {
  if (statusStreams.has(id) || polled.has(id) || statusStreams.size >= MAX_STATUS_STREAMS) return;
  const source = new EventSource(`${documentPath(id)}/events`);
  statusStreams.set(id, source);
  source.addEventListener("status", (event) => {
    const item = JSON.parse(event.data);
    if (!FINAL.has(item.status)) return showDocument(item);
    // The stream ends here, and the browser would reconnect for ever. The list may have changed too (replaced files).
    closeStatusStream(id);
    showDocument(item);
    refreshDocuments();
  });
  source.onerror = () => {
    closeStatusStream(id);
    polled.add(id);
    refreshDocuments();
  };
}

function closeStatusStream(id) {
  statusStreams.get(id)?.close();
  statusStreams.delete(id);
}

/** One entry of the list. It is built once and updated in place, so that focus and open details survive. */
class DocumentRow {
  constructor({ id, name }) {
    this.id = id;
    this.name = name;
    this.checkbox = make("input", { type: "checkbox", onchange: () => this.select() });
    this.status = make("span", { className: "status" });
    this.warmth = make("span", { className: "warmth" });
    this.facts = make("span", { className: "quiet" });
    this.entityCount = make("summary");
    this.entityList = make("p", { className: "quiet" });
    this.entities = make("details", { className: "entities" }, this.entityCount, this.entityList);
    this.bars = STAGES.map((stage) => make("progress", { max: 1, value: 0, ariaLabel: stage, title: stage }));
    this.stages = make("div", { className: "stages" }, ...this.bars);
    this.reason = make("p", { className: "reason" });
    this.problem = make("p", { className: "problem", role: "alert", hidden: true });
    this.cancelButton = this.actionButton("Cancel", () => this.attempt("/cancel", "POST"));
    this.deleteButton = this.actionButton("Delete", () => this.remove());
    this.element = make("li", {},
      make("div", { className: "row-head" },
        make("label", {}, this.checkbox, make("span", { className: "name", textContent: name })),
        this.cancelButton, this.deleteButton),
      make("div", { className: "row-facts" }, this.status, this.warmth, this.facts, this.entities),
      this.stages, this.reason, this.problem);
  }

  actionButton(textContent, onclick) {
    const ariaLabel = `${textContent} ${this.name}`;
    return make("button", { type: "button", className: "link", textContent, ariaLabel, onclick });
  }

  update(item) {
    const ended = FINAL.has(item.status);
    this.item = item;
    this.element.dataset.status = item.status;
    this.facts.textContent = [item.pages && plural(item.pages, "page"), item.tokens && plural(item.tokens, "token")]
      .filter(Boolean).join(", ");
    this.updateEntities(item.entities ?? {});
    this.updateStages(item);
    this.updateWarmth(item);
    showText(this.reason, item.reason);
    this.stages.hidden = ended && item.warm.state !== "warming";
    this.cancelButton.hidden = ended;
    this.deleteButton.hidden = !ended;
    this.checkbox.disabled = !ANSWERABLE.has(item.status);
    if (this.checkbox.disabled) selection.delete(this.id);
    this.checkbox.checked = selection.has(this.id);
    updateScope();
  }

  updateEntities(entities) {
    const kinds = Object.entries(entities);
    const total = kinds.reduce((sum, [, number]) => sum + number, 0);
    this.entities.hidden = total === 0;
    this.entityCount.textContent = `${count(total)} redacted`;
    this.entityList.textContent = kinds.map(([kind, number]) => `${kind} ${count(number)}`).join(", ");
  }

  updateWarmth({ status, warm }) {
    const shown = ANSWERABLE.has(status) ? warmthText(warm) : "";
    showText(this.warmth, shown);
    this.warmth.dataset.state = warm.state;
    this.warmth.title = warm.reason ?? WARMTH_MEANS[warm.state] ?? "";
  }

  updateStages({ status, progress, warm }) {
    const warming = ANSWERABLE.has(status) && warm.state === "warming";
    const { stage = status, done = 0, total = 0, unit } = warming
      ? { stage: "warming", done: warm.tokens, total: warm.total ?? 0 } : progress ?? {};
    const current = STAGES.indexOf(stage);
    this.status.textContent = total && !warming ? `${status} ${count(done)}/${count(total)} ${unit}` : status;
    this.bars.forEach((bar, index) => {
      bar.value = index === current && total ? done / total : Number(index < current);
    });
  }

  select() {
    endConversation();
    if (this.checkbox.checked) selection.add(this.id);
    else selection.delete(this.id);
    updateScope();
  }

  remove() {
    const question = `Delete “${this.name}” with its pages and search entries? This cannot be undone.`;
    if (window.confirm(question)) this.attempt("", "DELETE");
  }

  async attempt(action, method) {
    try {
      await request(documentPath(this.id) + action, { method });
      showText(this.problem, "");
      await refreshDocuments();
    } catch (problem) {
      showText(this.problem, problem.message);
    }
  }
}

const WARMTH_MEANS = {
  warm: "The model has read it already: an answer begins at once.",
  warming: "The model is reading it now, so that an answer can begin at once.",
  partly: "The model has read a part of it already.",
  evicted: "The model had read it, but other documents took its place.",
};

function warmthText({ state, tokens, total, pinned }) {
  if (state === "warm") return pinned ? "warm, pinned" : "warm";
  if (state === "warming") return total ? `warming ${Math.floor((100 * tokens) / total)}%` : "warming";
  return state === "partly" ? `warm to ${Math.floor((100 * tokens) / total)}%` : "";
}

function updateScope() {
  const names = [...selection].map((id) => rows.get(id).name);
  const ready = [...rows.values()].filter(({ item }) => ANSWERABLE.has(item?.status)).length;
  const everything = ready ? `Asking all ${plural(ready, "ready document")}` : "No document is ready yet";
  const fresh = names.length ? `Asking only ${names.join(", ")}` : everything;
  byId("scope").textContent = conversation ? `Going on about ${conversation.names}` : fresh;
  byId("clear-selection").hidden = names.length === 0 || conversation !== null;
  byId("new-conversation").hidden = conversation === null;
  readAhead();
}

function clearSelection() {
  selection.clear();
  for (const row of rows.values()) row.update(row.item);
  byId("question").focus();
}

// ---- upload

// A server that refuses a body early may close the connection before its answer can be read.
const UPLOAD_CUT_OFF = "The upload was cut off. Check that nothing is over the upload limit, that no folder was "
  + "dropped, and that Foreword is running, then try again.";

async function upload(files) {
  if (!files.length) return;
  const form = new FormData();
  for (const file of files) form.append("files", file);
  form.append("collection", COLLECTION);
  showText(byId("upload-problem"), "");
  showText(byId("upload-note"), `Uploading ${plural(files.length, "file")}…`);
  try {
    const response = await request("/v1/documents", { method: "POST", body: form }, UPLOAD_CUT_OFF);
    const { documents } = await response.json();
    const known = documents.filter((item) => item.duplicate).map((item) => item.name);
    showText(byId("upload-note"), known.length ? `Already here, kept once: ${known.join(", ")}` : "");
    await refreshDocuments();
  } catch (problem) {
    showText(byId("upload-note"), "");
    showText(byId("upload-problem"), problem.message);
  }
}

const fileInput = byId("files");
const dropArea = byId("drop");
fileInput.addEventListener("change", async () => {
  await upload([...fileInput.files]);
  fileInput.value = ""; // or choosing the same file again would not count as a change
});
// The whole window takes files: a drop beside the area would make the browser leave the page.
window.addEventListener("dragover", (event) => {
  event.preventDefault();
  dropArea.classList.add("over");
});
window.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) dropArea.classList.remove("over");
});
window.addEventListener("drop", (event) => {
  event.preventDefault();
  dropArea.classList.remove("over");
  upload([...event.dataTransfer.files]);
});

// ---- waiting for the first word

/** The bar of a question whose prompt is being read; it moves on its own between two progress events. */
class ReadingBar {
  constructor() {
    this.bar = make("progress", { max: 1, ariaLabel: "Reading the prompt" });
    this.text = make("p", { className: "quiet", textContent: "Preparing the question…" });
    this.element = make("div", { className: "reading" }, this.text, this.bar);
    this.shown = 0;
  }

  plan({ tokens_to_compute: tokens, eta_s: eta }, promptTokens) {
    this.tokens = tokens ?? promptTokens;
    this.cached = promptTokens - this.tokens;
    this.follow(0, eta);
    announce(this.readingText());
  }

  progress({ phase, tokens_done: done, tokens_total: total, eta_s: eta }) {
    if (!this.element.isConnected) return; // the first word was quicker than this report
    if (phase === "queued") return this.wait();
    this.follow(total ? done / total : this.shown, eta);
  }

  wait() {
    cancelAnimationFrame(this.frame);
    this.shown = 0;
    this.bar.removeAttribute("value");
    if (this.text.textContent.startsWith("Waiting")) return;
    this.text.textContent = "Waiting for another question to finish";
    announce(this.text.textContent);
  }

  follow(fraction, eta) {
    this.base = fraction;
    this.eta = eta;
    this.since = performance.now();
    cancelAnimationFrame(this.frame);
    this.draw();
  }

  draw() {
    const elapsed = (performance.now() - this.since) / 1000;
    const estimate = this.eta ? this.base + (1 - this.base) * (elapsed / this.eta) : this.base;
    this.shown = Math.min(READING_CAP, Math.max(this.shown, estimate));
    this.bar.value = this.shown;
    this.text.textContent = this.readingText(elapsed);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  readingText(elapsed = 0) {
    const cached = this.cached > 0 ? ` (${roughly(this.cached)} more are cached)` : "";
    const what = `Reading ${roughly(this.tokens)} tokens${cached}`;
    if (this.eta == null) return what;
    const left = this.eta - elapsed;
    return left > -1 ? `${what}, ${roughSeconds(left)}` : `${what}, longer than estimated`;
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.element.remove();
  }
}

// ---- a question and its answer

class Turn {
  constructor(question, scope) {
    this.question = question;
    this.reading = new ReadingBar();
    this.context = make("p", { className: "quiet", textContent: scope });
    this.streamed = new Text();
    this.answer = make("div", { className: "answer", ariaLive: "polite", ariaBusy: "true" }, this.streamed);
    this.sources = make("ol", { className: "sources", hidden: true });
    this.note = make("p", { className: "note", hidden: true });
    this.problem = make("p", { className: "problem", role: "alert", hidden: true });
    this.citations = [];
    this.ended = false;
    this.element = make("article", { className: "turn" },
      make("h3", { className: "question", textContent: question }),
      this.context, this.reading.element, this.answer, this.note, this.problem, this.sources);
  }

  handle({ name, data }) {
    const handlers = {
      context: () => this.showContext(data),
      progress: () => this.reading.progress(data),
      token: () => this.addText(data.text),
      citations: () => this.showCitations(data.citations),
      done: () => this.finish(data),
      error: () => this.fail(data.message, data.type),
    };
    handlers[name]?.();
  }

  showContext({ mode, volume, documents, passages, prompt_tokens: promptTokens, plan, conversation: id, turn }) {
    const names = documents.map((item) => item.name).join(", ");
    this.conversation = { id, names, documents: documents.map((item) => item.id) };
    const more = turn > 1 ? "more " : "";
    const searched = `${more}${plural(passages?.length ?? 0, "passage")}`;
    const what = mode === "whole" ? "Whole text"
      : volume ? `Pages ${volume.first_page} to ${volume.last_page} and ${searched}` : searched;
    this.context.textContent = `${what} of ${names}`;
    this.reading.plan(plan ?? {}, promptTokens);
  }

  addText(text) {
    if (!text) return;
    this.reading.end();
    followBottom(() => this.streamed.appendData(text));
  }

  showCitations(citations) {
    this.citations = citations;
    followBottom(() => {
      this.renderAnswer(this.streamed.data);
      this.renderSources();
    });
  }

  /** The same passage may support several spans; it is listed once, under one number. */
  sourceList() {
    const sources = new Map();
    for (const citation of this.citations) {
      const key = JSON.stringify([citation.document, citation.page, citation.quote]);
      if (!sources.has(key)) sources.set(key, { ...citation, number: sources.size + 1, spans: [] });
      sources.get(key).spans.push([citation.start, citation.end]);
    }
    return [...sources.values()];
  }

  renderAnswer(answer) {
    const characters = Array.from(answer); // spans count code points, JavaScript strings count UTF-16 units
    const sources = this.sourceList();
    const spans = sources.flatMap((source) => source.spans.map(([start, end]) => ({ start, end, source })))
      .filter(({ start, end }) => start != null && end > start);
    const cuts = [...new Set([0, ...spans.flatMap(({ start, end }) => [start, end]), characters.length])]
      .filter((cut) => cut <= characters.length)
      .sort((left, right) => left - right);
    const parts = cuts.slice(1).flatMap((end, index) => {
      const start = cuts[index];
      const text = characters.slice(start, end).join("");
      const cited = spans.some((span) => span.start <= start && span.end >= end);
      const ending = sources.filter((source) => source.spans.some((span) => span[1] === end));
      return [
        cited ? make("span", { className: "cited", textContent: text }) : text,
        ending.length ? make("sup", {}, ...ending.map(marker)) : "",
      ];
    });
    this.answer.replaceChildren(...parts);
  }

  renderSources() {
    this.sources.replaceChildren(...this.sourceList().map((source) => {
      const place = `${source.name}, ${pageName(source.page, source.label)}`;
      const button = make("button", { type: "button", className: "source", onclick: () => openPage(source) },
        make("span", { className: "source-place", textContent: place }),
        make("q", { textContent: source.quote }));
      return make("li", { value: source.number }, button);
    }));
    this.sources.hidden = this.citations.length === 0;
  }

  finish({ answer, finish_reason: reason, usage, timings, prefill }) {
    this.end();
    this.answered = true;
    if (answer !== this.streamed.data) this.renderAnswer(answer);
    if (reason === "length") showText(this.note, "The answer reached its length limit and stops here.");
    followBottom(() => this.element.append(this.facts(usage ?? {}, timings ?? {}, prefill ?? {})));
    announce("The answer is complete.");
  }

  facts(usage, timings, prefill) {
    const line = [
      timings.ttft != null && `first words after ${preciseSeconds(timings.ttft)}`,
      timings.total != null && `total ${preciseSeconds(timings.total)}`,
      usage.prompt_tokens != null && `${count(usage.prompt_tokens)} prompt tokens`,
      prefill.cached_tokens != null && `${count(prefill.cached_tokens)} cached`,
      prefill.path,
    ].filter(Boolean).join(" · ");
    const tables = [factTable("Timings (s)", timings), factTable("Usage", usage), factTable("Prefill", prefill)];
    return make("details", { className: "facts" },
      make("summary", { textContent: line }), make("div", { className: "tables" }, ...tables));
  }

  fail(message, type) {
    this.end();
    this.gone = type === GONE;
    const text = STUCK[type];
    followBottom(() => {
      showText(this.problem, this.gone ? GONE_TEXT : text ?? message);
      if (text) this.problem.append(" ", this.startAnew());
    });
  }

  /** The next step where a conversation takes no question: a new one, with the question that it did not take. */
  startAnew() {
    const onclick = () => {
      this.problem.querySelector("button").remove();
      endConversation();
      byId("question").value ||= this.question;
      byId("question").focus();
    };
    return make("button", { type: "button", className: "link", textContent: "Ask in a new conversation", onclick });
  }

  stopped() {
    this.end();
    showText(this.note, "Stopped.");
    announce("Stopped.");
  }

  end() {
    this.ended = true;
    this.reading.end();
    this.answer.ariaBusy = "false";
  }
}

function marker(source) {
  const ariaLabel = `Source ${source.number}: ${source.name}, ${pageName(source.page, source.label)}`;
  const onclick = () => openPage(source);
  return make("button", { type: "button", className: "marker", textContent: source.number, ariaLabel, onclick });
}

function factTable(title, facts) {
  const lines = Object.entries(facts).map(([key, value]) => make("tr", {},
    make("th", { scope: "row", textContent: key.replaceAll("_", " ") }),
    make("td", { textContent: typeof value === "number" ? count(value) : value ?? "–" })));
  return make("table", {}, make("caption", { textContent: title }), make("tbody", {}, ...lines));
}

/** Scrolls along with growing content, unless the reader has scrolled up to read something else. */
function followBottom(change) {
  const wide = getComputedStyle(byId("thread")).overflowY === "auto";
  const scroller = wide ? byId("thread") : document.documentElement;
  const near = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 80;
  change();
  if (near) scroller.scrollTop = scroller.scrollHeight;
}

// ---- asking

const GONE = "unknown_conversation";
const GONE_TEXT = "The conversation was deleted meanwhile, or a document that it was about. The next question begins a "
  + "new one.";
// The server names the conversation by its id, which nobody has seen here.
const STUCK = {
  conversation_full: "This conversation has become too long for the model to read together with another question.",
  conversation_busy: "The question before this one is still being answered. Wait a moment, then ask again.",
};
let running = null;

function updateComposer() {
  byId("send").disabled = !engineReady;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

async function ask() {
  const question = byId("question").value.trim();
  if (!question || !engineReady || running) return;
  const turn = new Turn(question, byId("scope").textContent);
  byId("question").value = "";
  byId("welcome").hidden = true;
  if (!matchMedia("(min-width: 760px)").matches) byId("documents").open = false;
  byId("thread").append(turn.element);
  turn.element.scrollIntoView({ block: "end" });
  running = new AbortController();
  updateComposer();
  await receiveAnswer(turn, question, running.signal);
  running = null;
  // Whoever has chosen other documents meanwhile goes on with those.
  if (turn.answered && turn.ends === ends) conversation = turn.conversation;
  if (turn.gone && turn.ends === ends) endConversation();
  updateScope();
  updateComposer();
  checkEngine(); // after a failure the engine may be restarting
}

async function receiveAnswer(turn, question, signal) {
  try {
    const response = await send(turn, question, signal);
    for await (const event of readEvents(response.body)) {
      turn.handle(event);
      if (turn.ended) return;
    }
    turn.fail("The connection closed before the answer was complete. The server may have restarted: ask again.");
  } catch (problem) {
    if (signal.aborted) return turn.stopped();
    if (problem instanceof Refusal) return turn.fail(problem.message, problem.type);
    turn.fail(`The answer could not be received (${problem.message}). Check the connection to the server, then ask again.`);
  }
}

/** Ask; a question that goes on with a conversation that is gone begins a new one. */
async function send(turn, question, signal) {
  turn.ends = ends;
  const scope = selection.size ? { documents: [...selection] } : { collection: COLLECTION };
  const body = {
    question,
    acceleration: byId("exact").checked ? "off" : "auto",
    ...(conversation ? { conversation: conversation.id } : { conversation: "new", mode: byId("mode").value, ...scope }),
  };
  const headers = { "Content-Type": "application/json", Accept: "text/event-stream" };
  try {
    return await request("/v1/ask", { method: "POST", headers, body: JSON.stringify(body), signal });
  } catch (problem) {
    if (problem.type !== GONE || body.conversation === "new") throw problem;
    endConversation(turn.element);
    showText(turn.note, "The conversation before this was deleted, so this question begins a new one.");
    return send(turn, question, signal);
  }
}

// ---- conversations

/** Earlier turns stay to be read, but the next question, or one that is shown already, knows nothing of them. */
function endConversation(next = null) {
  ends += 1;
  if (!conversation) return;
  conversation = null;
  byId("thread").insertBefore(make("p", { className: "divider quiet", textContent: "New conversation" }), next);
  updateScope();
}

byId("new-conversation").addEventListener("click", () => {
  endConversation();
  byId("question").focus();
});
// A conversation keeps the mode that it began with.
byId("mode").addEventListener("change", () => endConversation());
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
byId("question").addEventListener("keydown", (event) => {
  // Enter also confirms a word in Chinese and Japanese input methods, which must not send the question.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  ask();
});
byId("stop").addEventListener("click", () => {
  running?.abort();
  byId("question").focus();
});
byId("clear-selection").addEventListener("click", clearSelection);

// ---- reading ahead

// What is about to be asked about is read first, for as long as the server hears that somebody is about to ask.
let ahead = { key: "", abort: null };

/** Tell the server what a question would be about, from the first key on; it says how far that has been read. */
async function readAhead() {
  const typing = byId("question").value.trim() !== "" || document.activeElement === byId("question");
  const anything = [...rows.values()].some(({ item }) => ANSWERABLE.has(item?.status));
  const ids = conversation?.documents ?? [...selection];
  const query = new URLSearchParams(ids.length ? ids.map((id) => ["documents", id]) : { collection: COLLECTION });
  const key = typing && engineReady && anything ? query.toString() : "";
  if (key === ahead.key) return;
  ahead.abort?.abort();
  const abort = new AbortController();
  ahead = { key, abort };
  showText(byId("ahead"), "");
  if (!key) return;
  try {
    const response = await fetch(`/v1/intent?${query}`, { signal: abort.signal });
    if (!response.ok) return;
    for await (const { data } of readEvents(response.body)) {
      if (abort.signal.aborted) return;
      showText(byId("ahead"), aheadText(data));
    }
  } catch { /* the stream was closed, here or there; the next key opens another one */
    if (ahead.abort === abort) ahead.key = "";
  }
}

function aheadText({ state, tokens, total, eta_s: eta }) {
  if (state === "warm") return "Read already: the answer begins at once.";
  if (state !== "warming") return "";
  const left = eta ? `, ${roughSeconds(eta)} left` : "";
  return total ? `Reading ahead: ${Math.floor((100 * tokens) / total)}%${left}.` : "Reading ahead…";
}

byId("question").addEventListener("focus", readAhead);
byId("question").addEventListener("input", readAhead);
byId("question").addEventListener("blur", readAhead);

// ---- page panel

const panel = byId("page");
let opened = null;

async function openPage(source) {
  opened = source;
  byId("page-title").textContent = source.name;
  byId("page-place").textContent = pageName(source.page, source.label);
  byId("page-text").replaceChildren();
  showText(byId("page-problem"), "");
  showText(byId("page-note"), "Loading…");
  byId("layout").classList.add("with-page");
  if (!panel.open) panel[matchMedia("(min-width: 1100px)").matches ? "show" : "showModal"]();
  try {
    const page = await getJson(`${documentPath(source.document)}/pages/${source.page}`);
    if (opened === source) showPageText(page.text, source.quote);
  } catch (problem) {
    if (opened !== source) return;
    showText(byId("page-note"), "");
    showText(byId("page-problem"), problem.message);
  }
}

function showPageText(text, quote) {
  const container = byId("page-text");
  const place = findQuote(text, quote);
  showText(byId("page-note"), place ? "" : `Not found on this page word for word: “${quote}”`);
  if (!place) return container.replaceChildren(text);
  const mark = make("mark", { textContent: text.slice(place.start, place.end) });
  container.replaceChildren(text.slice(0, place.start), mark, text.slice(place.end));
  mark.scrollIntoView({ block: "center" });
}

/** Where the quote is in the text. White space is ignored: line breaks of a PDF differ, and Chinese has no spaces. */
function findQuote(text, quote) {
  const places = [];
  let squeezed = "";
  for (let index = 0; index < text.length; index += 1) {
    if (/\s/.test(text[index])) continue;
    squeezed += text[index];
    places.push(index);
  }
  const wanted = quote.replace(/\s+/g, "");
  const at = wanted ? squeezed.indexOf(wanted) : -1;
  return at < 0 ? null : { start: places[at], end: places[at + wanted.length - 1] + 1 };
}

byId("page-close").addEventListener("click", () => panel.close());
// Only modal dialogs close on Escape by themselves; beside the thread this one is not modal.
document.addEventListener("keydown", (event) => { if (event.key === "Escape") panel.close(); });
panel.addEventListener("close", () => {
  byId("layout").classList.remove("with-page");
  opened = null;
});

// ---- start

updateScope();
checkEngine();
refreshDocuments();
