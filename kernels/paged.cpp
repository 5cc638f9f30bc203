// Paged attention for CPUs: writes K and V into the pool's blocks, attends straight from them, copies blocks.
// A plain C interface without torch's headers, so that it compiles in seconds; native.py builds it, cpu.py calls it.
//
// Softmax is computed online (Milakov & Gimelshein 2018): a running maximum m, a running sum l, and an output that is
// rescaled when m grows. Everything accumulates in float32 whatever the type of the KV.
//
// Decode (one new token): one task is a run of KV of one sequence and one key/value head, read once for all query heads
// that share it. Vector lanes run along the head, so that K and V stream from the pool as they lie there; the next rows are
// prefetched, since blocks lie far apart, a little with every product, as the products would wait behind many at once. Long
// runs are cut into several tasks and their (m, l, output) are combined afterwards (flash-decoding, Dao et al. 2023).
// Prefill (more new tokens): one task is a tile of query rows (token × query head) of one key/value head. Vector lanes run
// along the query rows, so that neither the products nor the softmax ever sum across lanes (after FlashAttention-2, Dao 2023).
// In bfloat16 amx.h does it, where there are matrix instructions.
//
// Names: see problem.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "problem.h"
#include "vectors.h"

namespace {

constexpr int TILE = 64;         // KV tokens whose scores are computed before the output is touched
constexpr int ROWS = 4 * W;      // query rows of a prefill task
constexpr i64 SMALLEST_RUN = 256;  // KV tokens: a shorter task costs more to combine than a thread gains

// ---- decode -----------------------------------------------------------------------------------------------------------

// KV tokens [first, end) of one sequence and head; `slot` counts the runs that were cut from one.
struct Run { i64 s, g, first, end, slot, slots; };

template <class T>
inline void prefetch(const T* row, i64 D) {
    for (const char *p = (const char*)row, *e = (const char*)(row + D); p < e; p += 64) __builtin_prefetch(p, 0, 2);
}

// s[r][t] = q[r] · k[t] for N query rows and `count` tokens that follow each other. Prefetches the V rows.
template <class T, int N>
void dots(const float* q, const T* k, const T* v, i64 count, i64 D, float* s) {
    constexpr int Z = 4;  // tokens at a time: N × Z sums in registers
    const i64 full = D / W * W;
    i64 t = 0;
    for (; t + Z <= count; t += Z) {
        vf acc[N][Z] = {};
        for (i64 d = 0; d < full; d += W) {
            prefetch(v + t * D + Z * d, Z * W);
            vf kd[Z];
            for (int z = 0; z < Z; z++) kd[z] = load(k + (t + z) * D + d);
            for (int r = 0; r < N; r++) {
                const vf qd = load(q + r * D + d);
                for (int z = 0; z < Z; z++) acc[r][z] += qd * kd[z];
            }
        }
        for (int r = 0; r < N; r++) {
            sum4(acc[r], s + r * TILE + t);
            for (int z = 0; z < Z; z++)
                for (i64 d = full; d < D; d++) s[r * TILE + t + z] += q[r * D + d] * to_float(k[(t + z) * D + d]);
        }
    }
    for (; t < count; t++)
        for (int r = 0; r < N; r++) {
            vf acc = {};
            for (i64 d = 0; d < full; d += W) acc += load(q + r * D + d) * load(k + t * D + d);
            float x = sum(acc);
            for (i64 d = full; d < D; d++) x += q[r * D + d] * to_float(k[t * D + d]);
            s[r * TILE + t] = x;
        }
}

// o[r] += Σ p[r][t] · v[t]. Prefetches the K rows that come next.
template <class T, int N>
void weigh(const float* p, const T* v, const T* next, i64 count, i64 D, float* o) {
    constexpr int Z = 4;  // vectors along the head at a time
    i64 d = 0;
    for (; d + Z * W <= D; d += Z * W) {
        vf acc[N][Z];
        for (int r = 0; r < N; r++)
            for (int z = 0; z < Z; z++) acc[r][z] = load(o + r * D + d + z * W);
        for (i64 t = 0; t < count; t++) {
            if (next) prefetch(next + t * D + d, Z * W);
            vf vd[Z];
            for (int z = 0; z < Z; z++) vd[z] = load(v + t * D + d + z * W);
            for (int r = 0; r < N; r++)
                for (int z = 0; z < Z; z++) acc[r][z] += p[r * TILE + t] * vd[z];
        }
        for (int r = 0; r < N; r++)
            for (int z = 0; z < Z; z++) store(o + r * D + d + z * W, acc[r][z]);
    }
    for (; d + W <= D; d += W) {
        vf acc[N];
        for (int r = 0; r < N; r++) acc[r] = load(o + r * D + d);
        for (i64 t = 0; t < count; t++) {
            if (next) prefetch(next + t * D + d, W);
            const vf vd = load(v + t * D + d);
            for (int r = 0; r < N; r++) acc[r] += p[r * TILE + t] * vd;
        }
        for (int r = 0; r < N; r++) store(o + r * D + d, acc[r]);
    }
    for (; d < D; d++)
        for (i64 t = 0; t < count; t++)
            for (int r = 0; r < N; r++) o[r * D + d] += p[r * TILE + t] * to_float(v[t * D + d]);
}

// The scores of one tile and one row become weights; returns the factor by which the row's output shrinks.
inline float soften(float* s, i64 count, const Problem& a, float& m, float& l) {
    for (i64 t = count; t < (count + W - 1) / W * W; t++) s[t] = HIDDEN;
    float top = m;
    for (i64 t = 0; t < count; t += W) store(s + t, capped(load(s + t) * a.scale, a));
    for (i64 t = count; t < (count + W - 1) / W * W; t++) s[t] = HIDDEN;
#pragma omp simd reduction(max : top)
    for (i64 t = 0; t < count; t++) top = std::max(top, s[t]);
    vf total = {};
    for (i64 t = 0; t < count; t += W) {
        const vf p = exp_(load(s + t) - top);
        store(s + t, p);
        total += p;
    }
    const float shrink = std::exp(m - top);
    m = top;
    l = l * shrink + sum(total);
    return shrink;
}

template <class T>
void decode(const Problem& a, const Run& run, float* q, float* s, float* m, float* l, float* o) {
    const i64 R = a.H / a.G, D = a.D;
    const Rows<T> kv(a, run.s, run.g);
    const T* query = (const T*)a.q + a.starts[run.s] * a.q_token + run.g * R * a.q_head;
    for (i64 r = 0; r < R; r++) {
        for (i64 d = 0; d < D; d++) q[r * D + d] = to_float(query[r * a.q_head + d]);
        m[r] = NEVER;
        l[r] = 0;
    }
    std::fill_n(o, R * D, 0.f);
    for (i64 first = run.first; first < run.end; first += TILE) {
        const i64 end = std::min(first + TILE, run.end);
        for (i64 t = first, n; t < end; t += n) {
            n = kv.run(t, end);
            const T *k = kv.k(t), *v = kv.v(t);
            i64 r = 0;
            for (; r + 4 <= R; r += 4) dots<T, 4>(q + r * D, k, v, n, D, s + r * TILE + t - first);
            for (; r + 2 <= R; r += 2) dots<T, 2>(q + r * D, k, v, n, D, s + r * TILE + t - first);
            for (; r < R; r++) dots<T, 1>(q + r * D, k, v, n, D, s + r * TILE + t - first);
        }
        for (i64 r = 0; r < R; r++) {
            const float shrink = soften(s + r * TILE, end - first, a, m[r], l[r]);
            if (shrink != 1.f)
                for (i64 d = 0; d < D; d++) o[r * D + d] *= shrink;
        }
        for (i64 t = first, n; t < end; t += n) {
            n = kv.run(t, end);
            const T* v = kv.v(t);
            const T* next = t + TILE + n <= run.end && kv.run(t + TILE, run.end) >= n ? kv.k(t + TILE) : nullptr;
            i64 r = 0;
            for (; r + 4 <= R; r += 4) weigh<T, 4>(s + r * TILE + t - first, v, r ? nullptr : next, n, D, o + r * D);
            for (; r + 2 <= R; r += 2) weigh<T, 2>(s + r * TILE + t - first, v, r ? nullptr : next, n, D, o + r * D);
            for (; r < R; r++) weigh<T, 1>(s + r * TILE + t - first, v, r ? nullptr : next, n, D, o + r * D);
        }
    }
}

template <class T>
void write_out(const Problem& a, i64 token, i64 head, const float* o, float l) {
    T* out = (T*)a.out + token * a.out_token + head * a.out_head;
    for (i64 d = 0; d < a.D; d++) from_float(out[d], o[d] / l);
}

// Adds up the runs of one sequence and head: partial[slot] holds m[R], l[R], o[R × D].
template <class T>
void combine(const Problem& a, const Run& run, const float* partial, i64 size) {
    const i64 R = a.H / a.G, D = a.D;
    std::vector<float> o(D);
    for (i64 r = 0; r < R; r++) {
        float m = NEVER, l = 0;
        for (i64 i = 0; i < run.slots; i++) m = std::max(m, partial[i * size + r]);
        std::fill(o.begin(), o.end(), 0.f);
        for (i64 i = 0; i < run.slots; i++) {
            const float* p = partial + i * size;
            const float weight = std::exp(p[r] - m);
            l += weight * p[R + r];
            for (i64 d = 0; d < D; d++) o[d] += weight * p[2 * R + r * D + d];
        }
        write_out<T>(a, a.starts[run.s], run.g * R + r, o.data(), l);
    }
}

// ---- prefill ----------------------------------------------------------------------------------------------------------

// c[i][x] += Σ_j a[i · ai + j · aj] · b[j][x] for `rows` × (V vectors): outer products, no sum across lanes.
template <int I, int V>
inline void multiply(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 J) {
    vf acc[I][V];
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) acc[i][x] = load(c + i * ROWS + x * W);
    for (i64 j = 0; j < J; j++) {
        vf bj[V];
        for (int x = 0; x < V; x++) bj[x] = load(b + j * ROWS + x * W);
        for (int i = 0; i < I; i++) {
            const vf aij = splat(a[i * ai + j * aj]);
            for (int x = 0; x < V; x++) acc[i][x] += aij * bj[x];
        }
    }
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(c + i * ROWS + x * W, acc[i][x]);
}

