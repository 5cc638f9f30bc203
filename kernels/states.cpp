// States of recurrent layers: short convolutions, and linear attention with a decay and, on demand, the delta rule.
//
// Each token changes the state in float32, in the order of tokens, so a state's bits do not depend on chunks, on the batch or
// on the threads. Parts of a row (`Rows::tile` below) never meet: they are tasks of their own, and stay in the L1 cache.
//
// Where states are: row tables[s][i] of `rows` has the state of sequence s after the last token of its block i of B tokens.
// -1: there is none; the state goes on to the next row that there is, and to that of the last token in any case.
//
// New tokens behind those to be kept are drafts: they go on from the state, which stays what it was before them.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr int VECTORS = 2, TILE = VECTORS * W;

// The batch, and the part of each row that is this layer's: `offset` numbers behind its start. The new tokens of sequence s are
// starts[s] to stops[s], of which kept[s + 1] - kept[s] are kept; null: all of them.
struct States {
    float* rows;
    const i64 *tables, *starts, *stops, *kept, *kv_lens;
    i64 stride, offset, S, M, B, threads;

    i64 count(i64 s) const { return stops[s] - starts[s]; }
    i64 num_kept(i64 s) const { return kept ? kept[s + 1] - kept[s] : count(s); }
    i64 first(i64 s) const { return kv_lens[s] - count(s); }
    // The row at block i or, if it has none, the next one.
    float* next(i64 s, i64 i) const {
        while (tables[s * M + i] < 0) i++;
        return rows + tables[s * M + i] * stride + offset;
    }
    // Where the state is before the first new token; null: it is zero.
    const float* before(i64 s) const { return first(s) ? next(s, (first(s) - 1) / B) : nullptr; }
    // Where to keep the state after new token t; null: nowhere.
    float* after(i64 s, i64 t) const {
        const i64 position = first(s) + t;
        if (t + 1 >= num_kept(s)) return t + 1 == num_kept(s) ? next(s, position / B) : nullptr;
        return (position + 1) % B || tables[s * M + position / B] < 0 ? nullptr : next(s, position / B);
    }
};

// Channels [c, c + n) of one sequence: y[t] = bias + sum of weight[k] · x[t - K + 1 + k], in the order of k.
// The state is the last K - 1 tokens, [C][K - 1]; `past` has room for K tokens.
void convolve(const States& states, i64 s, i64 c, i64 n, float* y, const float* x, const float* weight, const float* bias,
              i64 C, i64 K, vf* past) {
    if (!states.count(s)) return;
    float lanes[W] = {};
    const auto column = [&](const float* from, i64 stride) {
        for (i64 i = 0; i < n; i++) lanes[i] = from[i * stride];
        return load(lanes);
    };
    const float* const before = states.before(s);
    for (i64 k = 0; k + 1 < K; k++) past[k] = before ? column(before + c * (K - 1) + k, K - 1) : vf{};
    std::vector<vf> weights(K);
    for (i64 k = 0; k < K; k++) weights[k] = column(weight + c * K + k, K);
    for (i64 t = 0; t < states.count(s); t++) {
        const i64 at = (states.starts[s] + t) * C + c;
        past[K - 1] = load(x + at, n);
        vf sum = bias ? load(bias + c, n) : vf{};
        for (i64 k = 0; k < K; k++) sum = mul_add(weights[k], past[k], sum);
        store(y + at, sum, n);
        for (i64 k = 0; k + 1 < K; k++) past[k] = past[k + 1];
        if (float* const after = states.after(s, t))
            for (i64 k = 0; k + 1 < K; k++) {
                store(lanes, past[k]);
                for (i64 i = 0; i < n; i++) after[(c + i) * (K - 1) + k] = lanes[i];
            }
    }
}

// q, k [T][G][K], v and y [T][H][V], beta [T][H] or null; a decay for each head [T][H], for each of its keys [T][H][K], or for
// each number of a state [T][H][K][V].
struct Attention {
    float* y;
    const float *q, *k, *v, *decay, *beta;
    i64 H, G, K, V, decays;
};

