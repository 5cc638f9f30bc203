// Paged attention for CPUs: writes K and V into the pool's blocks, attends directly to them, copies blocks.
// The C interface needs no torch headers, so that it compiles in seconds. native.py builds it, cpu.py calls it.
//
// Softmax is online (Milakov & Gimelshein 2018): a running maximum m, a running sum l, and an output o that is rescaled when m
// grows. All sums are float32, whatever the type of the KV.
//
// Decode (one new token): a task is a split of the KV of one sequence and key/value head, read once for all query heads that
// share it. Vector lanes run along the head, so that K and V are read in the order of the pool. The next rows are prefetched,
// since blocks are far apart in memory; a few lines with every product, because many at once would delay the products. The
// (m, l, o) of the splits are combined afterwards (flash-decoding, Dao et al. 2023).
// Prefill (more new tokens): a task is a tile of query rows (token × query head) of one key/value head. Vector lanes run along
// the query rows, so that neither the products nor the softmax sum across lanes (after FlashAttention-2, Dao 2023).
// In both phases bfloat16 uses amx_kernel.h where AMX is available, else pairs.h where AVX-512 multiplies pairs.
//
// A query row has the same result, bit for bit, in both phases, in any batch and with any number of threads: KV is content,
// found by other requests under its key. So both phases round alike:
//   - q · k is W sums, over the elements d ≡ j (mod W), which are then added by halves (`sum`);
//   - m, l and o advance by tiles of KV_TILE tokens; l adds the weights of a tile as W sums over the tokens t ≡ j (mod W), by
//     halves; o adds the products p · v token by token;
//   - splits of SPLIT tokens begin with an empty (m, l, o), and are combined from the first to the last, after the sink.
// Tiles and splits are counted from token 0. Masked tokens have p = 0, which changes no sum.
//
// Shape legend: see problem.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx_kernel.h"
#include "byte_kv.h"
#include "pairs.h"
#include "problem.h"
#include "vectors.h"