template <int V>
void multiply_rows(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 I, i64 J) {
    constexpr int N = W == 16 ? 8 : 4;  // N × V sums in registers: 32 of them with AVX-512, else 16
    i64 i = 0;
    for (; i + N <= I; i += N) multiply<N, V>(c + i * ROWS, a + i * ai, ai, aj, b, J);
    for (; i < I; i++) multiply<1, V>(c + i * ROWS, a + i * ai, ai, aj, b, J);
}

void multiply_all(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 I, i64 J, i64 vectors) {
    i64 x = 0;
    for (; x + 2 <= vectors; x += 2) multiply_rows<2>(c + x * W, a, ai, aj, b + x * W, I, J);
    for (; x < vectors; x++) multiply_rows<1>(c + x * W, a, ai, aj, b + x * W, I, J);
}

template <class T>
void widen(const T* from, float* to, i64 count) {
    i64 i = 0;
    for (; i + W <= count; i += W) store(to + i, load(from + i));
    for (; i < count; i++) to[i] = to_float(from[i]);
}

struct Scratch {
    std::vector<float> q, o, k, v, s;
    explicit Scratch(i64 D) : q(D * ROWS), o(D * ROWS), k(D * TILE), v(D * TILE), s(TILE * ROWS) {}
};

template <class T>
void prefill(const Problem& a, const Tile& tile, Scratch& x) {
    const i64 R = a.H / a.G, D = a.D, rows = tile.end - tile.first, vectors = (rows + W - 1) / W;
    const i64 start = a.starts[tile.s], news = a.starts[tile.s + 1] - start, cached = a.kv_lens[tile.s] - news;
    const Rows<T> kv(a, tile.s, tile.g);
    const T* query = (const T*)a.q + start * a.q_token + tile.g * R * a.q_head;
    float m[ROWS], l[ROWS];
    int32_t position[ROWS];  // of the row's token in its sequence
    for (i64 i = 0; i < vectors * W; i++) {
        const i64 row = std::min(tile.first + i, tile.end - 1);  // lanes beyond the tile repeat its last row
        const T* from = query + row / R * a.q_token + row % R * a.q_head;
        for (i64 d = 0; d < D; d++) x.q[d * ROWS + i] = to_float(from[d]);
        position[i] = (int32_t)(cached + row / R);
        m[i] = NEVER;
        l[i] = 0;
    }
    std::fill(x.o.begin(), x.o.end(), 0.f);
    const i64 stop = position[rows - 1] + 1;
    for (i64 first = a.window ? std::max<i64>(0, position[0] + 1 - a.window) : 0; first < stop; first += TILE) {
        const i64 count = std::min<i64>(TILE, stop - first);
        for (i64 t = 0, n; t < count; t += n) {
            n = kv.run(first + t, first + count);
            widen(kv.k(first + t), x.k.data() + t * D, n * D);
            widen(kv.v(first + t), x.v.data() + t * D, n * D);
        }
        for (i64 t = 0; t < count; t++) std::fill_n(x.s.data() + t * ROWS, vectors * W, 0.f);
        multiply_all(x.s.data(), x.k.data(), D, 1, x.q.data(), count, D, vectors);
        for (i64 i = 0; i < vectors * W; i += W) {
            vi at;
            std::memcpy(&at, position + i, sizeof at);
            const vf before = load(m + i);
            vf top = before;
            for (i64 t = 0; t < count; t++) {
                float* s = x.s.data() + t * ROWS + i;
                const vi token = (int32_t)(first + t) - vi{};
                vf score = capped(load(s) * a.scale, a);
                score = token <= at ? score : splat(HIDDEN);
                if (a.window) score = token > at - (int32_t)a.window ? score : splat(HIDDEN);
                store(s, score);
                top = vmax(score, top);
            }
            const vf shrink = exp_(before - top);
            vf total = load(l + i) * shrink;
            for (i64 t = 0; t < count; t++) {
                const vf p = exp_(load(x.s.data() + t * ROWS + i) - top);
                store(x.s.data() + t * ROWS + i, p);
                total += p;
            }
            store(m + i, top);
            store(l + i, total);
            for (i64 d = 0; d < D; d++) store(x.o.data() + d * ROWS + i, load(x.o.data() + d * ROWS + i) * shrink);
        }
        multiply_all(x.o.data(), x.v.data(), 1, D, x.s.data(), D, count, vectors);
    }
    std::vector<float> row(D);
    for (i64 i = 0; i < rows; i++) {
        for (i64 d = 0; d < D; d++) row[d] = x.o[d * ROWS + i];
        write_out<T>(a, start + (tile.first + i) / R, tile.g * R + (tile.first + i) % R, row.data(), l[i]);
    }
}

