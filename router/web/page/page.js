// The live page: fetches /debug/overview every second and draws it. Data of clients, such as request ids, is only ever inserted
// as text nodes; the page's content security policy forbids anything else.

import { clock, linear, svg } from "./charts.js";
import { bandwidth, count, duration, format, h, integer, latencyTick, percent, perSecond, setText, short } from "./format.js";
import { PANELS, promptSources, rolesOf } from "./panels.js";
import {
  CURVE_S, add, around, between, bucketPosition, counterDelta, distribution, forget, last, latestRequests, needsHistory, quantile, rate, rates, routers, shareBelow, show,
  snapshots, sum,
} from "./snapshots.js";

const POLL_MS = 1000; // between two questions, divided by the number of routers
const MAX_ROWS = 40; // requests shown
const KEY_ITEM = "pdserve-admin-key"; // in sessionStorage

const $ = (id) => document.getElementById(id);

let requests = []; // the latest, newest first
let paused = false;
let timer = 0;

// ---- polling ------------------------------------------------------------------------------------------------------

/** The router requires its admin key. */
class KeyRequired extends Error {}

async function fetchJson(path) {
  const key = sessionStorage.getItem(KEY_ITEM);
  const bytes = key === null ? [] : new TextEncoder().encode(key); // header values are byte strings
  const headers = key === null ? {} : { Authorization: `Bearer ${String.fromCharCode(...bytes)}` };
  const response = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (response.status === 401) throw new KeyRequired((await response.json()).error.message);
  if (!response.ok) throw new Error(`the router answered ${response.status}`);
  return response.json();
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    add(await fetchJson(needsHistory() ? "/debug/overview?history=true" : "/debug/overview"));
    requests = latestRequests();
    showKeyForm(null);
    showConnectionError("");
    draw();
  } catch (error) {
    if (error instanceof KeyRequired) return showKeyForm(error.message);
    if (!(error instanceof TypeError || error instanceof DOMException || error.message.startsWith("the router"))) console.error(error);
    showConnectionError("The router does not respond; retrying every second. The data shown is out of date.");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS / Math.max(1, routers().length));
}

/** Shows the form for the admin key, or with null the page. */
function showKeyForm(message) {
  $("key-form").hidden = message === null;
  $("main").hidden = message !== null;
  if (message === null) return;
  const wasRejected = sessionStorage.getItem(KEY_ITEM) !== null;
  sessionStorage.removeItem(KEY_ITEM);
  forget();
  $("rows").replaceChildren();
  setText($("state"), "");
  setText($("key-message"), wasRejected ? "This key is wrong." : message.includes("no admin key") ? `${message}.` : "");
  $("key").focus();
}

function showConnectionError(text) {
  $("connection-error").hidden = !text;
  setText($("connection-error"), text);
  document.body.classList.toggle("stale", Boolean(text));
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY_ITEM, $("key").value);
  $("key").value = "";
  poll();
});

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  setText($("pause"), paused ? "Resume" : "Pause");
  poll();
});

document.addEventListener("visibilitychange", poll);
for (const id of ["window", "filter", "range"]) $(id).addEventListener("change", draw);
addEventListener("resize", draw);
$("router").addEventListener("change", () => {
  show($("router").value);
  requests = latestRequests();
  draw();
});

// ---- drawing ------------------------------------------------------------------------------------------------------

function draw() {
  const now = last(snapshots);
  if (now === undefined) return;
  document.title = `pdserve · ${now.model}`;
  setText($("model"), now.model);
  setText($("state"), now.ready ? "ready" : `not ready: ${now.why}`);
  $("state").className = now.ready ? "good" : "bad";
  setText($("about"), `${now.router} · pdserve ${now.version} · up ${uptime(now.uptime)}`);
  drawRouters();
  drawFigures(now);
  drawFleet(now);
  drawLatency(now);
  drawKv(now);
  drawFaults(now);
  drawRequests(now);
}

/** Lets the user choose a router, if several answer. */
function drawRouters() {
  const ids = routers(), select = $("router"), options = [...select.options].slice(1).map((option) => option.value);
  select.parentElement.hidden = ids.length < 2;
  if (options.join() !== ids.join()) select.replaceChildren(select.options[0], ...ids.map((id) => new Option(id, id)));
  setText(select.options[0], `all ${ids.length}`);
}