namespace {

constexpr int KV_TILE = 64;      // KV tokens per update of the output; a multiple of W
constexpr int ROW_TILE = 4 * W;  // query rows of a prefill task
constexpr i64 SPLIT = 512;       // KV tokens: combining shorter splits costs more than a thread gains

inline i64 round_up(i64 x, i64 multiple) { return (x + multiple - 1) / multiple * multiple; }

// ---- decode -----------------------------------------------------------------------------------------------------------

template <class T>
inline void prefetch(const T* row, i64 D) {
    for (const char *p = (const char*)row, *e = (const char*)(row + D); p < e; p += 64) __builtin_prefetch(p, 0, 2);
}

// s[r][t] = q[r] · k[t] for N query rows, padded with zeros to whole vectors, and `count` contiguous tokens. Prefetches the V
// rows.
template <class T, int N>
void qk_dot(const float* q, const T* k, const T* v, i64 count, i64 D, float* s) {
    constexpr int Z = 4;  // tokens per iteration: N × Z sums in registers
    const i64 full = D / W * W, Dp = round_up(D, W);
    i64 t = 0;
    for (; t + Z <= count; t += Z) {
        vf acc[N][Z] = {};
        const auto add = [&](i64 d, const vf (&kd)[Z]) {
            for (int r = 0; r < N; r++) {
                const vf qd = in_register(load(q + r * Dp + d));
                for (int z = 0; z < Z; z++) acc[r][z] = mul_add(qd, kd[z], acc[r][z]);
            }
        };
        for (i64 d = 0; d < full; d += W) {
            prefetch(v + t * D + Z * d, Z * W);
            vf kd[Z];
            for (int z = 0; z < Z; z++) kd[z] = load(k + (t + z) * D + d);
            add(d, kd);
        }
        if (full < D) {
            vf kd[Z];
            for (int z = 0; z < Z; z++) kd[z] = load(k + (t + z) * D + full, D - full);
            add(full, kd);
        }
        for (int r = 0; r < N; r++) sum4(acc[r], s + r * KV_TILE + t);
    }
    for (; t < count; t++)
        for (int r = 0; r < N; r++) {
            vf acc = {};
            for (i64 d = 0; d < D; d += W) acc = mul_add(load(q + r * Dp + d), load(k + t * D + d, D - d), acc);
            s[r * KV_TILE + t] = sum(acc);
        }
}

// o[r] += Σ p[r][t] · v[t] for N query rows. Prefetches the next K rows.
template <class T, int N>
void accumulate_pv(const float* p, const T* v, const T* next_k, i64 count, i64 D, float* o) {
    constexpr int Z = 4;  // vectors along the head per iteration
    i64 d = 0;
    for (; d + Z * W <= D; d += Z * W) {
        vf acc[N][Z];
        for (int r = 0; r < N; r++)
            for (int z = 0; z < Z; z++) acc[r][z] = load(o + r * D + d + z * W);
        for (i64 t = 0; t < count; t++) {
            if (next_k) prefetch(next_k + t * D + d, Z * W);
            vf vd[Z];
            for (int z = 0; z < Z; z++) vd[z] = load(v + t * D + d + z * W);
            for (int r = 0; r < N; r++)
                for (int z = 0; z < Z; z++) acc[r][z] = mul_add(splat(p[r * KV_TILE + t]), vd[z], acc[r][z]);
        }
        for (int r = 0; r < N; r++)
            for (int z = 0; z < Z; z++) store(o + r * D + d + z * W, acc[r][z]);
    }
    for (; d + W <= D; d += W) {
        vf acc[N];
        for (int r = 0; r < N; r++) acc[r] = load(o + r * D + d);
        for (i64 t = 0; t < count; t++) {
            if (next_k) prefetch(next_k + t * D + d, W);
            const vf vd = load(v + t * D + d);
            for (int r = 0; r < N; r++) acc[r] = mul_add(splat(p[r * KV_TILE + t]), vd, acc[r]);
        }
        for (int r = 0; r < N; r++) store(o + r * D + d, acc[r]);
    }
    for (; d < D; d++)
        for (i64 t = 0; t < count; t++)
            for (int r = 0; r < N; r++) o[r * D + d] = mul_add(p[r * KV_TILE + t], to_float(v[t * D + d]), o[r * D + d]);
}

// Turn the scores of one tile and row, of which [first, end) are visible, into unnormalised probabilities, and update m and l.
// Returns the rescaling factor of o.
inline float online_softmax(float* s, i64 first, i64 end, const Problem& a, float& m, float& l) {
    const i64 stop = round_up(end, W);
    for (i64 t = first / W * W; t < stop; t += W) store(s + t, apply_softcap(load(s + t) * a.scale, a));
    std::fill(s, s + first, MASKED);
    std::fill(s + end, s + stop, MASKED);
    float m_new = m;
#pragma omp simd reduction(max : m_new)
    for (i64 t = first; t < end; t++) m_new = std::max(m_new, s[t]);
    vf total = {};
    for (i64 t = 0; t < stop; t += W) {
        const vf p = exp_(load(s + t) - m_new);
        store(s + t, p);
        total += p;
    }
    const float rescale = exp_(splat(m - m_new))[0];
    m = m_new;
    l = mul_add(l, rescale, sum(total));
    return rescale;
}

// Attention of one sequence's query rows over one split: q, s and o are scratch, m[R], l[R] and o[R × D] the result.
template <class T>
void decode(const Problem& a, const Split& split, float* q, float* s, float* m, float* l, float* o) {
    const i64 R = a.H / a.G, D = a.D, Dp = round_up(D, W);
    const PagedKV<T> kv(a, split.s, split.g);
    const T* query = (const T*)a.q + a.starts[split.s] * a.q_token + split.g * R * a.q_head;
    for (i64 r = 0; r < R; r++) {
        for (i64 d = 0; d < Dp; d++) q[r * Dp + d] = d < D ? to_float(query[r * a.q_head + d]) : 0;
        m[r] = MIN_SCORE;
        l[r] = 0;
    }
    std::fill_n(o, R * D, 0.f);
    for (i64 first = split.first, end; first < split.end; first = end) {
        const i64 tile = first / KV_TILE * KV_TILE;
        end = std::min(tile + KV_TILE, split.end);
        for (i64 t = first, n; t < end; t += n) {
            n = kv.contiguous(t, end);
            const T *k = kv.k(t), *v = kv.v(t);
            i64 r = 0;
            for (; r + 4 <= R; r += 4) qk_dot<T, 4>(q + r * Dp, k, v, n, D, s + r * KV_TILE + t - tile);
            for (; r + 2 <= R; r += 2) qk_dot<T, 2>(q + r * Dp, k, v, n, D, s + r * KV_TILE + t - tile);
            for (; r < R; r++) qk_dot<T, 1>(q + r * Dp, k, v, n, D, s + r * KV_TILE + t - tile);
        }
        for (i64 r = 0; r < R; r++) {
            const float rescale = online_softmax(s + r * KV_TILE, first - tile, end - tile, a, m[r], l[r]);
            if (rescale != 1.f)
                for (i64 d = 0; d < D; d++) o[r * D + d] *= rescale;
        }
        for (i64 t = first, n; t < end; t += n) {
            n = kv.contiguous(t, end);
            const T* v = kv.v(t);
            const bool prefetches = t + KV_TILE + n <= split.end && kv.contiguous(t + KV_TILE, split.end) >= n;
            const T* next_k = prefetches ? kv.k(t + KV_TILE) : nullptr;
            const float* p = s + t - tile;
            i64 r = 0;
            for (; r + 4 <= R; r += 4)
                accumulate_pv<T, 4>(p + r * KV_TILE, v, r ? nullptr : next_k, n, D, o + r * D);
            for (; r + 2 <= R; r += 2)
                accumulate_pv<T, 2>(p + r * KV_TILE, v, r ? nullptr : next_k, n, D, o + r * D);
            for (; r < R; r++)
                accumulate_pv<T, 1>(p + r * KV_TILE, v, r ? nullptr : next_k, n, D, o + r * D);
        }
    }
}

template <class T>
void write_out(const Problem& a, i64 token, i64 head, const float* o, float l) {
    T* out = (T*)a.out + token * a.out_token + head * a.out_head;
    for (i64 d = 0; d < a.D; d++) from_float(out[d], o[d] / l);
}

// Combine the splits of one sequence and head: partial[index] holds m[R], l[R], o[R × D].
template <class T>
void combine(const Problem& a, const Split& split, const float* partial, i64 size) {
    const i64 R = a.H / a.G, D = a.D;
    std::vector<float> total(D);
    for (i64 r = 0; r < R; r++) {
        float m, l;
        begin_row(a, split.g * R + r, 1, m, l);
        std::fill(total.begin(), total.end(), 0.f);
        for (i64 i = 0; i < split.count; i++) {
            const float *p = partial + i * size, *o = p + 2 * R + r * D;
            const float m_new = std::max(m, p[r]);
            const float old_weight = exp_(splat(m - m_new))[0], weight = exp_(splat(p[r] - m_new))[0];
            l = mul_add(l, old_weight, p[R + r] * weight);
            for (i64 d = 0; d < D; d++) total[d] = mul_add(total[d], old_weight, o[d] * weight);
            m = m_new;
        }
        write_out<T>(a, a.starts[split.s], split.g * R + r, total.data(), l);
    }
}

// ---- prefill ----------------------------------------------------------------------------------------------------------

// s[t][x] = Σ_d k[t][d] · q[d][x] for I tokens × V vectors of query rows, rounded as in `qk_dot`. The W sums are made in the
// order in which the fewest of them wait for their other half.
template <int I, int V>
inline void scores(float* s, const float* k, i64 stride, const float* q, i64 D) {
    vf waiting[5][I][V];
#pragma GCC unroll 16
    for (int n = 0; n < W; n++) {
        vf acc[I][V] = {};
        for (i64 d = bit_reversed(n); d < D; d += W) {
            vf qd[V];
            for (int x = 0; x < V; x++) qd[x] = in_register(load(q + d * ROW_TILE + x * W));
            for (int i = 0; i < I; i++) {
                const vf kd = splat(k[i * stride + d]);
                for (int x = 0; x < V; x++) acc[i][x] = mul_add(kd, qd[x], acc[i][x]);
            }
        }
        int level = 0;
        for (; n >> level & 1; level++)
            for (int i = 0; i < I; i++)
                for (int x = 0; x < V; x++) acc[i][x] = waiting[level][i][x] + acc[i][x];
        std::memcpy(waiting[level], acc, sizeof acc);
    }
    constexpr int LAST = W == 16 ? 4 : W == 8 ? 3 : 2;
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(s + i * ROW_TILE + x * W, waiting[LAST][i][x]);
}

// The scores of `count` tokens × V vectors of query rows.
template <int V>
void scores_of_tokens(float* s, const float* k, i64 stride, const float* q, i64 D, i64 count) {
    constexpr int I = 8 / V;
    i64 t = 0;
    for (; t + I <= count; t += I) scores<I, V>(s + t * ROW_TILE, k + t * stride, stride, q, D);
    for (; t < count; t++) scores<1, V>(s + t * ROW_TILE, k + t * stride, stride, q, D);
}

// The scores of `count` tokens × `vectors` vectors of query rows.
void all_scores(float* s, const float* k, i64 stride, const float* q, i64 D, i64 count, i64 vectors) {
    i64 x = 0;
    // with two, AVX2 loads less than it multiplies
    for (; W == 8 && x + 2 <= vectors; x += 2) scores_of_tokens<2>(s + x * W, k, stride, q + x * W, D, count);
    for (; x < vectors; x++) scores_of_tokens<1>(s + x * W, k, stride, q + x * W, D, count);
}

// o[d][x] = o[d][x] · rescale[x] + Σ_t v[t][d] · p[t][x] for I elements of the head × V vectors of query rows, as outer
// products.
template <int I, int V>
inline void multiply(float* o, const float* rescale, const float* v, i64 stride, const float* p, i64 count) {
    vf acc[I][V];
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) acc[i][x] = load(o + i * ROW_TILE + x * W) * load(rescale + x * W);
    for (i64 t = 0; t < count; t++) {
        vf pt[V];
        for (int x = 0; x < V; x++) pt[x] = load(p + t * ROW_TILE + x * W);
        for (int i = 0; i < I; i++) {
            const vf vt = splat(v[t * stride + i]);
            for (int x = 0; x < V; x++) acc[i][x] = mul_add(vt, pt[x], acc[i][x]);
        }
    }
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(o + i * ROW_TILE + x * W, acc[i][x]);
}

