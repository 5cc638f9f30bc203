// The live page: fetches /debug/overview every second and draws it. Data of clients, such as request ids, is only ever inserted
// as text nodes; the page's content security policy forbids anything else.

const POLL_MS = 1000;
const CURVE_S = 900; // the time that a curve shows: what a router keeps
const FINE_S = 60; // the latest time of which each second's snapshot is kept, and of older ones one in COARSE_S
const COARSE_S = 15;
const RATE_WINDOW_S = 10;
const MAX_ROWS = 40; // requests shown
const KEY_ITEM = "pdserve-admin-key"; // in sessionStorage

const $ = (id) => document.getElementById(id);

const histories = new Map(); // router id → its snapshots: routers that share a port answer in turns
let snapshots = []; // of the router that answered last, oldest first
let requests = []; // its latest requests, newest first
let paused = false;
let timer = 0;

// ---- elements and formatting --------------------------------------------------------------------------------------

function h(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children.filter((child) => child !== null && child !== ""));
  return made;
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const last = (list) => list[list.length - 1];
const sum = (values) => values.reduce((a, b) => a + b, 0);
const integer = (number) => Math.round(number).toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(share > 0.9 && share < 1 ? 1 : 0)} %`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/** Returns [number, unit], like the next two. */
function duration(seconds) {
  if (seconds === null || !isFinite(seconds)) return ["–", ""];
  const ms = seconds * 1000;
  if (ms < 10) return [ms.toFixed(1), "ms"];
  if (ms < 1000) return [ms.toFixed(0), "ms"];
  return [seconds < 10 ? seconds.toFixed(2) : seconds.toFixed(seconds < 100 ? 1 : 0), "s"];
}

function bandwidth(bytes) {
  if (bytes === null) return ["–", ""];
  for (const [size, unit] of [[1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]) {
    if (bytes >= size) return [(bytes / size).toFixed(bytes < 10 * size ? 2 : bytes < 100 * size ? 1 : 0), unit];
  }
  return [bytes.toFixed(0), "B/s"];
}

function perSecond(rate, unit) {
  return rate === null ? ["–", ""] : [rate < 10 ? rate.toFixed(1) : integer(rate), unit];
}

const format = ([number, unit]) => (unit ? `${number} ${unit}` : number);

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
    addSnapshot(await fetchJson(histories.size ? "/debug/overview" : "/debug/overview?history=true"));
    showKeyForm(null);
    showConnectionError("");
    draw();
  } catch (error) {
    if (error instanceof KeyRequired) return showKeyForm(error.message);
    if (!(error instanceof TypeError || error instanceof DOMException || error.message.startsWith("the router"))) console.error(error);
    showConnectionError("The router does not respond; retrying every second. The data shown is out of date.");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function addSnapshot(snapshot) {
  if (!histories.has(snapshot.router)) histories.set(snapshot.router, []);
  snapshots = histories.get(snapshot.router);
  while (histories.size > 16) histories.delete(histories.keys().next().value); // restarted routers have new ids
  requests = snapshot.timelines;
  delete snapshot.timelines;
  for (const one of [...(snapshot.history ?? []), snapshot]) {
    one.byId = new Map(one.instances.map((instance) => [instance.instance_id, instance]));
    snapshots.push(one);
  }
  delete snapshot.history;
  thinOut(snapshot.time);
}

/** Leaves each second of the last minute, each COARSE_S before it, and nothing from before CURVE_S. */
function thinOut(now) {
  let kept = -Infinity;
  const left = snapshots.filter(({ time }) => {
    if (now - time > CURVE_S || (now - time > FINE_S && time - kept < COARSE_S - 0.5)) return false;
    kept = time;
    return true;
  });
  snapshots.splice(0, snapshots.length, ...left);
}

/** Shows the form for the admin key, or with null the page. */
function showKeyForm(message) {
  $("key-form").hidden = message === null;
  $("main").hidden = message !== null;
  if (message === null) return;
  const wasRejected = sessionStorage.getItem(KEY_ITEM) !== null;
  sessionStorage.removeItem(KEY_ITEM);
  histories.clear();
  snapshots = [];
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
for (const id of ["window", "filter"]) $(id).addEventListener("change", draw);

// ---- rates and distributions --------------------------------------------------------------------------------------

/** The oldest snapshot within `seconds` before the one at `end`, but not that one itself where there is one before it. */
function snapshotBefore(seconds, end = snapshots.length - 1) {
  let start = Math.max(0, end - 1);
  while (start > 0 && snapshots[end].time - snapshots[start - 1].time <= seconds + 0.5) start--;
  return snapshots[start];
}

/** Growth per second of what `delta(now, then)` measures; null while there is only one snapshot. */
function rate(delta, seconds = RATE_WINDOW_S, end = snapshots.length - 1) {
  const then = snapshotBefore(seconds, end), now = snapshots[end];
  return now === then ? null : Math.max(0, delta(now, then)) / (now.time - then.time);
}

/** The growth of a counter, summed over instances; a counter of a restarted instance begins at 0. */
function counterDelta(name, filter = () => true) {
  return (now, then) => sum(now.instances.filter(filter).map((instance) => {
    const old = then.byId.get(instance.instance_id);
    return old === undefined ? 0 : Math.max(0, instance[name] - old[name]);
  }));
}

const difference = (value) => (now, then) => value(now) - value(then);
const rates = (delta, seconds = 3) => snapshots.map((_, i) => (i ? rate(delta, seconds, i) : null));
const finishedRequests = difference((snapshot) => sum(Object.values(snapshot.requests)));
const outputTokens = difference((snapshot) => sum(snapshot.ttft.counts) + sum(snapshot.itl.counts));

/** The histogram of the last `seconds`; 0 means since the start of the router. */
function distribution(name, seconds, end = snapshots.length - 1) {
  const now = snapshots[end][name], then = snapshotBefore(seconds, end)[name];
  return { limits: now.limits, counts: now.counts.map((n, i) => (seconds ? n - then.counts[i] : n)) };
}

/** Interpolated within its bucket on a logarithmic scale, like the buckets. */
function quantile({ limits, counts }, q) {
  let remaining = q * sum(counts);
  if (!remaining) return null;
  const i = counts.findIndex((count) => (remaining -= count) <= 0);
  if (i < 0 || i >= limits.length) return last(limits);
  const low = i ? limits[i - 1] : limits[0] / 2;
  return low * (limits[i] / low) ** (1 + remaining / counts[i]);
}

/** The position of a time among the buckets: 2.5 is the middle of the third. */
function bucketPosition(limits, seconds) {
  const i = limits.findIndex((limit) => seconds <= limit);
  if (i < 0) return limits.length;
  const low = i ? limits[i - 1] : limits[0] / 2;
  return i + Math.max(0, Math.log(seconds / low) / Math.log(limits[i] / low));
}

/** The share of values up to `seconds`. */
function shareBelow({ limits, counts }, seconds) {
  const at = bucketPosition(limits, seconds);
  return sum(counts.map((count, i) => count * Math.min(1, Math.max(0, at - i)))) / sum(counts);
}

// ---- drawing ------------------------------------------------------------------------------------------------------

function draw() {
  const now = last(snapshots);
  if (now === undefined) return;
  document.title = `pdserve · ${now.model}`;
  setText($("model"), now.model);
  setText($("state"), now.ready ? "ready" : `not ready: ${now.why}`);
  $("state").className = now.ready ? "good" : "bad";
  setText($("about"), `${now.router} · pdserve ${now.version} · up ${uptime(now.uptime)}`);
  drawFigures(now);
  drawFleet(now);
  drawLatency(now);
  drawKv(now);
  drawFaults(now);
  drawRequests(now);
}

function uptime(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = Math.max(0, units.findIndex(([size]) => seconds >= size * 2));
  return `${Math.floor(seconds / units[i][0])} ${units[i][1]}`;
}

/** The time that the curves show: what there is, from a minute on. */
function curveSeconds() {
  return Math.min(CURVE_S, Math.max(FINE_S, last(snapshots).time - snapshots[0].time));
}

/** A sparkline that ends at the right; null leaves a gap. */
function sparkline(values, color, top = 0) {
  const height = 26, max = Math.max(top, ...values) || 1, start = last(snapshots).time - curveSeconds();
  const points = values.map((value, i) => value === null ? null : [snapshots[i].time - start, height - 1 - (value / max) * (height - 2)]);
  const runs = [];
  points.forEach((point, i) => {
    if (point === null) return;
    if (i && points[i - 1] !== null) last(runs).push(point);
    else runs.push([point]);
  });
  const lines = runs.map((run) => "M" + run.map((point) => point.map((x) => x.toFixed(1)).join(" ")).join("L"));
  const areas = runs.map((run, i) => `${lines[i]}L${last(run)[0]} ${height}L${run[0][0]} ${height}Z`);
  return svg("svg", { class: `spark c-${color}`, viewBox: `0 0 ${curveSeconds()} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "area", d: areas.join("") }), svg("path", { d: lines.join("") }));
}

