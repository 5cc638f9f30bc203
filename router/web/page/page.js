// The live page: asks /debug/overview every second and draws the answer. What comes from outside, the ids that clients choose
// above all, only ever becomes text nodes; the page's policy forbids anything else.

const POLL_MS = 1000;
const KEPT = 60; // pictures, from which rates and small curves are made
const RATE_S = 10; // what a rate is taken over
const SHOWN = 40; // requests
const KEY = "pdserve-admin-key";

const $ = (id) => document.getElementById(id);

const histories = new Map(); // router → its pictures: workers that share a port take turns
let pictures = []; // of the router that answered last, the oldest first
let rows = []; // its latest requests, the newest first
let paused = false;
let timer = 0;

// ---- small things -------------------------------------------------------------------------------------------------

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

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

const last = (list) => list[list.length - 1];
const sum = (values) => values.reduce((a, b) => a + b, 0);
const whole = (number) => Math.round(number).toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(share > 0.9 && share < 1 ? 1 : 0)} %`;
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/** Number and unit. */
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
  return rate === null ? ["–", ""] : [rate < 10 ? rate.toFixed(1) : whole(rate), unit];
}

const words = ([number, unit]) => (unit ? `${number} ${unit}` : number);

// ---- asking -------------------------------------------------------------------------------------------------------

class Locked extends Error {}

async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const bytes = key === null ? [] : new TextEncoder().encode(key); // a header holds bytes
  const headers = key === null ? {} : { Authorization: `Bearer ${String.fromCharCode(...bytes)}` };
  const answer = await fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (answer.status === 401) throw new Locked((await answer.json()).error.message);
  if (!answer.ok) throw new Error(`the router answered ${answer.status}`);
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  try {
    take(await ask("/debug/overview"));
    lock(null);
    trouble("");
    draw();
  } catch (error) {
    if (error instanceof Locked) return lock(error.message);
    if (!(error instanceof TypeError || error instanceof DOMException || error.message.startsWith("the router"))) console.error(error);
    trouble("The router does not answer. Trying again every second; what you see is old.");
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function take(picture) {
  if (!histories.has(picture.router)) histories.set(picture.router, []);
  pictures = histories.get(picture.router);
  while (histories.size > 16) histories.delete(histories.keys().next().value); // those that have started again are gone
  rows = picture.timelines;
  delete picture.timelines;
  picture.byId = new Map(picture.instances.map((one) => [one.instance_id, one]));
  pictures.push(picture);
  if (pictures.length > KEPT) pictures.shift();
}

function lock(message) {
  $("ask").hidden = message === null;
  $("main").hidden = message !== null;
  if (message === null) return;
  const tried = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  histories.clear();
  pictures = [];
  $("rows").replaceChildren();
  say($("state"), "");
  say($("why"), tried ? "That was not the right key." : message.includes("no admin key") ? `${message}.` : "");
  $("key").focus();
}

function trouble(text) {
  $("trouble").hidden = !text;
  say($("trouble"), text);
  document.body.classList.toggle("stale", Boolean(text));
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("key").value = "";
  poll();
});

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  say($("pause"), paused ? "Go on" : "Pause");
  poll();
});

document.addEventListener("visibilitychange", poll);
for (const id of ["window", "filter"]) $(id).addEventListener("change", draw);

// ---- from pictures to figures -------------------------------------------------------------------------------------

/** The oldest picture that is no older than this before the one at `end`. */
function before(seconds, end = pictures.length - 1) {
  let start = end;
  while (start > 0 && pictures[end].time - pictures[start - 1].time <= seconds + 0.5) start--;
  return pictures[start];
}

/** How much a count of the router grew per second; null while there is one picture only. */
function rate(of, seconds = RATE_S, end = pictures.length - 1) {
  const then = before(seconds, end), now = pictures[end];
  return now === then ? null : Math.max(0, of(now, then)) / (now.time - then.time);
}

/** What counts of instances gained; one that has started again begins at 0. */
function gained(name, which = () => true) {
  return (now, then) => sum(now.instances.filter(which).map((one) => {
    const old = then.byId.get(one.instance_id);
    return old === undefined ? 0 : Math.max(0, one[name] - old[name]);
  }));
}

const since = (of) => (now, then) => of(now) - of(then);
const curve = (of, seconds = 3) => pictures.map((_, i) => (i ? rate(of, seconds, i) : null));
const ended = since((picture) => sum(Object.values(picture.requests)));
const tokens = since((picture) => sum(picture.ttft.counts) + sum(picture.itl.counts));

/** What came into a distribution; seconds of 0 mean: since the start. */
function distribution(name, seconds, end = pictures.length - 1) {
  const now = pictures[end][name], then = before(seconds, end)[name];
  return { limits: now.limits, counts: now.counts.map((n, i) => (seconds ? n - then.counts[i] : n)) };
}

/** Between the limits of its bucket, on a scale of logarithms, as buckets are. */
function quantile({ limits, counts }, share) {
  let left = share * sum(counts);
  if (!left) return null;
  const i = counts.findIndex((count) => (left -= count) <= 0);
  if (i < 0 || i >= limits.length) return last(limits);
  const low = i ? limits[i - 1] : limits[0] / 2;
  return low * (limits[i] / low) ** (1 + left / counts[i]);
}

/** Where a time stands among the buckets: 2.5 is in the middle of the third. */
function place(limits, seconds) {
  const i = limits.findIndex((limit) => seconds <= limit);
  if (i < 0) return limits.length;
  const low = i ? limits[i - 1] : limits[0] / 2;
  return i + Math.max(0, Math.log(seconds / low) / Math.log(limits[i] / low));
}

function within({ limits, counts }, seconds) {
  const at = place(limits, seconds);
  return sum(counts.map((count, i) => count * Math.min(1, Math.max(0, at - i)))) / sum(counts);
}

// ---- drawing ------------------------------------------------------------------------------------------------------

function draw() {
  const now = last(pictures);
  if (now === undefined) return;
  document.title = `pdserve · ${now.model}`;
  say($("model"), now.model);
  say($("state"), now.ready ? "ready" : `not ready: ${now.why}`);
  $("state").className = now.ready ? "good" : "bad";
  say($("about"), `${now.router} · pdserve ${now.version} · up ${upFor(now.uptime)}`);
  drawFigures(now);
  drawFleet(now);
  drawLatency(now);
  drawKv(now);
  drawFaults(now);
  drawRequests(now);
}

function upFor(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = Math.max(0, units.findIndex(([size]) => seconds >= size * 2));
  return `${Math.floor(seconds / units[i][0])} ${units[i][1]}`;
}

/** A small curve that ends at the right; null leaves a gap. */
function spark(values, color, top = 0) {
  const height = 26, max = Math.max(top, ...values) || 1;
  const points = values.map((value, i) => value === null ? null : [KEPT - values.length + i, height - 1 - (value / max) * (height - 2)]);
  const runs = [];
  points.forEach((point, i) => {
    if (point === null) return;
    if (i && points[i - 1] !== null) last(runs).push(point);
    else runs.push([point]);
  });
  const lines = runs.map((run) => "M" + run.map((point) => point.map((x) => x.toFixed(1)).join(" ")).join("L"));
  const areas = runs.map((run, i) => `${lines[i]}L${last(run)[0]} ${height}L${run[0][0]} ${height}Z`);
  return svg("svg", { class: `spark c-${color}`, viewBox: `0 0 ${KEPT - 1} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("path", { class: "area", d: areas.join("") }), svg("path", { d: lines.join("") }));
}