template <int V>
void multiply_rows(float* o, const float* rescale, const float* v, i64 stride, const float* p, i64 count, i64 D) {
    constexpr int N = W == 16 ? 8 : W == 8 ? 6 : 4;  // N × V sums in registers, of which AVX-512 has 32, others 16
    i64 d = 0;
    for (; d + N <= D; d += N) multiply<N, V>(o + d * ROW_TILE, rescale, v + d, stride, p, count);
    for (; d + 2 <= D; d += 2) multiply<2, V>(o + d * ROW_TILE, rescale, v + d, stride, p, count);
    for (; d < D; d++) multiply<1, V>(o + d * ROW_TILE, rescale, v + d, stride, p, count);
}

void multiply_all(float* o, const float* rescale, const float* v, i64 stride, const float* p, i64 count, i64 D, i64 vectors) {
    i64 x = 0;
    for (; x + 2 <= vectors; x += 2) multiply_rows<2>(o + x * W, rescale + x * W, v, stride, p + x * W, count, D);
    for (; x < vectors; x++) multiply_rows<1>(o + x * W, rescale + x * W, v, stride, p + x * W, count, D);
}

// target[row][stride] = source[row][D]
template <class T>
void widen(const T* source, float* target, i64 rows, i64 D, i64 stride) {
    for (; rows > 0; rows--, source += D, target += stride) {
        i64 d = 0;
        for (; d + W <= D; d += W) store(target + d, load(source + d));
        for (; d < D; d++) target[d] = to_float(source[d]);
    }
}