function figure(name, [number, unit], below, values, color, late = false) {
  return h("div", "", h("dt", "", name),
    h("dd", "", h("div", late ? "number late" : "number", number, h("span", "unit", unit)), h("div", "below", below), sparkline(values, color)));
}

function drawFigures(now) {
  const latency = (name, color, title) => {
    const minute = distribution(name, 60), slo = now.slo[name];
    const values = snapshots.map((_, i) => (i ? quantile(distribution(name, 5, i), 0.5) : null));
    const p99 = quantile(minute, 0.99);
    const below = h("span", slo < p99 ? "late" : "", `p99 ${format(duration(p99))}`);
    return figure(`${title}, median`, duration(quantile(minute, 0.5)), below, values, color, slo < quantile(minute, 0.5));
  };
  setText($("span"), `${Math.round(curveSeconds() / 60)} min ago`);
  const sources = promptSources();
  const loadRate = rate(counterDelta("load_bytes")), storeRate = rate(counterDelta("store_bytes"));
  const total = sum(Object.values(sources));
  $("figures").replaceChildren(
    figure("Requests", perSecond(rate(finishedRequests), "/s"), `${integer(now.under_way)} running${now.waiting ? `, ${integer(now.waiting)} queued` : ""}`, rates(finishedRequests), "router"),
    figure("Output", perSecond(rate(outputTokens), "tokens/s"), "of this router", rates(outputTokens), "decode"),
    latency("ttft", "prefill", "TTFT"),
    latency("itl", "decode", "ITL"),
    figure("Prefix hits", [total ? percent(1 - sources.computed / total) : "–", ""], "of prompt tokens", hitRates(), "prefill"),
    figure("KV loaded", bandwidth(loadRate), `stored ${format(bandwidth(storeRate))}`, rates(counterDelta("load_bytes")), "connector"),
  );
}

