// What the routers have told: the snapshots of each, those of all together, and rates and distributions of their counters.

export const CURVE_S = 900; // the time that a router keeps
export const FINE_S = 60; // the latest time of which each second's snapshot is kept, and of older ones one in COARSE_S
const COARSE_S = 15;
const RATE_WINDOW_S = 10;
const LIVE_S = 15; // without an answer, after which a router counts as gone
const MERGE_S = 2; // events that several routers saw within this time are one
const SUMMED = ["under_way", "waiting", "max_requests", "requests", "placements", "refusals", "migrations", "fallbacks", "ttft", "itl", "pauses"];
const OF_REQUESTS = ["moved", "fallback", "failed"]; // events of which each router sees others

const histories = new Map(); // router id → { snapshots, requests, hasHistory }; which one answers is chance if they share an address
let shown = ""; // id of the router that is shown; empty: all
export let snapshots = []; // of what is shown, oldest first

export const last = (list) => list[list.length - 1];
export const sum = (values) => values.reduce((a, b) => a + b, 0);

// ---- routers ------------------------------------------------------------------------------------------------------

/** The ids of the routers that answer. */
export function routers() {
  const newest = Math.max(...[...histories.values()].map((one) => last(one.snapshots).time));
  return [...histories].filter(([, one]) => newest - last(one.snapshots).time < LIVE_S).map(([id]) => id).sort();
}

/** Whether the snapshots from before the first answer are still to be asked for. */
export const needsHistory = () => !histories.size || routers().some((id) => !histories.get(id).hasHistory);

export function forget() {
  histories.clear();
  snapshots = [];
}

/** Shows one router, by its id, or with an empty one all of them. */
export function show(router) {
  shown = router;
  update();
}

/** Adds an answer of /debug/overview. */
export function add({ timelines, history, ...snapshot }) {
  if (!histories.has(snapshot.router)) histories.set(snapshot.router, { snapshots: [], hasHistory: false });
  const one = histories.get(snapshot.router);
  while (histories.size > 16) histories.delete(histories.keys().next().value); // restarted routers have new ids
  const known = one.snapshots[0]?.time ?? Infinity;
  if (history && !one.hasHistory) one.snapshots.unshift(...history.filter(({ time }) => time < known));
  one.hasHistory ||= history !== undefined;
  one.snapshots.push(snapshot);
  one.requests = timelines;
  one.snapshots = thinOut(one.snapshots, snapshot.time);
  update();
}

/** Leaves each second of the last minute, each COARSE_S before it, and nothing from before CURVE_S. */
function thinOut(list, now) {
  let kept = -Infinity;
  return list.filter(({ time }) => {
    if (now - time > CURVE_S || (now - time > FINE_S && time - kept < COARSE_S - 0.5)) return false;
    kept = time;
    return true;
  });
}

function update() {
  const ids = routers();
  if (shown && !ids.includes(shown)) shown = "";
  const parts = (shown ? [shown] : ids).map((id) => histories.get(id));
  snapshots = parts.length === 1 ? parts[0].snapshots : together(parts);
  for (const one of snapshots) one.byId ??= new Map(one.instances.map((instance) => [instance.instance_id, instance]));
}

/** The latest requests of what is shown, newest first. */
export function latestRequests() {
  const parts = (shown ? [shown] : routers()).map((id) => histories.get(id).requests);
  return parts.flat().sort((a, b) => b.time - a.time);
}

/** Snapshots of all routers: sums of their counters, at the times at which the one with the longest history has told its own. */
function together(parts) {
  const newest = parts.map((one) => last(one.snapshots)).reduce((a, b) => (b.time > a.time ? b : a));
  const longest = parts.map((one) => one.snapshots).reduce((a, b) => (b[0].time < a[0].time ? b : a));
  const bases = newest === last(longest) ? longest : [...longest, newest];
  const made = bases.map((base) => ({ ...base, ...parts.map((one) => countersAt(one.snapshots, base.time)).reduce((a, b) => combine(a, b, (x, y) => x + y)) }));
  const latest = parts.map((one) => last(one.snapshots)), notReady = latest.find((one) => !one.ready);
  Object.assign(last(made), {
    router: `${parts.length} routers`, ready: !notReady, why: notReady?.why, uptime: Math.min(...latest.map((one) => one.uptime)), events: mergedEvents(latest),
  });
  return made;
}

/** The counters of a router at a time: between two snapshots they have grown evenly. */
function countersAt(list, time) {
  const i = list.findIndex((one) => one.time >= time);
  const select = (one) => Object.fromEntries(SUMMED.map((name) => [name, one[name]]));
  if (i <= 0) return select(i < 0 ? last(list) : list[0]);
  const share = (time - list[i - 1].time) / (list[i].time - list[i - 1].time);
  return combine(select(list[i - 1]), select(list[i]), (x, y) => x + (y - x) * share);
}