// Buffers of one thread. o is of the current split, total_o of those before it.
struct Scratch {
    const i64 stride;  // of rows of k and v: not a power of two, of which few would fit a set of the cache
    std::vector<float> q, o, total_o, k, v, s;
    float m[ROW_TILE], l[ROW_TILE], rescale[ROW_TILE], total_m[ROW_TILE], total_l[ROW_TILE];
    int32_t positions[ROW_TILE];  // of each row's token in its sequence
    explicit Scratch(i64 D)
        : stride(W == 8 ? D + 16 : D), q(D * ROW_TILE), o(D * ROW_TILE), total_o(D * ROW_TILE), k(stride * KV_TILE),
          v(stride * KV_TILE), s(KV_TILE * ROW_TILE) {}
};

// Turn the scores of tokens [tile, tile + count) for W query rows, from row i on, into unnormalised probabilities. Updates m and
// l, and sets the rescaling factor of o. `masks`: some row does not see some token.
inline void online_softmax(const Problem& a, Scratch& x, i64 i, i64 tile, i64 count, bool masks) {
    vi query_position;
    std::memcpy(&query_position, x.positions + i, sizeof query_position);
    const vf m_old = load(x.m + i);
    vf m_new = m_old;
    for (i64 t = 0; t < count; t++) {
        float* s = x.s.data() + t * ROW_TILE + i;
        const vi token = (int32_t)(tile + t) - vi{};
        vf score = apply_softcap(load(s) * a.scale, a);
        if (masks) score = token <= query_position ? score : splat(MASKED);
        if (masks && a.window) score = token > query_position - (int32_t)a.window ? score : splat(MASKED);
        store(s, score);
        m_new = vmax(score, m_new);
    }
    vf totals[W] = {};
    for (i64 t = 0; t < count; t++) {
        const vf p = exp_(load(x.s.data() + t * ROW_TILE + i) - m_new);
        store(x.s.data() + t * ROW_TILE + i, p);
        totals[t % W] += p;
    }
    for (int n = W / 2; n; n /= 2)
        for (int j = 0; j < n; j++) totals[j] += totals[j + n];
    const vf rescale = exp_(m_old - m_new);
    store(x.m + i, m_new);
    store(x.l + i, mul_add(load(x.l + i), rescale, totals[0]));
    store(x.rescale + i, rescale);
}