function figure(name, [number, unit], below, curve, color, late = false) {
  return h("div", "", h("dt", "", name),
    h("dd", "", h("div", late ? "number late" : "number", number, h("span", "unit", unit)), h("div", "below", below), spark(curve, color)));
}

function drawFigures(now) {
  const latency = (name, color, title) => {
    const minute = distribution(name, 60), promised = now.slo[name];
    const values = pictures.map((_, i) => (i ? quantile(distribution(name, 5, i), 0.5) : null));
    const p99 = quantile(minute, 0.99);
    const below = h("span", promised < p99 ? "late" : "", `p99 ${words(duration(p99))}`);
    return figure(`${title}, median`, duration(quantile(minute, 0.5)), below, values, color, promised < quantile(minute, 0.5));
  };
  const sources = promptSources();
  const loads = rate(gained("load_bytes")), stores = rate(gained("store_bytes"));
  const total = sum(Object.values(sources));
  $("figures").replaceChildren(
    figure("Requests", perSecond(rate(ended), "/s"), `${whole(now.under_way)} under way${now.waiting ? `, ${whole(now.waiting)} waiting` : ""}`, curve(ended), "router"),
    figure("Output", perSecond(rate(tokens), "tokens/s"), "of this router", curve(tokens), "decode"),
    latency("ttft", "prefill", "TTFT"),
    latency("itl", "decode", "ITL"),
    figure("Prefix hits", [total ? percent(1 - sources.computed / total) : "–", ""], "of prompt tokens", hitCurve(), "prefill"),
    figure("KV loaded", bandwidth(loads), `stored ${words(bandwidth(stores))}`, curve(gained("load_bytes")), "connector"),
  );
}

