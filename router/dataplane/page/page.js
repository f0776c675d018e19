"use strict";
// Asks the router once a second while it is looked at, and draws. Changes nothing; operate.js does.

const POLL_MS = 1000;
const HISTORY_S = 120;
const WINDOW_S = 10;
const CHANGES_MAX = 50;
const DECISIONS_SHOWN = 8;
// Without the user and password that an address may begin with: fetch takes none.
const HERE = `${location.origin}${location.pathname}`;

const REASONS = {
  below_threshold: "few sequences: speculation pays",
  above_threshold: "many sequences: speculation does not pay",
  dwell: "the last switch was too short a time ago",
  fixed: "the policy, or the request, names it",
  least_inflight: "fewest sequences",
  split: "its share by the fixed rule",
  only_server: "no other could take it",
  context_length: "too long for the other",
  marginal: "slows tokens least there",
  unmeasured: "not measured yet",
  explore: "not seen for a while",
  affinity: "its conversation is there",
  stay: "a change would not pay",
  switch: "the role in charge has just changed",
  override: "another policy was put in force for a while",
  target: "the request names its server",
  stored: "it holds the response that the request is about",
};

const byId = (id) => document.getElementById(id);
const number = (x, digits = 0) => (x == null || !isFinite(x) ? "–" : x.toLocaleString("en", { maximumFractionDigits: digits }));
const share = (x) => (x == null ? "–" : `${number(100 * x, 1)} %`);
const seconds = (s) => (s == null || !isFinite(s) ? "–" : s < 1 ? `${number(1000 * s)} ms` : `${number(s, 2)} s`);
const duration = (s) => (s >= 60 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s)} s`);
const sum = (list) => list.reduce((a, b) => a + b, 0);

function set(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text; // an unchanged live region stays silent
}

function row(cells, headed) {
  const tr = document.createElement("tr");
  cells.forEach(([text, kind], place) => {
    const cell = document.createElement(headed && place === 0 ? "th" : "td");
    if (headed && place === 0) cell.scope = "row";
    if (kind) cell.className = kind;
    cell.textContent = text;
    tr.append(cell);
  });
  return tr;
}

// What was seen: one sample a poll, no older than HISTORY_S.
const history = [];

function remember(state) {
  const servers = {};
  for (const server of state.servers) {
    servers[server.name] = { ...server.totals, sequences: server.load.sequences };
  }
  const last = history[history.length - 1];
  if (last && state.at_s <= last.at) {
    // The same answer again, or another process with a clock of its own.
    if (state.at_s < last.at) history.length = 0;
    else return;
  }
  history.push({ at: state.at_s, servers });
  while (history[0].at < state.at_s - HISTORY_S) history.shift();
}

function since(from, to, name) {
  const a = from?.servers[name], b = to?.servers[name];
  if (!a || !b || to.at <= from.at) return { rate: null, ttft: null };
  const firsts = b.first_tokens - a.first_tokens;
  return {
    rate: Math.max(0, (b.output_tokens - a.output_tokens) / (to.at - from.at)),
    ttft: firsts > 0 ? (b.first_token_s - a.first_token_s) / firsts : null,
    firsts,
  };
}

function latest(name) {
  const to = history[history.length - 1];
  return since(history.find((one) => one.at >= to.at - WINDOW_S), to, name);
}

// Charts

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 64, TOP = 10, BOTTOM = 34;

function svg(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function steps(most) {
  const unit = 10 ** Math.floor(Math.log10(most));
  const step = [0.2, 0.5, 1, 2].map((k) => k * unit).find((s) => most / s <= 5) || 2 * unit;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

// series: [{name, role, points: [[x, y, low, high]], now: [x, y]}]
function chart(id, { series, ticks, log = false, line = null, xName, unit = (y) => number(y, 3) }) {
  const canvas = byId(id);
  const box = canvas.getBoundingClientRect();
  const width = Math.max(280, box.width), height = Math.max(160, box.height);
  canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const known = series.filter((one) => one.points.length > 1);
  const scale = log ? Math.log2 : (x) => x;
  const x0 = scale(ticks[0]), x1 = scale(ticks[ticks.length - 1]);
  const x = (value) => LEFT + ((Math.min(Math.max(scale(value), x0), x1) - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const most = Math.max(1e-9, ...known.flatMap((one) => one.points.map((point) => point[1]))) * 1.12;
  const y = (value) => height - BOTTOM - (Math.min(value, most) / most) * (height - TOP - BOTTOM);
  const parts = [];
  for (const tick of steps(most)) {
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(tick), y2: y(tick) }));
    parts.push(svg("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, unit(tick)));
  }
  for (const tick of ticks) parts.push(svg("text", { x: x(tick), y: height - BOTTOM + 14, "text-anchor": "middle" }, number(tick)));
  parts.push(svg("text", { x: (LEFT + width - RIGHT) / 2, y: height - 4, "text-anchor": "middle" }, xName));
  if (line !== null) {
    parts.push(svg("line", { class: "crossing", x1: x(line), x2: x(line), y1: TOP, y2: height - BOTTOM }));
    parts.push(svg("text", { x: x(line) + 4, y: TOP + 10 }, `cross at ${line}`));
  }
  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
  const labels = [];
  for (const one of known) {
    if (one.points[0].length > 2) {
      const there = one.points.map((p) => [p[0], p[2]]);
      const back = one.points.map((p) => [p[0], p[3]]).reverse();
      parts.push(svg("path", { class: `band ${one.role}`, d: `${path([...there, ...back])}Z` }));
    }
    parts.push(svg("path", { class: `curve ${one.role}`, d: path(one.points) }));
    const end = one.points[one.points.length - 1];
    labels.push({ name: one.name, role: one.role, y: y(end[1]) + 4 });
    if (one.now) parts.push(svg("circle", { class: `point ${one.role}`, cx: x(one.now[0]), cy: y(one.now[1]), r: one.role === "spec" ? 7 : 4.5 }));
  }
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((label, i) => {
    if (i && label.y < labels[i - 1].y + 13) label.y = labels[i - 1].y + 13;
    parts.push(svg("text", { class: label.role, x: width - RIGHT + 6, y: label.y }, label.name));
  });
  if (!known.length) parts.push(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing yet"));
  canvas.replaceChildren(...parts);
  const said = known.map((one) => {
    const [a, b] = one.now || one.points[one.points.length - 1];
    return `${one.name}: ${unit(b)} at ${number(a)}`;
  });
  const title = canvas.closest("figure").querySelector("figcaption").textContent;
  canvas.setAttribute("aria-label", `${title}. ${said.join("; ") || "nothing yet"}`);
}

function at(points, x) {
  // Between two points of a curve in the logarithm of x.
  const i = points.findIndex((point) => point[0] >= x);
  if (i <= 0) return points[Math.max(i, points.length ? (i < 0 ? points.length - 1 : 0) : 0)]?.[1];
  const [a, b] = [points[i - 1], points[i]];
  const part = Math.log(x / a[0]) / Math.log(b[0] / a[0]);
  return a[1] + part * (b[1] - a[1]);
}

function drawCurves(state, model) {
  const loads = Object.fromEntries(state.servers.map((server) => [server.name, server.load]));
  const series = Object.entries(model.servers).map(([name, server]) => {
    const points = server.tpot.map((p) => [p.sequences, p.sequences / p.s, p.sequences / p.high_s, p.sequences / p.low_s]);
    const n = Math.max(1, loads[name]?.sequences ?? 1);
    return { name, role: server.role, points, now: points.length ? [n, at(points, n)] : null };
  });
  const ticks = series.find((one) => one.points.length)?.points.map((point) => point[0]) || [1, 256];
  chart("c-tpot", { series, ticks, log: true, line: model.crossover, xName: "sequences in flight", unit: number });
  const ttft = Object.entries(model.servers).map(([name, server]) => ({
    name, role: server.role, points: server.ttft.map((p) => [p.prefill_tokens, p.s, p.low_s, p.high_s]),
  }));
  chart("c-ttft", { series: ttft, ticks: [256, 1024, 2048, 4096, 8192], log: true, xName: "prompt tokens", unit: seconds });
  byId("curve-head").replaceChildren(row([["Sequences"], ...series.map((one) => [`${one.name}, tokens/s (bounds)`, "n"])], true));
  byId("curve").replaceChildren(...ticks.map((n) => row([[number(n)], ...series.map((one) => {
    const point = one.points.find((p) => p[0] === n);
    return [point ? `${number(point[1])} (${number(point[2])} to ${number(point[3])})` : "–", "n"];
  })], true)));
}

function drawHistory(state) {
  const end = history[history.length - 1].at;
  const lines = (value) => state.servers.map((server) => ({
    name: server.name, role: server.role,
    points: history.map((one, i) => [one.at - end, value(one, i, server.name)]).filter((point) => point[1] != null),
  }));
  const options = { ticks: [-120, -90, -60, -30, 0], xName: "seconds", unit: number };
  chart("c-load", { ...options, series: lines((one, _, name) => one.servers[name]?.sequences) });
  chart("c-rate", { ...options, series: lines((one, i, name) => since(history[Math.max(0, i - 2)], one, name).rate) });
}

// Words

function plugin(engine) {
  const told = engine?.switch;
  if (!told) return "not there";
  const off = told.off_share == null ? "" : `, ${share(told.off_share)} of steps without`;
  return `${told.state}, speculation ${told.mode}${off}`;
}

const inWords = ({ policy, threshold }) => (threshold == null ? policy : `${policy} with threshold ${threshold}`);

const BREAKERS = {
  open: "failed several times in a row: left alone for a while",
  half_open: "failed several times in a row: one request is its trial",
};

// A sign, words, and whether it gets requests as they come.
function standingOf(server) {
  const sequences = server.load.sequences;
  const last = server.last_error ? `: ${server.last_error}` : "";
  if (!server.up) return [`✕ ${server.state}${last}${server.drained ? "; drained" : ""}`, false];
  if (server.drained) return [`○ drained, ${sequences ? "what it has goes on" : "nothing left"}`, false];
  if (BREAKERS[server.breaker]) return [`◐ ${BREAKERS[server.breaker]}`, false];
  return ["● up", true];
}

function queued({ interactive = 0, batch = 0 }) {
  return batch ? `${number(interactive + batch)}, ${number(batch)} of them batch` : number(interactive);
}

function warningsOf(state) {
  const able = state.servers.filter((server) => server.up && !server.drained);
  return [
    state.stage === "serving" ? null : "The router is shutting down: it takes no new requests.",
    able.length ? null : "No server takes requests: each gets a 503.",
    state.settings_latest ? null : "The settings that were read last are wrong, so those before them are in force. The log says what is wrong.",
    state.layout_warning,
    ...state.parity_warnings,
  ].filter(Boolean);
}

function drawServers(servers) {
  byId("servers").replaceChildren(...servers.map((server) => {
    const { rate, ttft } = latest(server.name);
    const engine = server.engine;
    const [state, well] = standingOf(server);
    return row([
      [`${server.name} (${server.role})`], [state, well ? "up" : "down"],
      [number(server.load.sequences), "n"], [number(server.load.prefill_sequences), "n"],
      [number(rate), "n"], [seconds(ttft), "n"],
      [number(engine?.running), "n"], [number(engine?.queued), "n"], [share(engine?.token_usage), "n"],
      [plugin(engine)],
    ], true);
  }));
}

function drawNow(state, model, decisions) {
  const policy = state.policy;
  const counts = {};
  for (const one of decisions) counts[one.reason] = (counts[one.reason] || 0) + 1;
  const [reason] = Object.entries(counts).sort((a, b) => b[1] - a[1])[0] || [];
  const where = policy.mode ? `All go to ${policy.mode}` : "Each request is placed by itself";
  const why = reason ? `; most often because: ${REASONS[reason] || reason}` : "";
  const override = policy.override;
  set("mode", `Policy ${policy.name}, ${state.layout} GPUs. ${where}${why}.`);
  set("override", override ? `Put in force by an operator: ${inWords(override)}, for ${duration(override.remaining_s)} more, then ${policy.configured} again.` : "");
  set("about", `${state.version}`);
  set("in-flight", number(sum(state.servers.map((server) => server.load.sequences))));
  set("queue", queued(state.queue));
  const all = state.servers.map((server) => latest(server.name));
  const rates = all.filter((one) => one.rate != null);
  set("rate", rates.length ? number(sum(rates.map((one) => one.rate))) : "–");
  const firsts = all.filter((one) => one.firsts > 0);
  set("ttft", seconds(firsts.length ? sum(firsts.map((one) => one.ttft * one.firsts)) / sum(firsts.map((one) => one.firsts)) : null));
  set("crossing", model.crossover == null ? "not known" : `${model.crossover}`);
  const { o1, o3 } = model.regret;
  set("regret-name", `Missed against ${o3 == null ? "the better role alone" : "the best split"}`);
  set("regret", share(o3 ?? o1));
  set("switches", `Changes of mode since the router's start: ${policy.switches}`);
  const warnings = warningsOf(state);
  const list = byId("warnings");
  if (list.dataset.shown !== warnings.join("\n")) {
    list.dataset.shown = warnings.join("\n");
    list.replaceChildren(...warnings.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
  }
}