// Add the current split of W query rows, from row i on, to those before it.
inline void add_split(const Problem& a, Scratch& x, i64 i) {
    const vf m_old = load(x.total_m + i), m_split = load(x.m + i), m_new = vmax(m_old, m_split);
    const vf old_weight = exp_(m_old - m_new), weight = exp_(m_split - m_new);
    store(x.total_m + i, m_new);
    store(x.total_l + i, mul_add(load(x.total_l + i), old_weight, load(x.l + i) * weight));
    for (i64 d = 0; d < a.D; d++) {
        float* const total = x.total_o.data() + d * ROW_TILE + i;
        store(total, mul_add(load(total), old_weight, load(x.o.data() + d * ROW_TILE + i) * weight));
    }
}

// Load the queries, transposed, and the positions of a tile. Lanes beyond it repeat its last row.
template <class T>
void load_queries(const Problem& a, const Tile& tile, i64 start, i64 cached, Scratch& x) {
    const i64 R = a.H / a.G, D = a.D, whole = W == 8 ? D / W * W : 0, lanes = round_up(tile.end - tile.first, W);
    const T* const query = (const T*)a.q + start * a.q_token + tile.g * R * a.q_head;
    for (i64 i = 0; i < lanes; i += W) {
        const T* source[W];
        for (i64 j = 0; j < W; j++) {
            const i64 row = std::min(tile.first + i + j, tile.end - 1);
            source[j] = query + row / R * a.q_token + row % R * a.q_head;
            x.positions[i + j] = (int32_t)(cached + row / R);
            begin_row(a, tile.g * R + row % R, 1, x.total_m[i + j], x.total_l[i + j]);
        }
        for (i64 d = 0; d < whole; d += W) {
            vf part[W];
            for (i64 j = 0; j < W; j++) part[j] = load(source[j] + d);
            transpose_lanes(part);
            for (i64 j = 0; j < W; j++) store(x.q.data() + (d + j) * ROW_TILE + i, part[j]);
        }
        for (i64 j = 0; j < W; j++)
            for (i64 d = whole; d < D; d++) x.q[d * ROW_TILE + i + j] = to_float(source[j][d]);
    }
}