function uptime(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = Math.max(0, units.findIndex(([size]) => seconds >= size * 2));
  return `${Math.floor(seconds / units[i][0])} ${units[i][1]}`;
}

/** A curve without axes, of the last CURVE_S or of what there is; null leaves a gap. */
function sparkline(values, color, top) {
  const height = 34, end = last(snapshots).time, span = Math.max(60, Math.min(CURVE_S, end - snapshots[0].time));
  const points = values.map((value, i) => (value === null ? null : `${(snapshots[i].time - end + span).toFixed(1)} ${(height - 1 - (value / (top || 1)) * (height - 2)).toFixed(1)}`));
  const line = points.map((point, i) => (point === null ? "" : (i && points[i - 1] !== null ? "L" : "M") + point)).join("");
  return svg("svg", { class: `spark c-${color}`, viewBox: `0 0 ${span} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: line }));
}

for (const panel of PANELS) {
  Object.assign(panel, { number: h("div", "number"), below: h("div", "below") });
  $("figures").append(h("div", "", h("dt", "", panel.title), h("dd", "", panel.number, panel.below, panel.chart.element)));
}

function drawFigures(now) {
  const start = now.time - Math.min(Number($("range").value), Math.max(60, now.time - snapshots[0].time)), times = snapshots.map((one) => one.time);
  const marks = incidents(now).flatMap((one) => one.events.map((event) => ({ time: event.time, text: `${EVENTS[event.event][0]}${event.count > 1 ? ` × ${event.count}` : ""} ${event.instance}` })));
  for (const { chart, curves, figure, limit, number, below } of PANELS) {
    const { shown: [value, unit], below: text, isLate } = figure(now);
    number.className = isLate ? "number late" : "number";
    number.replaceChildren(value, h("span", "unit", unit));
    const series = curves(now), key = series.length > 1 ? h("span", `key c-${series[1].color}`) : "";
    below.replaceChildren(key, text); // which is of the second curve, where there is one
    chart.update({ start, end: now.time, times, series, limit: limit?.(now) ?? null, marks: marks.filter((mark) => mark.time > start) });
  }
}

// ---- instances

const pools = new Map(); // role → { card, title, list }, reused so that a list keeps its scroll position

function drawFleet(now) {
  const roles = rolesOf(now);
  const shown = roles.includes("prefill") || roles.includes("decode") || !roles.length ? ["prefill", "decode"] : [];
  if (roles.includes("both")) shown.push("both");
  const cards = shown.map((role) => drawPool(now, role));
  if (shown.length > 1) cards.splice(1, 0, drawStore(now));
  if (cards.length !== $("fleet").children.length || cards.some((card, i) => card !== $("fleet").children[i])) $("fleet").replaceChildren(...cards);
}

function drawPool(now, role) {
  if (!pools.has(role)) {
    const title = h("h3"), list = h("ul");
    pools.set(role, { card: h("section", `pool ${role} c-${role}`, title, list), title, list });
  }
  const { card, title, list } = pools.get(role);
  const members = now.instances.filter((instance) => instance.role === role);
  const name = { prefill: "Prefill", decode: "Decode", both: "Prefill and decode" }[role];
  const count = role === "prefill" ? "computed_tokens" : "generation_tokens";
  const what = role === "prefill" ? "prompt tokens/s" : "output tokens/s";
  const series = members.map((member) => rates(counterDelta(count, (instance) => instance.instance_id === member.instance_id)));
  const top = Math.max(0, ...series.flat());
  title.replaceChildren(`${name} · ${members.length}`, h("small", "", `${what}${top ? `, curves up to ${short(top)}` : ""}`));
  list.replaceChildren(...members.map((member, i) => drawInstance(member, series[i], top, role)));
  if (!members.length) list.replaceChildren(h("li", "none", "no instance is attached"));
  return card;
}

function drawInstance(instance, values, top, role) {
  const held = instance.num_blocks ? instance.kv_cache_blocks_held / instance.num_blocks : 0;
  const cached = instance.num_blocks ? Math.min(1 - held, instance.cached_blocks / instance.num_blocks) : 0;
  const meter = h("div", "meter", sized("i", "", held), sized("i", "cached", cached));
  const load = h("div", "load", h("b", "", integer(instance.running)), " running · ", h("b", "", integer(instance.waiting)), " waiting · ");
  const backlog = role === "decode" ? [instance.output_tokens, "output tokens remaining"] : [instance.prefill_tokens, "prompt tokens queued"];
  load.append(h("b", "", integer(backlog[0])), ` ${backlog[1]}`);
  return h("li", "instance",
    h("div", "name", instance.ranks > 1 ? `${instance.instance_id} on ${instance.ranks} ranks` : instance.instance_id, condition(instance) ?? h("span", "", format(perSecond(last(values), "tokens/s")))),
    sparkline(values, role, top), load,
    h("div", "blocks", meter, h("span", "", `${integer(instance.kv_cache_blocks_held)} held, ${integer(instance.cached_blocks)} cached of ${integer(instance.num_blocks)}`)));
}

function condition(instance) {
  if (instance.breaker === "open") return h("span", "bad", "circuit breaker open: receives no requests");
  if (instance.breaker === "half_open") return h("span", "warn", "circuit breaker half open: probing");
  if (instance.draining) return h("span", "warn", "draining");
  if (instance.stores_out.length) return h("span", "bad", `no answer from the KV store ${instance.stores_out.join(", ")}: requests go on without it`);
  return instance.last_heard_seconds > 1 ? h("span", "warn", `no frame for ${instance.last_heard_seconds.toFixed(1)} s`) : null;
}

function sized(tag, className, share) {
  const made = h(tag, className);
  made.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return made;
}

function drawStore(now) {
  const names = [...new Set(now.instances.map((instance) => `${instance.connector}://`))].join(" ");
  const arrow = h("span", "arrow");
  return h("div", "store", h("b", "", names || "KV store"),
    h("span", "", `stored ${format(bandwidth(rate(counterDelta("store_bytes"))))}`), arrow,
    h("span", "", `loaded ${format(bandwidth(rate(counterDelta("load_bytes"))))}`));
}

// ---- latency

function drawLatency(now) {
  const seconds = Number($("window").value);
  drawHistogram(HISTOGRAMS[0], distribution("ttft", seconds), now.slo.ttft);
  drawHistogram(HISTOGRAMS[1], distribution("itl", seconds), now.slo.itl);
}

const SHOWN_S = 10; // the shortest axis of a histogram

const HISTOGRAMS = [["Time to first token", "prefill", "requests"], ["Time between tokens", "decode", "tokens"]].map(([title, color, unit]) => {
  const made = { title, unit, facts: h("div", "facts"), chart: h("div", `chart c-${color}`), axis: h("div", "axis"), columns: [] };
  made.chart.setAttribute("role", "img");
  made.axis.setAttribute("aria-hidden", "true");
  $("latency").append(h("div", "card", h("h3", "", title), made.facts, made.chart, made.axis));
  return made;
});

/** The buckets up to SHOWN_S, or to the SLO or the highest value, if that is more: there are buckets up to hours. */
function shownPart({ limits, counts }, slo) {
  const end = 1 + Math.max(limits.findIndex((limit) => limit >= SHOWN_S), slo ? Math.ceil(bucketPosition(limits, slo)) : 0, counts.findLastIndex(Boolean));
  return end >= counts.length ? { limits, counts } : { limits: limits.slice(0, end), counts: counts.slice(0, end) };
}

/** Columns are reused, so that the text of the one under the pointer stays. */
function drawHistogram(made, values, slo) {
  const { title, unit, chart, columns } = made, total = sum(values.counts), { limits, counts } = shownPart(values, slo);
  const facts = [0.5, 0.9, 0.99].map((q) => [`p${q * 100}`, format(duration(quantile(values, q))), slo < quantile(values, q)]);
  if (slo && total) facts.push([`within the SLO of ${format(duration(slo))}`, percent(shareBelow(values, slo)), shareBelow(values, slo) < 0.99]);
  facts.push([unit, integer(total), false]);
  chart.setAttribute("aria-label", `${title}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  made.facts.replaceChildren(...facts.map(([name, value, late]) => h("span", late ? "late" : "", `${name} `, h("b", "", value))));
  if (columns.length !== counts.length) {
    chart.replaceChildren();
    columns.splice(0, columns.length, ...counts.map(() => h("span", "column", h("i"), h("span", "tip"))));
    made.axis.replaceChildren(...counts.map((_, i) => h("span", "", i < limits.length && /^1(e|0|\b)|^0?\.0*1$/.test(String(limits[i])) ? latencyTick(limits[i]) : "")));
  }
  let end = -Infinity; // of the labels so far, in pixels: on a phone some would touch
  [...made.axis.children].forEach((label, i) => {
    const middle = ((i + 1) * chart.clientWidth) / counts.length, half = label.textContent.length * 3.5;
    const fits = middle - half >= end;
    label.style.visibility = fits ? "" : "hidden"; // which keeps its column
    if (label.textContent && fits) end = middle + half + 4;
  });
  const at = slo ? bucketPosition(limits, slo) : Infinity, { ticks, place } = linear(total ? counts.map((count) => count / total) : [1]);
  columns.forEach((column, i) => {
    const [bar, tip] = column.children, share = total ? counts[i] / total : 0;
    bar.className = at <= i ? "late" : "";
    bar.style.height = `${share ? Math.max(1.5, place(share) * 100) : 0}%`;
    bar.style.background = at > i && at < i + 1 ? `linear-gradient(90deg, var(--c) ${(at - i) * 100}%, var(--bad) ${(at - i) * 100}%)` : "";
    const range = i === limits.length ? `over ${latencyTick(last(limits))}` : i ? `${latencyTick(limits[i - 1])} to ${latencyTick(limits[i])}` : `up to ${latencyTick(limits[0])}`;
    setText(tip, `${range}: ${integer(counts[i])} ${unit}, ${percent(share)}`);
    tip.className = i > counts.length / 2 ? "tip left" : "tip";
  });
  const marks = ticks.map((tick) => {
    const mark = h("span", "level", percent(tick));
    mark.style.bottom = `${place(tick) * 100}%`;
    return mark;
  });
  if (!total) marks.push(h("span", "empty", Number($("window").value) ? "none in this time" : "none yet"));
  if (slo) {
    const mark = h("span", at > counts.length * 0.7 ? "mark left" : "mark", "SLO");
    mark.style.left = `${(at / counts.length) * 100}%`;
    marks.push(mark);
  }
  for (const old of chart.querySelectorAll(":scope > :not(.column)")) old.remove();
  chart.prepend(...marks);
  if (columns[0].parentElement !== chart) chart.append(...columns);
}

// ---- KV

function shares(title, parts, unit) {
  const total = sum(parts.map(([, count]) => count));
  const bar = h("div", "shares", ...parts.map(([, count, color]) => sized("i", `c-${color}`, total ? count / total : 0)));
  const legend = h("ul", "legend", ...parts.map(([name, count, color]) => h("li", `c-${color}`, `${name} `, h("b", "", total ? percent(count / total) : "–"))));
  return h("div", "", h("h3", "", title), bar, legend, h("small", "", `of ${integer(total)} ${unit}`));
}

function drawKv(now) {
  const sources = promptSources(), placements = now.placements;
  $("kv").replaceChildren(
    h("div", "card", shares("KV sources of the latest prompts", [["computed", sources.computed, "prefill"], ["pool", sources.pool, "decode"], ["store", sources.store, "connector"]], "tokens")),
    h("div", "card", shares("Placement of prefills", [["on a prefill instance", placements.split ?? 0, "prefill"], ["on the decode instance", placements.decode ?? 0, "decode"],
      ["prefill and decode on one instance", (placements.both ?? 0) + (placements.prefill ?? 0), "router"]], "requests since the start")));
}

// ---- faults

// Event → [word shown, colour].
const EVENTS = {
  left: ["lost", "bad"], failed: ["failed", "bad"], breaker: ["breaker", "bad"], missing: ["missing", "bad"], waiting: ["no instance", "bad"], moved: ["migrated", "warn"], fallback: ["recomputed", "warn"],
  role: ["role", "good"], failed_handovers: ["failed hand-overs", "warn"], refused: ["refused", "warn"], draining: ["draining", ""], drained: ["drained", ""], joined: ["joined", "good"],
  autoscaler: ["autoscaler", ""],
};
const APART_S = 30; // between two faults of different incidents
const COST_S = 60; // after the last fault of an incident, in which what happens is its cost
let drawnEvents = ""; // the events and costs drawn last

const isFault = (event) => ["bad", "warn"].includes(EVENTS[event.event]?.[1]);

/** Faults that lie close together, latest first, each with its first and last time. */
function incidents(now) {
  const found = [];
  for (const event of now.events.filter(isFault)) {
    if (!found.length || last(found).start - event.time > APART_S) found.push({ start: event.time, end: event.time, events: [] });
    last(found).start = event.time;
    last(found).events.push(event);
  }
  return found;
}

/** What an incident has cost clients up to now: streams moved, failed and refused, and latencies before and after. */
function cost({ start, end }) {
  const known = around(start, end, COST_S);
  if (known === null) return "";
  const { then, now, before } = known, grown = (name) => sum(Object.values(now[name])) - sum(Object.values(then[name]));
  const moved = grown("migrations"), failed = (now.requests.error ?? 0) - (then.requests.error ?? 0);
  const pauses = between("pauses", then, now), parts = [];
  const pause = sum(pauses.counts) ? `, for whose next token clients waited ${format(duration(quantile(pauses, 0.5)))} in the median and ${format(duration(quantile(pauses, 1)))} at most` : "";
  if (moved) parts.push(`${count(moved, "stream")} moved${pause}`);
  if (grown("fallbacks")) parts.push(`${count(grown("fallbacks"), "prompt")} recomputed by decode`);
  if (grown("refusals")) parts.push(`${count(grown("refusals"), "request")} refused`);
  parts.push(failed ? `${count(failed, "request")} failed` : "no request failed");
  for (const [name, title] of [["ttft", "TTFT"], ["itl", "ITL"]]) {
    const [was, is] = [before && quantile(between(name, before, then), 0.99), quantile(between(name, then, now), 0.99)];
    if (is !== null) parts.push(`${title} p99 ${was === null ? "" : `${format(duration(was))} → `}${format(duration(is))}`);
  }
  return parts.join(" · ");
}

function drawFaults(now) {
  const recent = now.events.filter((event) => now.time - event.time < 60 && isFault(event));
  $("alarm").hidden = !recent.length;
  setText($("alarm"), `${recent.map((event) => EVENTS[event.event][0] + (event.count > 1 ? ` × ${event.count}` : "")).slice(0, 3).join(", ")} in the last minute`);
  const total = (counts) => integer(sum(Object.values(counts)));
  setText($("faults-sum"), `${total(now.migrations)} streams migrated · ${total(now.fallbacks)} prompts recomputed by decode · ` +
    `${total(now.refusals)} requests refused · ${integer(now.requests.error ?? 0)} failed`);
  const costs = new Map(incidents(now).map((incident) => [incident.events[0], cost(incident)]));
  const state = now.router + now.events.map((event) => `${event.time}${event.count}`).join() + [...costs.values()].join();
  if (state === drawnEvents) return;
  drawnEvents = state;
  $("faults").replaceChildren(...now.events.flatMap((event) => {
    const [word, color] = EVENTS[event.event] ?? [event.event, ""];
    const time = h("time", "", clock(event.time));
    time.dateTime = new Date(event.time * 1000).toISOString();
    const item = h("li", "", time, h("span", `what ${color}`, event.count > 1 ? `${word} × ${event.count}` : word), h("p", "", event.text));
    return costs.get(event) ? [h("li", "cost", h("span"), h("span", "what", "cost"), h("p", "", costs.get(event))), item] : [item];
  }));
  if (!now.events.length) $("faults").append(h("li", "empty", "No events yet."));
}

// ---- requests

const COLORS = [["waiting", "router"], ["prefill", "prefill"], ["hand-over", "connector"], ["decode", "decode"]];
$("legend").append(...COLORS.map(([name, color]) => h("li", `c-${color}`, name)));

// The stage that ends each segment of a bar, and the component that it is attributed to.
const SEGMENTS = [["routed", "router"], ["prefill_started", "router"], ["first_token", "prefill"], ["kv_ready", "connector"],
  ["decode_started", "router"], ["finished", "decode"]];

const isRunning = (request) => request.stages_ms.finished === undefined;
const durationMs = (request, now) => (isRunning(request) ? (now.time - request.time) * 1000 : request.stages_ms.finished);
const CAN_HOVER = matchMedia("(hover: hover)");
const FILTERS = {
  all: () => true,
  late: (request, now, scale) => request.stages_ms.first_token / 1000 > now.slo.ttft || durationMs(request, now) > scale,
  failed: (request) => request.migrations > 0 || request.finish_reason === "error",
};
const rows = new Map(); // request id → its elements and state

function drawRequests(now) {
  const durations = requests.map((request) => durationMs(request, now)).sort((a, b) => a - b);
  const scale = (durations[Math.floor(durations.length * 0.9)] || 1) * 1.05; // longer bars are cut off; the number beside them is exact
  const filter = FILTERS[$("filter").value];
  const shown = requests.filter((request) => filter(request, now, scale)).slice(0, MAX_ROWS);
  const open = requests.filter((request) => rows.get(request.request_id)?.details.open && !shown.includes(request));
  const list = $("rows");
  const frozen = rows.size && list.matches(":hover") && CAN_HOVER.matches; // so that no row moves under the pointer
  $("frozen").hidden = !frozen;
  if (frozen) shown.splice(0, shown.length, ...requests.filter((request) => rows.has(request.request_id)));
  list.querySelector(".empty")?.remove();
  for (const request of [...shown, ...open]) {
    const row = rows.get(request.request_id) ?? newRow(request);
    if (!row.item.isConnected) list.insertBefore(row.item, [...list.children].find((item) => item.time < request.time) ?? null);
    updateRow(row, request, now, scale);
  }
  const shownIds = new Set(shown.map((request) => request.request_id));
  for (const [id, row] of frozen ? [] : rows) {
    if (shownIds.has(id) || row.details.open || row.item.contains(document.activeElement)) continue;
    row.item.remove();
    rows.delete(id);
  }
  if (!rows.size) list.append(h("li", "empty", requests.length ? "No request matches." : "No requests yet."));
}

function newRow(request) {
  const id = request.request_id;
  const name = h("span", "id", id), where = h("span", "where"), bar = h("span", "bar"), time = h("span", "num"), state = h("span", "state");
  const detail = h("div", "detail"), details = h("details", "", h("summary", "", name, where, bar, time, state), detail);
  const row = { id, item: h("li", "", details), details, where, bar, time, state, detail, startedAt: request.time, isFinal: false };
  row.item.time = request.time; // for the order of the list
  name.title = id;
  details.addEventListener("toggle", () => details.open && loadDetail(row));
  rows.set(id, row);
  return row;
}

function updateRow(row, request, now, scale) {
  row.bar.replaceChildren(...segments(request, now, scale));
  if (row.isFinal) return;
  row.isFinal = !isRunning(request);
  const late = request.stages_ms.first_token / 1000 > now.slo.ttft, failed = request.finish_reason === "error";
  const isOneInstance = request.prefill_instance === request.decode_instance;
  setText(row.where, isOneInstance ? request.decode_instance : `${request.prefill_instance} → ${request.decode_instance}`);
  setText(row.time, format(duration(durationMs(request, now) / 1000)));
  setText(row.state, failed ? "failed" : isRunning(request) ? "running" : request.migrations ? "migrated" : late ? "late" : request.finish_reason);
  row.state.className = `state ${failed ? "bad" : request.migrations || late ? "warn" : ""}`;
  row.bar.classList.toggle("running", isRunning(request));
  if (row.details.open) loadDetail(row);
}

function segments(request, now, scale) {
  const bars = [];
  let drawnMs = 0;
  const add = (untilMs, color) => {
    if (untilMs > drawnMs) bars.push(sized("i", `c-${color}`, (untilMs - drawnMs) / scale));
    drawnMs = Math.max(drawnMs, untilMs);
  };
  for (const [stage, color] of SEGMENTS) {
    const at = request.stages_ms[stage];
    if (at !== undefined) add(at, stage === "finished" && request.stages_ms.decode_started === undefined ? "router" : color);
  }
  if (isRunning(request)) add(durationMs(request, now), request.stages_ms.decode_started !== undefined ? "decode" : request.stages_ms.prefill_started !== undefined ? "prefill" : "router");
  return bars;
}

async function loadDetail(row) {
  let tries = routers().length > 1 ? 8 * routers().length : 1; // each may reach a router that has not served it
  while (tries-- > 0) {
    try {
      return row.detail.replaceChildren(...detail(row, await fetchJson(`/debug/requests/${encodeURIComponent(row.id)}`)));
    } catch (error) {
      row.detail.replaceChildren(h("p", "", `Details are not available: ${error.message}.`));
      if (tries) await fetchJson("/debug/overview").catch(() => null); // which ends the connection to that router
    }
  }
}

/** The elements that show everything known about one request. */
function detail(row, timeline) {
  const end = Math.max(...Object.values(timeline.stages_ms), 0.001);
  const instances = { router: "", connector: "", prefill: timeline.prefill_instance, decode: timeline.decode_instance };
  const gantt = h("div", "gantt", ...timeline.parts.flatMap((part) => {
    const bar = h("i", `c-${part.who}`);
    bar.style.left = `${(part.start_ms / end) * 100}%`;
    bar.style.width = `${((part.end_ms - part.start_ms) / end) * 100}%`;
    const name = h("span", "part", part.name, h("span", "worker", instances[part.who]));
    return [name, h("span", "ms", format(duration((part.end_ms - part.start_ms) / 1000))), h("span", "lane", bar)];
  }));
  const sources = timeline.prompt_tokens_by_source, loaded = timeline.loaded, drafts = timeline.drafts, drafted = drafts.accepted + drafts.rejected;
  const first = timeline.stages_ms.first_token;
  const facts = [
    `Received at ${clock(row.startedAt)}.`,
    `${integer(timeline.prompt_tokens)} prompt tokens: ${integer(sources.computed)} computed, ${integer(sources.local_hit)} in the pool, ${integer(sources.loaded)} from the store.`,
    `${integer(timeline.output_tokens)} output tokens${first === undefined ? "" : `, the first after ${format(duration(first / 1000))}`}.`,
    drafted ? `${integer(drafts.accepted)} of ${count(drafted, "draft")} were right.` : "",
    loaded.blocks ? `${integer(loaded.blocks)} blocks (${(loaded.bytes / 2 ** 20).toFixed(2)} MiB) loaded at ${format(bandwidth(loaded.gb_per_s * 1e9))}.` : "",
  ];
  const elements = [gantt, h("p", "", facts.filter(Boolean).join(" "))];
  const pause = (move) => (move.pause_s === null ? "" : `; the client waited ${format(duration(move.pause_s))} for the next token`);
  elements.push(...timeline.moves.map((move) => h("p", "bad", `Migrated from ${move.instance} after ${format(duration(move.ms / 1000))}${pause(move)}: ${move.why}`)));
  if (timeline.error) elements.push(h("p", "bad", timeline.error));
  if (timeline.placement) elements.push(h("p", "", `Placement: ${timeline.placement.way}, because of ${timeline.placement.reason}.`));
  elements.push(...timeline.decisions.map(decisionTable));
  return elements;
}

/** The candidates of one placement decision and their scores. */
function decisionTable(decision) {
  const columns = [["instance", "instance"], ["score", "score"], ["requests", "requests"], ["prefill_tokens", "prompt tokens"],
    ["output_tokens", "output tokens"], ["cached_tokens", "cached"]];
  const cell = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
  const head = h("thead", "", h("tr", "", ...columns.map(([, name]) => h("th", "", name))));
  const body = h("tbody", "", ...decision.candidates.map((candidate) => h("tr", candidate.instance === decision.chosen ? "chosen" : "",
    ...columns.map(([key]) => h("td", "", cell(candidate[key]))))));
  return h("div", "", h("p", "", `${decision.role}: ${decision.chosen}, by ${decision.policy}: ${decision.why}`), h("div", "scroll", h("table", "", head, body)));
}

poll();