// ---- tasks ------------------------------------------------------------------------------------------------------------

template <class T>
void attend(const Problem& a, i64 longest_run, bool matrices) {
    const i64 R = a.H / a.G, D = a.D;
    i64 decoding = 0, work = 0;
    std::vector<i64> firsts(a.S);
    for (i64 s = 0; s < a.S; s++) {
        const i64 news = a.starts[s + 1] - a.starts[s];
        firsts[s] = a.window ? std::max<i64>(0, a.kv_lens[s] - a.window) : 0;
        if (news == 1) decoding += (a.kv_lens[s] - firsts[s]) * a.G;
        work += (a.kv_lens[s] - firsts[s]) * a.H * news;
    }
    // Four tasks per thread even out what the system takes from one of them.
    const i64 height = matrices ? amx::height(a.starts[a.S] * a.H / (4 * a.threads)) : ROWS;
    i64 length = longest_run ? longest_run : std::max(SMALLEST_RUN, decoding / (4 * a.threads));
    length = (length + TILE - 1) / TILE * TILE;
    std::vector<Run> runs;
    std::vector<Tile> tiles;
    i64 slots = 0;
    for (i64 s = 0; s < a.S; s++) {
        const i64 news = a.starts[s + 1] - a.starts[s], first = firsts[s], end = a.kv_lens[s];
        const i64 cuts = (end - first + length - 1) / length;
        if (news == 1) {
            for (i64 g = 0; g < a.G; g++)
                for (i64 i = 0; i < cuts; i++)
                    runs.push_back({s, g, first + i * length, std::min(end, first + (i + 1) * length), i, cuts});
        } else {
            for (i64 row = (news * R - 1) / height * height; row >= 0; row -= height)  // those that see most come first
                for (i64 g = 0; g < a.G; g++) tiles.push_back({s, g, row, std::min(row + height, news * R)});
        }
        if (news == 1 && cuts > 1) slots += cuts * a.G;
    }
    const i64 size = 2 * R + R * D;
    std::vector<float> partials(slots * size);
    std::vector<float*> places(runs.size());
    float* place = partials.data();
    for (size_t i = 0; i < runs.size(); i++)
        if (runs[i].slots > 1) places[i] = place, place += size;
    const i64 num_runs = runs.size(), num_tiles = tiles.size();
#pragma omp parallel num_threads((int)a.threads) if (work * D > 1 << 16)
    {
        if (num_tiles && matrices) {
            const amx::Registers registers;
            amx::Scratch scratch(D);
#pragma omp for schedule(dynamic, 1) nowait
            for (i64 i = 0; i < num_tiles; i++) amx::prefill(a, tiles[i], scratch);
        } else if (num_tiles) {
            Scratch scratch(D);
#pragma omp for schedule(dynamic, 1) nowait
            for (i64 i = 0; i < num_tiles; i++) prefill<T>(a, tiles[i], scratch);
        }
        std::vector<float> q(R * D), s(R * TILE), own(size);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < num_runs; i++) {
            float* m = places[i] ? places[i] : own.data();
            decode<T>(a, runs[i], q.data(), s.data(), m, m + R, m + 2 * R);
            if (!places[i])
                for (i64 r = 0; r < R; r++)
                    write_out<T>(a, a.starts[runs[i].s], runs[i].g * R + r, m + 2 * R + r * D, m[R + r]);
        }
        if (slots) {
#pragma omp for schedule(dynamic, 1)
            for (i64 i = 0; i < num_runs; i++)
                if (places[i] && runs[i].slot == 0) combine<T>(a, runs[i], places[i], size);
        }
    }
}

}  // namespace