template <class T>
void write_tile(const Problem& a, const Tile& tile, i64 start, const Scratch& x) {
    const i64 R = a.H / a.G, D = a.D, rows = tile.end - tile.first, whole = W == 8 ? D / W * W : 0;
    for (i64 i = 0; i < rows; i += W) {
        T* out[W];
        for (i64 j = 0, row = tile.first + i; j < W; j++, row++)
            out[j] = (T*)a.out + (start + row / R) * a.out_token + (tile.g * R + row % R) * a.out_head;
        for (i64 d = 0; d < whole; d += W) {
            vf part[W];
            for (i64 j = 0; j < W; j++) part[j] = load(x.total_o.data() + (d + j) * ROW_TILE + i) / load(x.total_l + i);
            transpose_lanes(part);
            for (i64 j = 0; j < std::min<i64>(W, rows - i); j++) store(out[j] + d, part[j]);
        }
        for (i64 j = 0; j < std::min<i64>(W, rows - i); j++)
            for (i64 d = whole; d < D; d++) from_float(out[j][d], x.total_o[d * ROW_TILE + i + j] / x.total_l[i + j]);
    }
}

template <class T>
void prefill(const Problem& a, const Tile& tile, Scratch& x) {
    const i64 D = a.D, rows = tile.end - tile.first, vectors = (rows + W - 1) / W;
    const i64 start = a.starts[tile.s], query_len = a.starts[tile.s + 1] - start, cached = a.kv_lens[tile.s] - query_len;
    const PagedKV<T> kv(a, tile.s, tile.g);
    load_queries<T>(a, tile, start, cached, x);
    std::fill(x.total_o.begin(), x.total_o.end(), 0.f);
    const i64 begin = a.window ? std::max<i64>(0, x.positions[0] + 1 - a.window) : 0, stop = x.positions[rows - 1] + 1;
    for (i64 split = begin / SPLIT * SPLIT; split < stop; split += SPLIT) {
        std::fill_n(x.m, ROW_TILE, MIN_SCORE);
        std::fill_n(x.l, ROW_TILE, 0.f);
        std::fill(x.o.begin(), x.o.end(), 0.f);
        const i64 split_end = std::min(split + SPLIT, stop);
        for (i64 first = std::max(begin, split) / KV_TILE * KV_TILE; first < split_end; first += KV_TILE) {
            const i64 count = std::min<i64>(KV_TILE, split_end - first), void_tokens = std::max<i64>(0, begin - first);
            std::fill_n(x.k.data(), void_tokens * x.stride, 0.f);  // outside of every row's window; their blocks may be others' now
            std::fill_n(x.v.data(), void_tokens * x.stride, 0.f);
            for (i64 t = void_tokens, n; t < count; t += n) {
                n = kv.contiguous(first + t, first + count);
                widen(kv.k(first + t), x.k.data() + t * x.stride, n, D, x.stride);
                widen(kv.v(first + t), x.v.data() + t * x.stride, n, D, x.stride);
            }
            const bool masks = first + count - 1 > x.positions[0] || (a.window && first + a.window <= x.positions[rows - 1]);
            all_scores(x.s.data(), x.k.data(), x.stride, x.q.data(), D, count, vectors);
            for (i64 i = 0; i < vectors * W; i += W) online_softmax(a, x, i, first, count, masks);
            multiply_all(x.o.data(), x.rescale, x.v.data(), x.stride, x.s.data(), count, D, vectors);
        }
        for (i64 i = 0; i < vectors * W; i += W) add_split(a, x, i);
    }
    write_tile<T>(a, tile, start, x);
}