/** Tokens of the latest prompts, by where their KV came from. */
function promptSources() {
  const done = rows.filter((row) => row.stages_ms.first_token !== undefined);
  const of = (name) => sum(done.map((row) => row[name]));
  return { computed: of("computed_tokens"), pool: of("local_hit_tokens"), store: of("loaded_tokens") };
}

function hitCurve() {
  return pictures.map((now, i) => {
    if (!i) return null;
    const then = before(5, i), asked = gained("prefix_cache_queries")(now, then);
    return asked ? gained("prefix_cache_hits")(now, then) / asked : null;
  });
}

// ---- instances

const pools = new Map(); // role → its card and its list, which keeps its place when scrolled

function drawFleet(now) {
  const roles = ["prefill", "decode", "both"].filter((role) => now.instances.some((one) => one.role === role));
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
  const members = now.instances.filter((one) => one.role === role);
  const name = { prefill: "Prefill", decode: "Decode", both: "Prefill and decode" }[role];
  const count = role === "prefill" ? "computed_tokens" : "generation_tokens";
  const what = role === "prefill" ? "prompt tokens/s" : "output tokens/s";
  const curves = members.map((one) => curve(gained(count, (other) => other.instance_id === one.instance_id)));
  const top = Math.max(0, ...curves.flat());
  title.replaceChildren(`${name} · ${members.length}`, h("small", "", what));
  list.replaceChildren(...members.map((one, i) => drawInstance(one, curves[i], top, role)));
  if (!members.length) list.replaceChildren(h("li", "none", "none is attached"));
  return card;
}

function drawInstance(one, values, top, role) {
  const held = one.num_blocks ? one.kv_cache_blocks_held / one.num_blocks : 0;
  const cached = one.num_blocks ? Math.min(1 - held, one.cached_blocks / one.num_blocks) : 0;
  const meter = h("div", "meter", sized("i", "", held), sized("i", "cached", cached));
  const load = h("div", "load", h("b", "", whole(one.running)), " running · ", h("b", "", whole(one.waiting)), " waiting · ");
  const left = role === "decode" ? [one.output_tokens, "tokens to go"] : [one.prefill_tokens, "prompt tokens queued"];
  load.append(h("b", "", whole(left[0])), ` ${left[1]}`);
  return h("li", "instance",
    h("div", "name", one.instance_id, condition(one) ?? h("span", "", words(perSecond(last(values), "tokens/s")))),
    spark(values, role, top), load,
    h("div", "blocks", meter, h("span", "", `${whole(one.kv_cache_blocks_held)} held, ${whole(one.cached_blocks)} cached of ${whole(one.num_blocks)}`)));
}

function condition(one) {
  if (one.breaker === "open") return h("span", "bad", "breaker open: gets nothing");
  if (one.breaker === "half_open") return h("span", "warn", "breaker half open: on trial");
  if (one.draining) return h("span", "warn", "draining");
  return one.last_heard_seconds > 1 ? h("span", "warn", `silent for ${one.last_heard_seconds.toFixed(1)} s`) : null;
}

function sized(tag, className, share) {
  const made = h(tag, className);
  made.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return made;
}

function drawStore(now) {
  const names = [...new Set(now.instances.map((one) => `${one.connector}://`))].join(" ");
  const arrow = h("span", "arrow");
  return h("div", "store", h("b", "", names || "KV store"),
    h("span", "", `stored ${words(bandwidth(rate(gained("store_bytes"))))}`), arrow,
    h("span", "", `loaded ${words(bandwidth(rate(gained("load_bytes"))))}`));
}

// ---- latency

function drawLatency(now) {
  const seconds = Number($("window").value);
  $("latency").replaceChildren(
    histogram("Time to first token", distribution("ttft", seconds), now.slo.ttft, "prefill", "requests"),
    histogram("Time between tokens", distribution("itl", seconds), now.slo.itl, "decode", "tokens"));
}