extern "C" {

// The library has matrix instructions, and the system lets this process use them.
i64 pdserve_amx() { return amx::permitted(); }

// dtype: 0 float32, 1 bfloat16, 2 float16, of query, cache and output. longest_run 0 lets the kernel decide on the split.
// `matrices`: bfloat16 with more than one new token is computed by the processor's matrix instructions, if pdserve_amx().
void pdserve_attend(i64 dtype, void* out, i64 out_token, i64 out_head, const void* q, i64 q_token, i64 q_head,
                    const void* cache, i64 block, i64 half, i64 head, const i64* tables, const i64* starts,
                    const i64* kv_lens, i64 S, i64 H, i64 G, i64 D, i64 B, i64 M, float scale, i64 window, float softcap,
                    i64 longest_run, i64 matrices, i64 threads) {
    const Problem a{out,  q, cache, tables, starts, kv_lens, out_token, out_head, q_token, q_head, block, half,
                    head, S, H,     G,      D,      B,       M,         scale,    softcap, window, threads};
    if (dtype == 0) attend<float>(a, longest_run, false);
    if (dtype == 1) attend<bf16>(a, longest_run, matrices && amx::permitted());
    if (dtype == 2) attend<fp16>(a, longest_run, false);
}

// K and V rows of `row` bytes go to their slots. All strides in bytes.
void pdserve_write_kv(char* cache, i64 block, i64 half, i64 head, const char* k, i64 k_token, i64 k_head, const char* v,
                      i64 v_token, i64 v_head, const i64* slots, i64 T, i64 G, i64 B, i64 row, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (T * G * row > 1 << 18)
    for (i64 t = 0; t < T; t++) {
        char* to = cache + slots[t] / B * block + slots[t] % B * row;
        for (i64 g = 0; g < G; g++) {
            std::memcpy(to + g * head, k + t * k_token + g * k_head, row);
            std::memcpy(to + g * head + half, v + t * v_token + g * v_head, row);
        }
    }
}

// Block sources[i] goes to block targets[i]; without ids, to or from place i. Strides and sizes in bytes.
void pdserve_copy_blocks(char* to, i64 to_stride, const i64* targets, const char* from, i64 from_stride,
                         const i64* sources, i64 count, i64 bytes, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (count * bytes > 1 << 18)
    for (i64 i = 0; i < count; i++)
        std::memcpy(to + (targets ? targets[i] : i) * to_stride, from + (sources ? sources[i] : i) * from_stride, bytes);
}

}  // extern "C"