// ---- tasks ------------------------------------------------------------------------------------------------------------

// The kernel of one thread on vector instructions; amx::Kernel is the other one.
template <class T>
struct VectorKernel {
    static constexpr i64 SPLIT = ::SPLIT;
    const Problem& a;
    Scratch scratch;
    std::vector<float> q, s;
    VectorKernel(const Problem& a, bool prefills)
        : a(a), scratch(prefills ? a.D : 0), q(a.H / a.G * round_up(a.D, W)), s(a.H / a.G * KV_TILE) {}
    static i64 tile_rows(i64) { return ROW_TILE; }
    static i64 partial_size(const Problem& a) { return a.H / a.G * (2 + a.D); }
    void prefill(const Tile& tile) { ::prefill<T>(a, tile, scratch); }
    void decode(const Split& split, const Split*, float* partial) {
        const i64 R = a.H / a.G;
        ::decode<T>(a, split, q.data(), s.data(), partial, partial + R, partial + 2 * R);
    }
    void combine(const Split& split, const float* partials) { ::combine<T>(a, split, partials, partial_size(a)); }
};

template <class Kernel>
void attend(const Problem& a) {
    const i64 R = a.H / a.G;
    // Four tasks per thread balance the load if the system preempts a thread.
    const i64 tile_rows = Kernel::tile_rows(a.starts[a.S] * a.H / (4 * a.threads));
    std::vector<Split> splits;
    std::vector<Tile> tiles;
    i64 work = 0;
    for (i64 s = 0; s < a.S; s++) {
        const i64 query_len = a.starts[s + 1] - a.starts[s], end = a.kv_lens[s];
        const i64 begin = a.window ? std::max<i64>(0, end - a.window) : 0;
        work += (end - begin) * a.H * query_len;
        if (query_len == 1) {
            const i64 first = begin / Kernel::SPLIT, count = (end + Kernel::SPLIT - 1) / Kernel::SPLIT - first;
            for (i64 g = 0; g < a.G; g++)
                for (i64 i = 0; i < count; i++)
                    splits.push_back({s, g, std::max(begin, (first + i) * Kernel::SPLIT),
                                      std::min(end, (first + i + 1) * Kernel::SPLIT), i, count});
        } else {
            for (i64 row = (query_len * R - 1) / tile_rows * tile_rows; row >= 0; row -= tile_rows)  // longest tasks first
                for (i64 g = 0; g < a.G; g++) tiles.push_back({s, g, row, std::min(row + tile_rows, query_len * R)});
        }
    }
    const i64 num_splits = splits.size(), num_tiles = tiles.size(), size = Kernel::partial_size(a);
    // Splits that a thread takes at once, and so knows the next one, whose KV it prefetches.
    const i64 run = std::clamp<i64>(num_splits / (2 * a.threads), 1, 8);
    const bool combines = std::any_of(splits.begin(), splits.end(), [](const Split& split) { return split.count > 1; });
    const amx::Buffer<float> partials(num_splits * size);
#pragma omp parallel num_threads((int)a.threads) if (work * a.D > 1 << 16)
    {
        Kernel kernel(a, num_tiles > 0);
#pragma omp for schedule(dynamic, 1) nowait
        for (i64 i = 0; i < num_tiles; i++) kernel.prefill(tiles[i]);
#pragma omp for schedule(dynamic, run)
        for (i64 i = 0; i < num_splits; i++) {
            const Split* const next = (i + 1) % run && i + 1 < num_splits ? &splits[i + 1] : nullptr;
            kernel.decode(splits[i], next, partials + i * size);
            if (splits[i].count == 1) kernel.combine(splits[i], partials + i * size);
        }
        if (combines) {  // an idle loop costs its barrier: 10 % of a short attention
#pragma omp for schedule(dynamic, 1)
            for (i64 i = 0; i < num_splits; i++)
                if (splits[i].count > 1 && splits[i].index == 0) kernel.combine(splits[i], partials + i * size);
        }
    }
}