function histogram(title, values, promised, color, unit) {
  const { limits, counts } = values, total = sum(counts), max = Math.max(1, ...counts);
  const facts = [0.5, 0.9, 0.99].map((q) => [`p${q * 100}`, words(duration(quantile(values, q))), promised < quantile(values, q)]);
  if (promised && total) facts.push([`within the SLO of ${words(duration(promised))}`, percent(within(values, promised)), within(values, promised) < 0.99]);
  facts.push([unit, whole(total), false]);
  const chart = h("div", `chart c-${color}`);
  chart.setAttribute("role", "img");
  chart.setAttribute("aria-label", `${title}: ${facts.map(([name, value]) => `${name} ${value}`).join(", ")}`);
  const at = promised ? place(limits, promised) : Infinity;
  counts.forEach((count, i) => {
    const bar = h("i", at <= i ? "late" : "");
    bar.style.height = `${count ? Math.max(1.5, (count / max) * 100) : 0}%`;
    if (at > i && at < i + 1) bar.style.background = `linear-gradient(90deg, var(--c) ${(at - i) * 100}%, var(--bad) ${(at - i) * 100}%)`;
    chart.append(bar);
  });
  if (!total) chart.append(h("span", "empty", Number($("window").value) ? "none in the last minute" : "none yet"));
  if (promised) {
    const mark = h("span", at > counts.length * 0.7 ? "mark left" : "mark", "SLO");
    mark.style.left = `${(at / counts.length) * 100}%`;
    chart.append(mark);
  }
  const axis = h("div", "axis", ...counts.map((_, i) => h("span", "", i < limits.length && /^1(e|0|\b)|^0?\.0*1$/.test(String(limits[i])) ? words(shortly(limits[i])) : "")));
  axis.setAttribute("aria-hidden", "true");
  const words_ = facts.map(([name, value, late]) => h("span", late ? "late" : "", `${name} `, h("b", "", value)));
  return h("div", "card", h("h3", "", title), h("div", "facts", ...words_), chart, axis);
}

const shortly = (seconds) => (seconds < 1 ? [String(Math.round(seconds * 1000)), "ms"] : [String(seconds), "s"]);

// ---- KV

function shares(title, parts, unit) {
  const total = sum(parts.map(([, count]) => count));
  const bar = h("div", "shares", ...parts.map(([, count, color]) => sized("i", `c-${color}`, total ? count / total : 0)));
  const legend = h("ul", "legend", ...parts.map(([name, count, color]) => h("li", `c-${color}`, `${name} `, h("b", "", total ? percent(count / total) : "–"))));
  return h("div", "", h("h3", "", title), bar, legend, h("small", "", `of ${whole(total)} ${unit}`));
}

function drawKv(now) {
  const sources = promptSources(), ways = now.placements;
  const transfer = (title, way) => {
    const bytes = gained(`${way}_bytes`), moving = rate(gained(`${way}_seconds`));
    const speed = moving ? rate(bytes) / moving : null;
    const [number, unit] = bandwidth(rate(bytes));
    return h("div", "", h("h3", "", title), h("div", "number", number, h("span", "unit", unit)),
      h("div", "below", `${words(bandwidth(speed))} while moving`), spark(curve(bytes), "connector"));
  };
  $("kv").replaceChildren(
    h("div", "card",
      shares("Where the latest prompts' KV came from", [["computed", sources.computed, "prefill"], ["pool", sources.pool, "decode"], ["store", sources.store, "connector"]], "tokens"),
      shares("Who computes prompts", [["prefill, for decode", ways.split ?? 0, "prefill"], ["decode itself", ways.decode ?? 0, "decode"],
        ["one instance alone", (ways.both ?? 0) + (ways.prefill ?? 0), "router"]], "requests since the start")),
    h("div", "card", h("div", "two", transfer("Stored by prefill", "store"), transfer("Loaded by decode", "load"))));
}

// ---- faults

const EVENTS = {
  left: ["lost", "bad"], failed: ["failed", "bad"], breaker: ["breaker", "bad"], missing: ["missing", "bad"], moved: ["moved", "warn"], fallback: ["computed", "warn"],
  role: ["role", "good"], failed_handovers: ["failed hand-overs", "warn"], refused: ["refused", "warn"], draining: ["draining", ""], drained: ["drained", ""], joined: ["joined", "good"],
};
let faultsShown = "";

