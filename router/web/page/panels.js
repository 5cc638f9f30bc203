// The panels at the top of the live page: the curves of each, the figure above them, and the limit across.

import { Chart } from "./charts.js";
import { bandwidth, duration, format, h, integer, latencyTick, percent, perSecond, short } from "./format.js";
import { counterDelta, difference, distribution, hitRates, last, latestRequests, quantile, quantiles, rate, rates, snapshots, sum } from "./snapshots.js";

export const rolesOf = (now) => ["prefill", "decode", "both"].filter((role) => now.instances.some((instance) => instance.role === role));

/** Prompt tokens of the latest requests by the source of their KV. */
export function promptSources() {
  const prefilled = latestRequests().filter((request) => request.stages_ms.first_token !== undefined);
  const total = (name) => sum(prefilled.map((request) => request[name]));
  return { computed: total("computed_tokens"), pool: total("local_hit_tokens"), store: total("loaded_tokens") };
}

const finishedRequests = difference((snapshot) => sum(Object.values(snapshot.requests)));
const outputTokens = difference((snapshot) => sum(snapshot.ttft.counts) + sum(snapshot.itl.counts));
const unanswered = difference((snapshot) => sum(Object.values(snapshot.refusals)) + (snapshot.requests.error ?? 0));
const curve = (name, color, values, isFilled = false) => ({ name, color, values, isFilled });

/** For each snapshot, the share of the blocks of a role's pools that sequences hold. */
function heldShares(role) {
  return snapshots.map((snapshot) => {
    const members = snapshot.instances.filter((instance) => instance.role === role), blocks = sum(members.map((one) => one.num_blocks));
    return blocks ? sum(members.map((one) => one.kv_cache_blocks_held)) / blocks : null;
  });
}

/** At the axis: without decimals that are zero, and nothing for less than a byte. */
const bandwidthTick = (bytes) => (bytes && bytes < 1 ? "" : format(bandwidth(bytes).map((part, i) => (i ? part : String(Number(part))))));

/** A panel of a latency: its median and tail, and the limit of the SLO. */
function latencyPanel(title, name, color) {
  return {
    title, chart: new Chart(title, (seconds) => format(duration(seconds)), { tick: latencyTick, isLogarithmic: true }),
    curves: () => [curve("median", color, quantiles(name, 0.5), true), curve("p99", "tail", quantiles(name, 0.99))],
    figure: (now) => {
      const minute = distribution(name, 60), [median, p99] = [0.5, 0.99].map((q) => quantile(minute, q)), slo = now.slo[name];
      return { shown: duration(median), isLate: slo < median, below: h("span", slo < p99 ? "late" : "", `p99 of the last minute ${format(duration(p99))}`) };
    },
    limit: (now) => (now.slo[name] ? { name: "SLO", value: now.slo[name] } : null),
  };
}

export const PANELS = [
  {
    title: "Requests", chart: new Chart("Requests", (value) => format(perSecond(value, "/s")), { tick: (value) => `${short(value)} /s` }),
    curves: () => [curve("finished", "router", rates(finishedRequests), true), curve("failed or refused", "bad", rates(unanswered))],
    figure: () => ({ shown: perSecond(rate(finishedRequests), "/s"), below: `${format(perSecond(rate(unanswered), "/s"))} failed or refused` }),
  },
  {
    title: "Under way", chart: new Chart("Under way", (value) => integer(value), { tick: short, least: 1 }),
    curves: () => [curve("running", "decode", snapshots.map((one) => one.under_way), true), curve("queued", "connector", snapshots.map((one) => one.waiting))],
    figure: (now) => ({ shown: [integer(now.under_way), "requests"], below: `${integer(now.waiting)} queued` }),
  },
  latencyPanel("Time to first token", "ttft", "prefill"),
  latencyPanel("Time between tokens", "itl", "decode"),
  {
    title: "Output", chart: new Chart("Output", (value) => format(perSecond(value, "tokens/s")), { tick: short }),
    curves: () => [curve("tokens", "decode", rates(outputTokens), true)],
    figure: () => {
      const drafts = rate(counterDelta("spec_decode_num_draft_tokens")), right = rate(counterDelta("spec_decode_num_accepted_tokens"));
      return { shown: perSecond(rate(outputTokens), "tokens/s"), below: drafts ? `${percent(right / drafts)} of ${format(perSecond(drafts, "drafts/s"))} right` : "of all answers" };
    },
  },
  {
    title: "Prefix hits", chart: new Chart("Prefix hits", percent, { top: 1 }), curves: () => [curve("hits", "prefill", hitRates(), true)],
    figure: () => {
      const sources = promptSources(), total = sum(Object.values(sources));
      return { shown: [total ? percent(1 - sources.computed / total) : "–", ""], below: "of the latest prompts' tokens" };
    },
  },
  {
    title: "KV moved", chart: new Chart("KV moved", (bytes) => format(bandwidth(bytes)), { tick: bandwidthTick }),
    curves: () => [curve("loaded", "connector", rates(counterDelta("load_bytes")), true), curve("stored", "prefill", rates(counterDelta("store_bytes")))],
    figure: () => {
      const loaded = rate(counterDelta("load_bytes")), busyShare = rate(counterDelta("load_seconds"));
      return { shown: bandwidth(loaded), below: `stored ${format(bandwidth(rate(counterDelta("store_bytes"))))}${busyShare ? `; loads take ${format(bandwidth(loaded / busyShare))}` : ""}` };
    },
  },
  {
    title: "KV pools in use", chart: new Chart("KV pools in use", percent, { top: 1 }),
    curves: (now) => rolesOf(now).map((role, i) => curve(role, role === "both" ? "router" : role, heldShares(role), !i)),
    figure: (now) => {
      const [first, ...more] = rolesOf(now).map((role) => [role, last(heldShares(role))]);
      return { shown: [first ? percent(first[1]) : "–", first ? `of ${first[0]}` : ""], below: more.map(([role, share]) => `${percent(share)} of ${role}`).join(", ") };
    },
  },
];