/** Prompt tokens of the latest requests by the source of their KV. */
function promptSources() {
  const prefilled = requests.filter((request) => request.stages_ms.first_token !== undefined);
  const total = (name) => sum(prefilled.map((request) => request[name]));
  return { computed: total("computed_tokens"), pool: total("local_hit_tokens"), store: total("loaded_tokens") };
}

function hitRates() {
  return snapshots.map((now, i) => {
    if (!i) return null;
    const then = snapshotBefore(5, i), queries = counterDelta("prefix_cache_queries")(now, then);
    return queries ? counterDelta("prefix_cache_hits")(now, then) / queries : null;
  });
}

// ---- instances

const pools = new Map(); // role → { card, title, list }, reused so that a list keeps its scroll position

function drawFleet(now) {
  const roles = ["prefill", "decode", "both"].filter((role) => now.instances.some((instance) => instance.role === role));
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
  title.replaceChildren(`${name} · ${members.length}`, h("small", "", what));
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
  $("latency").replaceChildren(
    histogram("Time to first token", distribution("ttft", seconds), now.slo.ttft, "prefill", "requests"),
    histogram("Time between tokens", distribution("itl", seconds), now.slo.itl, "decode", "tokens"));
}

function histogram(title, values, slo, color, unit) {
  const { limits, counts } = values, total = sum(counts), max = Math.max(1, ...counts);
  const facts = [0.5, 0.9, 0.99].map((q) => [`p${q * 100}`, format(duration(quantile(values, q))), slo < quantile(values, q)]);
  if (slo && total) facts.push([`within the SLO of ${format(duration(slo))}`, percent(shareBelow(values, slo)), shareBelow(values, slo) < 0.99]);
  facts.push([unit, integer(total), false]);
  const chart = h("div", `chart c-${color}`);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `${title}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  const at = slo ? bucketPosition(limits, slo) : Infinity;
  counts.forEach((count, i) => {
    const bar = h("i", at <= i ? "late" : "");
    bar.style.height = `${count ? Math.max(1.5, (count / max) * 100) : 0}%`;
    if (at > i && at < i + 1) bar.style.background = `linear-gradient(90deg, var(--c) ${(at - i) * 100}%, var(--bad) ${(at - i) * 100}%)`;
    chart.append(bar);
  });
  if (!total) chart.append(h("span", "empty", Number($("window").value) ? "none in this time" : "none yet"));
  if (slo) {
    const mark = h("span", at > counts.length * 0.7 ? "mark left" : "mark", "SLO");
    mark.style.left = `${(at / counts.length) * 100}%`;
    chart.append(mark);
  }
  const axis = h("div", "axis", ...counts.map((_, i) => h("span", "", i < limits.length && /^1(e|0|\b)|^0?\.0*1$/.test(String(limits[i])) ? format(bucketLabel(limits[i])) : "")));
  axis.setAttribute("aria-hidden", "true");
  const factElements = facts.map(([name, value, late]) => h("span", late ? "late" : "", `${name} `, h("b", "", value)));
  return h("div", "card", h("h3", "", title), h("div", "facts", ...factElements), chart, axis);
}

const bucketLabel = (seconds) => (seconds < 1 ? [String(Math.round(seconds * 1000)), "ms"] : [String(seconds), "s"]);

// ---- KV

function shares(title, parts, unit) {
  const total = sum(parts.map(([, count]) => count));
  const bar = h("div", "shares", ...parts.map(([, count, color]) => sized("i", `c-${color}`, total ? count / total : 0)));
  const legend = h("ul", "legend", ...parts.map(([name, count, color]) => h("li", `c-${color}`, `${name} `, h("b", "", total ? percent(count / total) : "–"))));
  return h("div", "", h("h3", "", title), bar, legend, h("small", "", `of ${integer(total)} ${unit}`));
}

function drawKv(now) {
  const sources = promptSources(), placements = now.placements;
  const transfer = (title, direction) => {
    const bytes = counterDelta(`${direction}_bytes`), busyShare = rate(counterDelta(`${direction}_seconds`));
    const speed = busyShare ? rate(bytes) / busyShare : null;
    const [number, unit] = bandwidth(rate(bytes));
    return h("div", "", h("h3", "", title), h("div", "number", number, h("span", "unit", unit)),
      h("div", "below", `${format(bandwidth(speed))} during transfers`), sparkline(rates(bytes), "connector"));
  };
  $("kv").replaceChildren(
    h("div", "card",
      shares("KV sources of the latest prompts", [["computed", sources.computed, "prefill"], ["pool", sources.pool, "decode"], ["store", sources.store, "connector"]], "tokens"),
      shares("Placement of prefills", [["on a prefill instance", placements.split ?? 0, "prefill"], ["on the decode instance", placements.decode ?? 0, "decode"],
        ["prefill and decode on one instance", (placements.both ?? 0) + (placements.prefill ?? 0), "router"]], "requests since the start")),
    h("div", "card", h("div", "two", transfer("Stored by prefill", "store"), transfer("Loaded by decode", "load"))));
}

// ---- faults

// Event → [word shown, colour].
const EVENTS = {
  left: ["lost", "bad"], failed: ["failed", "bad"], breaker: ["breaker", "bad"], missing: ["missing", "bad"], waiting: ["no instance", "bad"], moved: ["migrated", "warn"], fallback: ["recomputed", "warn"],
  role: ["role", "good"], failed_handovers: ["failed hand-overs", "warn"], refused: ["refused", "warn"], draining: ["draining", ""], drained: ["drained", ""], joined: ["joined", "good"],
  autoscaler: ["autoscaler", ""],
};
let drawnEvents = ""; // router and numbers of the events drawn last

function drawFaults(now) {
  const recent = now.events.filter((event) => now.time - event.time < 60 && ["bad", "warn"].includes(EVENTS[event.event]?.[1]));
  $("alarm").hidden = !recent.length;
  setText($("alarm"), `${recent.map((event) => EVENTS[event.event][0] + (event.count > 1 ? ` × ${event.count}` : "")).slice(0, 3).join(", ")} in the last minute`);
  const total = (counts) => integer(sum(Object.values(counts)));
  setText($("faults-sum"), `${total(now.migrations)} streams migrated · ${total(now.fallbacks)} prompts recomputed by decode · ` +
    `${total(now.refusals)} requests refused · ${integer(now.requests.error ?? 0)} failed`);
  const state = now.router + now.events.map((event) => event.number).join();
  if (state === drawnEvents) return;
  drawnEvents = state;
  $("faults").replaceChildren(...now.events.map((event) => {
    const [word, color] = EVENTS[event.event] ?? [event.event, ""];
    const time = h("time", "", clock(event.time));
    time.dateTime = new Date(event.time * 1000).toISOString();
    return h("li", "", time, h("span", `what ${color}`, event.count > 1 ? `${word} × ${event.count}` : word), h("p", "", event.text));
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
  try {
    row.detail.replaceChildren(...detail(row, await fetchJson(`/debug/requests/${encodeURIComponent(row.id)}`)));
  } catch (error) {
    row.detail.replaceChildren(h("p", "", `Details are not available: ${error.message}.`));
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
  const sources = timeline.prompt_tokens_by_source, loaded = timeline.loaded;
  const first = timeline.stages_ms.first_token;
  const facts = [
    `Received at ${clock(row.startedAt)}.`,
    `${integer(timeline.prompt_tokens)} prompt tokens: ${integer(sources.computed)} computed, ${integer(sources.local_hit)} in the pool, ${integer(sources.loaded)} from the store.`,
    `${integer(timeline.output_tokens)} output tokens${first === undefined ? "" : `, the first after ${format(duration(first / 1000))}`}.`,
    loaded.blocks ? `${integer(loaded.blocks)} blocks (${(loaded.bytes / 2 ** 20).toFixed(2)} MiB) loaded at ${format(bandwidth(loaded.gb_per_s * 1e9))}.` : "",
  ];
  const elements = [gantt, h("p", "", facts.filter(Boolean).join(" "))];
  elements.push(...timeline.moves.map((move) => h("p", "bad", `Migrated from ${move.instance} after ${format(duration(move.ms / 1000))}: ${move.why}`)));
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