function drawDecisions(decisions) {
  byId("decisions").replaceChildren(...decisions.slice(0, DECISIONS_SHOWN).map((one) => row([
    [seconds(one.age_s), "n"], [one.server], [REASONS[one.reason] || one.reason],
    [Object.entries(one.loads).map(([name, load]) => `${name} ${load.sequences}`).join(", ")],
  ])));
}

let before = null;

function noteChanges(state) {
  const now = { "the policy": state.policy.name, "the mode": state.policy.mode || "none" };
  for (const server of state.servers) {
    now[server.name] = server.up ? (server.drained ? "drained" : "up") : server.state;
    now[`the breaker of ${server.name}`] = server.breaker.replace("_", " ");
    if (server.engine?.switch) now[`speculation on ${server.name}`] = server.engine.switch.mode;
  }
  for (const [what, value] of Object.entries(before ? now : {})) {
    if (before[what] === undefined || before[what] === value) continue;
    const item = document.createElement("li");
    item.textContent = `${new Date().toLocaleTimeString()}: ${what} is ${value}, was ${before[what]}`;
    byId("changes").prepend(item);
    while (byId("changes").children.length > CHANGES_MAX) byId("changes").lastChild.remove();
  }
  before = now;
}

// The loop

const ask = async (name, ageS = 1) => {
  const answer = await fetch(`${HERE}${name}`, { cache: "no-store", headers: { "cache-control": `max-age=${ageS}` }, signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
  return answer.json();
};

let paused = false, timer = null, asking = false;

async function poll() {
  clearTimeout(timer);
  timer = null;
  if (paused || document.hidden || asking) return;
  asking = true;
  try {
    const [state, model, { decisions }] = await Promise.all(["state", "model", "decisions"].map((name) => ask(name)));
    remember(state);
    drawNow(state, model, decisions);
    drawServers(state.servers);
    drawHistory(state);
    drawCurves(state, model);
    drawDecisions(decisions);
    noteChanges(state);
    document.dispatchEvent(new CustomEvent("state", { detail: state }));
    link("Live", false);
  } catch (error) {
    console.warn(error);
    link("The router does not answer", true);
  } finally {
    asking = false;
    schedule();
  }
}

function link(text, lost) {
  set("link", text);
  byId("link").className = lost ? "lost" : "";
}

function schedule() {
  if (timer === null && !paused && !document.hidden) timer = setTimeout(poll, POLL_MS);
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) link("Paused", false);
  else poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
poll();