function drawFaults(now) {
  const fresh = now.events.filter((one) => now.time - one.time < 60 && ["bad", "warn"].includes(EVENTS[one.event]?.[1]));
  $("alarm").hidden = !fresh.length;
  say($("alarm"), `${fresh.map((one) => EVENTS[one.event][0] + (one.count > 1 ? ` × ${one.count}` : "")).slice(0, 3).join(", ")} in the last minute`);
  const count = (counts) => whole(sum(Object.values(counts)));
  say($("faults-sum"), `${count(now.migrations)} streams moved · ${count(now.fallbacks)} hand-overs computed by decode · ` +
    `${count(now.refusals)} requests refused · ${whole(now.requests.error ?? 0)} failed`);
  const state = now.router + now.events.map((one) => one.number).join();
  if (state === faultsShown) return;
  faultsShown = state;
  $("faults").replaceChildren(...now.events.map((one) => {
    const [word, color] = EVENTS[one.event] ?? [one.event, ""];
    const time = h("time", "", clock(one.time));
    time.dateTime = new Date(one.time * 1000).toISOString();
    return h("li", "", time, h("span", `what ${color}`, one.count > 1 ? `${word} × ${one.count}` : word), h("p", "", one.text));
  }));
  if (!now.events.length) $("faults").append(h("li", "empty", "Nothing has happened."));
}

// ---- requests

const COLORS = [["waiting", "router"], ["prefill", "prefill"], ["hand-over", "connector"], ["decode", "decode"]];
$("legend").append(...COLORS.map(([name, color]) => h("li", `c-${color}`, name)));

// The stage that ends each piece of a bar, and who worked on it.
const PIECES = [["routed", "router"], ["prefill_started", "router"], ["first_token", "prefill"], ["kv_ready", "connector"],
  ["decode_started", "router"], ["finished", "decode"]];

const running = (row) => row.stages_ms.finished === undefined;
const total = (row, now) => (running(row) ? (now.time - row.time) * 1000 : row.stages_ms.finished);
const POINTS = matchMedia("(hover: hover)");
const FILTERS = {
  all: () => true,
  late: (row, now, scale) => row.stages_ms.first_token / 1000 > now.slo.ttft || total(row, now) > scale,
  trouble: (row) => row.migrations > 0 || row.finish_reason === "error",
};
const lines = new Map(); // request id → its element and what is known of it

function drawRequests(now) {
  const totals = rows.map((row) => total(row, now)).sort((a, b) => a - b);
  const scale = (totals[Math.floor(totals.length * 0.9)] || 1) * 1.05; // what is longer is cut off: its figure says how long it is
  const filter = FILTERS[$("filter").value];
  const shown = rows.filter((row) => filter(row, now, scale)).slice(0, SHOWN);
  const open = rows.filter((row) => lines.get(row.request_id)?.details.open && !shown.includes(row));
  const list = $("rows");
  const held = lines.size && list.matches(":hover") && POINTS.matches; // nothing moves under a pointer that is about to click
  $("held").hidden = !held;
  if (held) shown.splice(0, shown.length, ...rows.filter((row) => lines.has(row.request_id)));
  list.querySelector(".empty")?.remove();
  for (const row of [...shown, ...open]) {
    const line = lines.get(row.request_id) ?? newLine(row);
    if (!line.item.isConnected) list.insertBefore(line.item, [...list.children].find((item) => item.time < row.time) ?? null);
    updateLine(line, row, now, scale);
  }
  const kept = new Set(shown.map((row) => row.request_id));
  for (const [id, line] of held ? [] : lines) {
    if (kept.has(id) || line.details.open || line.item.contains(document.activeElement)) continue;
    line.item.remove();
    lines.delete(id);
  }
  if (!lines.size) list.append(h("li", "empty", rows.length ? "None of the latest." : "None yet."));
}

function newLine(row) {
  const id = row.request_id;
  const name = h("span", "id", id), where = h("span", "where"), bar = h("span", "bar"), took = h("span", "num"), state = h("span", "state");
  const more = h("div", "more"), details = h("details", "", h("summary", "", name, where, bar, took, state), more);
  const line = { id, item: h("li", "", details), details, where, bar, took, state, more, time: row.time, ended: false };
  line.item.time = row.time;
  name.title = id;
  details.addEventListener("toggle", () => details.open && unfold(line));
  lines.set(id, line);
  return line;
}