// Attention by a kernel over KV of type T, whatever the cache's.
template <class Kernel, class T>
void attend_any(const Problem& a) {
    if (a.byte_kv) attend<byte_kv::Kernel<Kernel, T>>(a);
    else attend<Kernel>(a);
}

// Call `write(to, row)` for K and V of each token and head. Strides in bytes.
template <class Write>
void write_rows(char* cache, i64 block, i64 half, i64 head, const char* k, i64 k_token, i64 k_head, const char* v, i64 v_token,
                i64 v_head, const i64* slots, i64 T, i64 G, i64 B, i64 row, i64 threads, const Write& write) {
#pragma omp parallel for num_threads((int)threads) if (T * G * row > 1 << 18)
    for (i64 t = 0; t < T; t++) {
        char* target = cache + slots[t] / B * block + slots[t] % B * row;
        for (i64 g = 0; g < G; g++) {
            write(target + g * head, k + t * k_token + g * k_head);
            write(target + g * head + half, v + t * v_token + g * v_head);
        }
    }
}

}  // namespace

extern "C" {

// Whether the library has AMX and the system lets this process use it.
i64 pdserve_amx() { return amx::is_permitted(); }

// Bytes of the arguments of pdserve_attend, which the caller compares with its own.
i64 pdserve_attend_arguments() { return sizeof(Problem); }

void pdserve_attend(const Problem* a) {
    if (a->dtype == 0) return attend_any<VectorKernel<float>, float>(*a);
    if (a->dtype == 2) return attend_any<VectorKernel<fp16>, fp16>(*a);
#ifdef PDSERVE_AMX
    if (a->use_amx && amx::is_permitted()) return attend_any<amx::Kernel, bf16>(*a);
#endif
#ifdef PDSERVE_BFLOAT16
    if (pairs::supports(*a)) return attend_any<pairs::Kernel, bf16>(*a);
#endif
    attend_any<VectorKernel<bf16>, bf16>(*a);
}

// Write K and V rows to their slots, which have `row` bytes: as they are, or rounded to 8 bits from float32 (dtype 0), bfloat16
// (1) or float16 (2). All strides in bytes.
void pdserve_write_kv(char* cache, i64 block, i64 half, i64 head, const char* k, i64 k_token, i64 k_head, const char* v,
                      i64 v_token, i64 v_head, const i64* slots, i64 T, i64 G, i64 B, i64 row, i64 threads, i64 rounds,
                      i64 dtype) {
    const auto all = [&](const auto& write) {
        write_rows(cache, block, half, head, k, k_token, k_head, v, v_token, v_head, slots, T, G, B, row, threads, write);
    };
    const auto rounded = [&](auto type) {
        using Row = decltype(type);
        all([&](char* to, const char* from) { byte_kv::write((int8_t*)to, (const Row*)from, row - (i64)sizeof(fp16)); });
    };
    if (!rounds) all([&](char* to, const char* from) { std::memcpy(to, from, row); });
    else if (dtype == 0) rounded(float{});
    else if (dtype == 1) rounded(bf16{});
    else rounded(fp16{});
}

// target[target_ids[i]] = source[source_ids[i]] for `count` blocks; without ids, block i. Strides and sizes in bytes.
void pdserve_copy_blocks(char* target, i64 target_stride, const i64* target_ids, const char* source, i64 source_stride,
                         const i64* source_ids, i64 count, i64 bytes, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (count * bytes > 1 << 18)
    for (i64 i = 0; i < count; i++)
        std::memcpy(target + (target_ids ? target_ids[i] : i) * target_stride,
                    source + (source_ids ? source_ids[i] : i) * source_stride, bytes);
}

}  // extern "C"