// Columns [c, c + n) of one head: S = a · S; with the delta rule v = beta · (v - k·S); S += k ⊗ v; y = q·S.
template <bool DELTA, int DECAY>
void attend(const States& states, const Attention& of, i64 s, i64 h, i64 c, i64 n, float* S) {
    if (!states.count(s)) return;
    const i64 K = of.K, V = of.V, g = h * of.G / of.H, at = h * K * V + c;
    const auto part = [&](int j) { return std::max<i64>(0, std::min<i64>(W, n - j * W)); };
    const float* const before = states.before(s);
    for (i64 k = 0; k < K; k++)
        for (int j = 0; j < VECTORS; j++)
            store(S + k * TILE + j * W, before && part(j) ? load(before + at + k * V + j * W, part(j)) : vf{});
    for (i64 t = 0; t < states.count(s); t++) {
        const i64 token = states.starts[s] + t, head = token * of.H + h;
        const float *const q = of.q + (token * of.G + g) * K, *const key = of.k + (token * of.G + g) * K;
        const float* const decay = of.decay + head * (DECAY == 0 ? 1 : DECAY == 1 ? K : K * V);
        vf value[VECTORS], seen[VECTORS] = {}, sum[VECTORS] = {};
        for (int j = 0; j < VECTORS; j++) value[j] = part(j) ? load(of.v + head * V + c + j * W, part(j)) : vf{};
        const auto decayed = [&](i64 k, int j) {
            const vf a = DECAY == 2 ? (part(j) ? load(decay + k * V + c + j * W, part(j)) : vf{}) : splat(decay[DECAY * k]);
            return a * load(S + k * TILE + j * W);
        };
        if (DELTA) {
            for (i64 k = 0; k < K; k++)
                for (int j = 0; j < VECTORS; j++) {
                    const vf x = decayed(k, j);
                    store(S + k * TILE + j * W, x);
                    seen[j] = mul_add(splat(key[k]), x, seen[j]);
                }
            for (int j = 0; j < VECTORS; j++) value[j] = splat(of.beta[head]) * (value[j] - seen[j]);
        }
        for (i64 k = 0; k < K; k++)
            for (int j = 0; j < VECTORS; j++) {
                const vf x = mul_add(splat(key[k]), value[j], DELTA ? load(S + k * TILE + j * W) : decayed(k, j));
                store(S + k * TILE + j * W, x);
                sum[j] = mul_add(splat(q[k]), x, sum[j]);
            }
        for (int j = 0; j < VECTORS; j++)
            if (part(j)) store(of.y + head * V + c + j * W, sum[j], part(j));
        if (float* const after = states.after(s, t))
            for (i64 k = 0; k < K; k++)
                for (int j = 0; j < VECTORS; j++)
                    if (part(j)) store(after + at + k * V + j * W, load(S + k * TILE + j * W), part(j));
    }
}

template <bool DELTA, int DECAY>
void attend(const States& states, const Attention& of) {
    const i64 tiles = (of.V + TILE - 1) / TILE;
#pragma omp parallel num_threads((int)states.threads)
    {
        std::vector<float> S(of.K * TILE);
#pragma omp for schedule(dynamic)
        for (i64 task = 0; task < states.S * of.H * tiles; task++) {
            const i64 c = task % tiles * TILE, row = task / tiles;
            attend<DELTA, DECAY>(states, of, row / of.H, row % of.H, c, std::min<i64>(TILE, of.V - c), S.data());
        }
    }
}

}  // namespace

extern "C" {

// y [T][C] of x [T][C], weight [C][K] and bias [C] or null.
void pdserve_convolve(const States* states, float* y, const float* x, const float* weight, const float* bias, i64 C, i64 K) {
    const i64 tiles = (C + W - 1) / W;
#pragma omp parallel num_threads((int)states->threads)
    {
        std::vector<vf> past(K);
#pragma omp for schedule(static)
        for (i64 task = 0; task < states->S * tiles; task++) {
            const i64 c = task % tiles * W;
            convolve(*states, task / tiles, c, std::min<i64>(W, C - c), y, x, weight, bias, C, K, past.data());
        }
    }
}

// See `Attention`.
void pdserve_linear_attention(const States* states, const Attention* of) {
    if (of->beta) return of->decays ? attend<true, 1>(*states, *of) : attend<true, 0>(*states, *of);
    if (of->decays == 2) return attend<false, 2>(*states, *of);
    return of->decays ? attend<false, 1>(*states, *of) : attend<false, 0>(*states, *of);
}
}