/** Applies `f` to each pair of numbers in two objects of equal structure; a number that one of them lacks is 0. */
function combine(a, b, f) {
  if (Array.isArray(a)) return a.map((one, i) => combine(one, b[i], f));
  if (typeof (a ?? b) !== "object") return f(a ?? 0, b ?? 0);
  const names = Object.keys({ ...a, ...b });
  return Object.fromEntries(names.map((name) => [name, name === "limits" ? a[name] : combine(a[name], b[name], f)]));
}

function mergedEvents(latest) {
  const merged = [];
  for (const event of latest.flatMap((one) => one.events).sort((a, b) => b.time - a.time)) {
    const same = merged.find((one) => one.event === event.event && one.instance === event.instance && one.time - event.time < MERGE_S);
    if (!same) merged.push({ ...event });
    else if (OF_REQUESTS.includes(event.event)) same.count += event.count;
  }
  return merged;
}

// ---- rates and distributions --------------------------------------------------------------------------------------

/** The oldest snapshot within `seconds` before the one at `end`, but not that one itself where there is one before it. */
function snapshotBefore(seconds, end = snapshots.length - 1) {
  let start = Math.max(0, end - 1);
  while (start > 0 && snapshots[end].time - snapshots[start - 1].time <= seconds + 0.5) start--;
  return snapshots[start];
}

/** Growth per second of what `delta(now, then)` measures; null while there is only one snapshot. */
export function rate(delta, seconds = RATE_WINDOW_S, end = snapshots.length - 1) {
  const then = snapshotBefore(seconds, end), now = snapshots[end];
  return now === then ? null : Math.max(0, delta(now, then)) / (now.time - then.time);
}

export const rates = (delta, seconds = 3) => snapshots.map((_, i) => (i ? rate(delta, seconds, i) : null));

/** The growth of a counter, summed over instances; a counter of a restarted instance begins at 0. */
export function counterDelta(name, filter = () => true) {
  return (now, then) => sum(now.instances.filter(filter).map((instance) => {
    const old = then.byId.get(instance.instance_id);
    return old === undefined ? 0 : Math.max(0, instance[name] - old[name]);
  }));
}

export const difference = (value) => (now, then) => value(now) - value(then);

/** For each snapshot, the share of prompt tokens that were found in pools shortly before it. */
export function hitRates() {
  return snapshots.map((now, i) => {
    if (!i) return null;
    const then = snapshotBefore(5, i), queries = counterDelta("prefix_cache_queries")(now, then);
    return queries ? counterDelta("prefix_cache_hits")(now, then) / queries : null;
  });
}

/** The histogram of the last `seconds`; 0 means since the start of the router. */
export function distribution(name, seconds, end = snapshots.length - 1) {
  return between(name, seconds ? snapshotBefore(seconds, end) : null, snapshots[end]);
}

/** The histogram of the time between two snapshots; with null as the first, since the start. */
export function between(name, then, now) {
  return { limits: now[name].limits, counts: now[name].counts.map((n, i) => (then ? Math.max(0, n - then[name].counts[i]) : n)) };
}

/** For each snapshot, a quantile of the time shortly before it. */
export const quantiles = (name, q) => snapshots.map((_, i) => (i ? quantile(distribution(name, 5, i), q) : null));

/** Interpolated within its bucket on a logarithmic scale, like the buckets; null without values. */
export function quantile({ limits, counts }, q) {
  let remaining = q * sum(counts);
  if (!remaining) return null;
  const i = counts.findIndex((count) => (remaining -= count) <= 0);
  if (i < 0 || i >= limits.length) return last(limits);
  const low = i ? limits[i - 1] : limits[0] / 2;
  return low * (limits[i] / low) ** (1 + remaining / counts[i]);
}

/** The position of a time among the buckets: 2.5 is the middle of the third. */
export function bucketPosition(limits, seconds) {
  const i = limits.findIndex((limit) => seconds <= limit);
  if (i < 0) return limits.length;
  const low = i ? limits[i - 1] : limits[0] / 2;
  return i + Math.max(0, Math.log(seconds / low) / Math.log(limits[i] / low));
}

/** The share of values up to `seconds`. */
export function shareBelow({ limits, counts }, seconds) {
  const at = bucketPosition(limits, seconds);
  return sum(counts.map((count, i) => count * Math.min(1, Math.max(0, at - i)))) / sum(counts);
}

/** What happened from the last snapshot before `start` to `seconds` after `end`, with the minute before; null if that is not known. */
export function around(start, end, seconds) {
  const i = snapshots.findLastIndex((one) => one.time < start);
  if (i < 0) return null;
  const then = snapshots[i], now = snapshots.findLast((one) => one.time <= end + seconds) ?? last(snapshots);
  const before = snapshotBefore(60, i);
  return now.time <= then.time ? null : { then, now, before: before === then ? null : before };
}