function updateLine(line, row, now, scale) {
  line.bar.replaceChildren(...pieces(row, now, scale));
  if (line.ended) return;
  line.ended = !running(row);
  const late = row.stages_ms.first_token / 1000 > now.slo.ttft, failed = row.finish_reason === "error";
  const one = row.prefill_instance === row.decode_instance;
  say(line.where, one ? row.decode_instance : `${row.prefill_instance} → ${row.decode_instance}`);
  say(line.took, words(duration(total(row, now) / 1000)));
  say(line.state, failed ? "failed" : running(row) ? "running" : row.migrations ? "moved" : late ? "late" : row.finish_reason);
  line.state.className = `state ${failed ? "bad" : row.migrations || late ? "warn" : ""}`;
  line.bar.classList.toggle("running", running(row));
  if (line.details.open) unfold(line);
}

function pieces(row, now, scale) {
  const made = [];
  let done = 0;
  const add = (until, color) => {
    if (until > done) made.push(sized("i", `c-${color}`, (until - done) / scale));
    done = Math.max(done, until);
  };
  for (const [stage, color] of PIECES) {
    const at = row.stages_ms[stage];
    if (at !== undefined) add(at, stage === "finished" && row.stages_ms.decode_started === undefined ? "router" : color);
  }
  if (running(row)) add(total(row, now), row.stages_ms.decode_started !== undefined ? "decode" : row.stages_ms.prefill_started !== undefined ? "prefill" : "router");
  return made;
}

async function unfold(line) {
  try {
    line.more.replaceChildren(...story(line, await ask(`/debug/requests/${encodeURIComponent(line.id)}`)));
  } catch (error) {
    line.more.replaceChildren(h("p", "", `No more is known: ${error.message}.`));
  }
}

/** What happened to one request, in full. */
function story(line, told) {
  const end = Math.max(...Object.values(told.stages_ms), 0.001);
  const who = { router: "", connector: "", prefill: told.prefill_instance, decode: told.decode_instance };
  const gantt = h("div", "gantt", ...told.parts.flatMap((part) => {
    const bar = h("i", `c-${part.who}`);
    bar.style.left = `${(part.start_ms / end) * 100}%`;
    bar.style.width = `${((part.end_ms - part.start_ms) / end) * 100}%`;
    const name = h("span", "part", part.name, h("span", "who", who[part.who]));
    return [name, h("span", "ms", words(duration((part.end_ms - part.start_ms) / 1000))), h("span", "lane", bar)];
  }));
  const from = told.prompt_tokens_by_source, moved = told.loaded;
  const first = told.stages_ms.first_token;
  const facts = [
    `Received at ${clock(line.time)}.`,
    `${whole(told.prompt_tokens)} prompt tokens: ${whole(from.computed)} computed, ${whole(from.local_hit)} in the pool, ${whole(from.loaded)} from the store.`,
    `${whole(told.output_tokens)} output tokens${first === undefined ? "" : `, the first after ${words(duration(first / 1000))}`}.`,
    moved.blocks ? `${whole(moved.blocks)} blocks (${(moved.bytes / 2 ** 20).toFixed(2)} MiB) loaded at ${words(bandwidth(moved.gb_per_s * 1e9))}.` : "",
  ];
  const found = [gantt, h("p", "", facts.filter(Boolean).join(" "))];
  found.push(...told.moves.map((move) => h("p", "bad", `Moved away from ${move.instance} after ${words(duration(move.ms / 1000))}: ${move.why}`)));
  if (told.error) found.push(h("p", "bad", told.error));
  if (told.placement) found.push(h("p", "", `Placement: ${told.placement.way}, because of ${told.placement.reason}.`));
  found.push(...told.decisions.map(decision));
  return found;
}

function decision(made) {
  const columns = [["instance", "instance"], ["score", "score"], ["requests", "requests"], ["prefill_tokens", "prompt tokens"],
    ["output_tokens", "output tokens"], ["cached_tokens", "cached"]];
  const cell = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
  const head = h("thead", "", h("tr", "", ...columns.map(([, name]) => h("th", "", name))));
  const body = h("tbody", "", ...made.candidates.map((one) => h("tr", one.instance === made.chosen ? "chosen" : "",
    ...columns.map(([key]) => h("td", "", cell(one[key]))))));
  return h("div", "", h("p", "", `${made.role}: ${made.chosen}, by ${made.policy}: ${made.why}`), h("div", "scroll", h("table", "", head, body)));
}

poll();
