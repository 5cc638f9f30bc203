// Paged attention for CPUs: writes K and V into the pool's blocks, attends directly to them, copies blocks.
// The C interface needs no torch headers, so that it compiles in seconds. native.py builds it, cpu.py calls it.
//
// Softmax is online (Milakov & Gimelshein 2018): a running maximum m, a running sum l, and an output o that is rescaled when m
// grows. All sums are float32, whatever the type of the KV.
//
// Decode (one new token): a task is a range of KV of one sequence and key/value head, read once for all query heads that share
// it. Vector lanes run along the head, so that K and V are read in the order of the pool. The next rows are prefetched, since
// blocks are far apart in memory; a few lines with every product, because many at once would delay the products. Long ranges
// are split into several tasks whose (m, l, o) are combined afterwards (flash-decoding, Dao et al. 2023).
// Prefill (more new tokens): a task is a tile of query rows (token × query head) of one key/value head. Vector lanes run along
// the query rows, so that neither the products nor the softmax sum across lanes (after FlashAttention-2, Dao 2023). bfloat16
// uses amx.h where AMX is available.
//
// Shape legend: see problem.h.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "problem.h"
#include "vectors.h"

namespace {

constexpr int KV_TILE = 64;      // KV tokens per update of the output
constexpr int ROW_TILE = 4 * W;  // query rows of a prefill task
constexpr i64 MIN_SPLIT = 256;   // KV tokens: combining shorter splits costs more than a thread gains

// ---- decode -----------------------------------------------------------------------------------------------------------

// KV tokens [first, end) of one sequence and head: split number `index` of `count`.
struct Split { i64 s, g, first, end, index, count; };

template <class T>
inline void prefetch(const T* row, i64 D) {
    for (const char *p = (const char*)row, *e = (const char*)(row + D); p < e; p += 64) __builtin_prefetch(p, 0, 2);
}

// s[r][t] = q[r] · k[t] for N query rows and `count` contiguous tokens. Prefetches the V rows.
template <class T, int N>
void qk_dot(const float* q, const T* k, const T* v, i64 count, i64 D, float* s) {
    constexpr int Z = 4;  // tokens per iteration: N × Z sums in registers
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
            sum4(acc[r], s + r * KV_TILE + t);
            for (int z = 0; z < Z; z++)
                for (i64 d = full; d < D; d++) s[r * KV_TILE + t + z] += q[r * D + d] * to_float(k[(t + z) * D + d]);
        }
    }
    for (; t < count; t++)
        for (int r = 0; r < N; r++) {
            vf acc = {};
            for (i64 d = 0; d < full; d += W) acc += load(q + r * D + d) * load(k + t * D + d);
            float x = sum(acc);
            for (i64 d = full; d < D; d++) x += q[r * D + d] * to_float(k[t * D + d]);
            s[r * KV_TILE + t] = x;
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
                for (int z = 0; z < Z; z++) acc[r][z] += p[r * KV_TILE + t] * vd[z];
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
            for (int r = 0; r < N; r++) acc[r] += p[r * KV_TILE + t] * vd;
        }
        for (int r = 0; r < N; r++) store(o + r * D + d, acc[r]);
    }
    for (; d < D; d++)
        for (i64 t = 0; t < count; t++)
            for (int r = 0; r < N; r++) o[r * D + d] += p[r * KV_TILE + t] * to_float(v[t * D + d]);
}

// Turn the scores of one tile and row into unnormalised probabilities and update m and l. Returns the rescaling factor of o.
inline float online_softmax(float* s, i64 count, const Problem& a, float& m, float& l) {
    for (i64 t = count; t < (count + W - 1) / W * W; t++) s[t] = MASKED;
    float m_new = m;
    for (i64 t = 0; t < count; t += W) store(s + t, apply_softcap(load(s + t) * a.scale, a));
    for (i64 t = count; t < (count + W - 1) / W * W; t++) s[t] = MASKED;
#pragma omp simd reduction(max : m_new)
    for (i64 t = 0; t < count; t++) m_new = std::max(m_new, s[t]);
    vf total = {};
    for (i64 t = 0; t < count; t += W) {
        const vf p = exp_(load(s + t) - m_new);
        store(s + t, p);
        total += p;
    }
    const float rescale = std::exp(m - m_new);
    m = m_new;
    l = l * rescale + sum(total);
    return rescale;
}

template <class T>
void decode(const Problem& a, const Split& split, float* q, float* s, float* m, float* l, float* o) {
    const i64 R = a.H / a.G, D = a.D;
    const PagedKV<T> kv(a, split.s, split.g);
    const T* query = (const T*)a.q + a.starts[split.s] * a.q_token + split.g * R * a.q_head;
    for (i64 r = 0; r < R; r++) {
        for (i64 d = 0; d < D; d++) q[r * D + d] = to_float(query[r * a.q_head + d]);
        m[r] = MIN_SCORE;
        l[r] = 0;
    }
    std::fill_n(o, R * D, 0.f);
    for (i64 first = split.first; first < split.end; first += KV_TILE) {
        const i64 end = std::min(first + KV_TILE, split.end);
        for (i64 t = first, n; t < end; t += n) {
            n = kv.contiguous(t, end);
            const T *k = kv.k(t), *v = kv.v(t);
            i64 r = 0;
            for (; r + 4 <= R; r += 4) qk_dot<T, 4>(q + r * D, k, v, n, D, s + r * KV_TILE + t - first);
            for (; r + 2 <= R; r += 2) qk_dot<T, 2>(q + r * D, k, v, n, D, s + r * KV_TILE + t - first);
            for (; r < R; r++) qk_dot<T, 1>(q + r * D, k, v, n, D, s + r * KV_TILE + t - first);
        }
        for (i64 r = 0; r < R; r++) {
            const float rescale = online_softmax(s + r * KV_TILE, end - first, a, m[r], l[r]);
            if (rescale != 1.f)
                for (i64 d = 0; d < D; d++) o[r * D + d] *= rescale;
        }
        for (i64 t = first, n; t < end; t += n) {
            n = kv.contiguous(t, end);
            const T* v = kv.v(t);
            const bool prefetches = t + KV_TILE + n <= split.end && kv.contiguous(t + KV_TILE, split.end) >= n;
            const T* next_k = prefetches ? kv.k(t + KV_TILE) : nullptr;
            i64 r = 0;
            for (; r + 4 <= R; r += 4)
                accumulate_pv<T, 4>(s + r * KV_TILE + t - first, v, r ? nullptr : next_k, n, D, o + r * D);
            for (; r + 2 <= R; r += 2)
                accumulate_pv<T, 2>(s + r * KV_TILE + t - first, v, r ? nullptr : next_k, n, D, o + r * D);
            for (; r < R; r++)
                accumulate_pv<T, 1>(s + r * KV_TILE + t - first, v, r ? nullptr : next_k, n, D, o + r * D);
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
    std::vector<float> o(D);
    for (i64 r = 0; r < R; r++) {
        float m = MIN_SCORE, l = 0;
        for (i64 i = 0; i < split.count; i++) m = std::max(m, partial[i * size + r]);
        std::fill(o.begin(), o.end(), 0.f);
        for (i64 i = 0; i < split.count; i++) {
            const float* p = partial + i * size;
            const float weight = std::exp(p[r] - m);
            l += weight * p[R + r];
            for (i64 d = 0; d < D; d++) o[d] += weight * p[2 * R + r * D + d];
        }
        write_out<T>(a, a.starts[split.s], split.g * R + r, o.data(), l);
    }
}

// ---- prefill ----------------------------------------------------------------------------------------------------------

// c[i][x] += Σ_j a[i · ai + j · aj] · b[j][x] for I rows × V vectors, as outer products: no sum across lanes.
template <int I, int V>
inline void multiply(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 J) {
    vf acc[I][V];
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) acc[i][x] = load(c + i * ROW_TILE + x * W);
    for (i64 j = 0; j < J; j++) {
        vf bj[V];
        for (int x = 0; x < V; x++) bj[x] = load(b + j * ROW_TILE + x * W);
        for (int i = 0; i < I; i++) {
            const vf aij = splat(a[i * ai + j * aj]);
            for (int x = 0; x < V; x++) acc[i][x] += aij * bj[x];
        }
    }
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(c + i * ROW_TILE + x * W, acc[i][x]);
}

template <int V>
void multiply_rows(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 I, i64 J) {
    constexpr int N = W == 16 ? 8 : 4;  // N × V sums in registers, of which AVX-512 has 32, others 16
    i64 i = 0;
    for (; i + N <= I; i += N) multiply<N, V>(c + i * ROW_TILE, a + i * ai, ai, aj, b, J);
    for (; i < I; i++) multiply<1, V>(c + i * ROW_TILE, a + i * ai, ai, aj, b, J);
}

void multiply_all(float* c, const float* a, i64 ai, i64 aj, const float* b, i64 I, i64 J, i64 vectors) {
    i64 x = 0;
    for (; x + 2 <= vectors; x += 2) multiply_rows<2>(c + x * W, a, ai, aj, b + x * W, I, J);
    for (; x < vectors; x++) multiply_rows<1>(c + x * W, a, ai, aj, b + x * W, I, J);
}

template <class T>
void widen(const T* source, float* target, i64 count) {
    i64 i = 0;
    for (; i + W <= count; i += W) store(target + i, load(source + i));
    for (; i < count; i++) target[i] = to_float(source[i]);
}

struct Scratch {
    std::vector<float> q, o, k, v, s;
    explicit Scratch(i64 D) : q(D * ROW_TILE), o(D * ROW_TILE), k(D * KV_TILE), v(D * KV_TILE), s(KV_TILE * ROW_TILE) {}
};

template <class T>
void prefill(const Problem& a, const Tile& tile, Scratch& x) {
    const i64 R = a.H / a.G, D = a.D, rows = tile.end - tile.first, vectors = (rows + W - 1) / W;
    const i64 start = a.starts[tile.s], query_len = a.starts[tile.s + 1] - start, cached = a.kv_lens[tile.s] - query_len;
    const PagedKV<T> kv(a, tile.s, tile.g);
    const T* query = (const T*)a.q + start * a.q_token + tile.g * R * a.q_head;
    float m[ROW_TILE], l[ROW_TILE];
    int32_t position[ROW_TILE];  // position of the row's token in its sequence
    for (i64 i = 0; i < vectors * W; i++) {
        const i64 row = std::min(tile.first + i, tile.end - 1);  // lanes beyond the tile repeat its last row
        const T* source = query + row / R * a.q_token + row % R * a.q_head;
        for (i64 d = 0; d < D; d++) x.q[d * ROW_TILE + i] = to_float(source[d]);
        position[i] = (int32_t)(cached + row / R);
        m[i] = MIN_SCORE;
        l[i] = 0;
    }
    std::fill(x.o.begin(), x.o.end(), 0.f);
    const i64 stop = position[rows - 1] + 1;
    for (i64 first = a.window ? std::max<i64>(0, position[0] + 1 - a.window) : 0; first < stop; first += KV_TILE) {
        const i64 count = std::min<i64>(KV_TILE, stop - first);
        for (i64 t = 0, n; t < count; t += n) {
            n = kv.contiguous(first + t, first + count);
            widen(kv.k(first + t), x.k.data() + t * D, n * D);
            widen(kv.v(first + t), x.v.data() + t * D, n * D);
        }
        for (i64 t = 0; t < count; t++) std::fill_n(x.s.data() + t * ROW_TILE, vectors * W, 0.f);
        multiply_all(x.s.data(), x.k.data(), D, 1, x.q.data(), count, D, vectors);
        for (i64 i = 0; i < vectors * W; i += W) {
            vi query_position;
            std::memcpy(&query_position, position + i, sizeof query_position);
            const vf m_old = load(m + i);
            vf m_new = m_old;
            for (i64 t = 0; t < count; t++) {
                float* s = x.s.data() + t * ROW_TILE + i;
                const vi token = (int32_t)(first + t) - vi{};
                vf score = apply_softcap(load(s) * a.scale, a);
                score = token <= query_position ? score : splat(MASKED);
                if (a.window) score = token > query_position - (int32_t)a.window ? score : splat(MASKED);
                store(s, score);
                m_new = vmax(score, m_new);
            }
            const vf rescale = exp_(m_old - m_new);
            vf total = load(l + i) * rescale;
            for (i64 t = 0; t < count; t++) {
                const vf p = exp_(load(x.s.data() + t * ROW_TILE + i) - m_new);
                store(x.s.data() + t * ROW_TILE + i, p);
                total += p;
            }
            store(m + i, m_new);
            store(l + i, total);
            for (i64 d = 0; d < D; d++) store(x.o.data() + d * ROW_TILE + i, load(x.o.data() + d * ROW_TILE + i) * rescale);
        }
        multiply_all(x.o.data(), x.v.data(), 1, D, x.s.data(), D, count, vectors);
    }
    std::vector<float> row(D);
    for (i64 i = 0; i < rows; i++) {
        for (i64 d = 0; d < D; d++) row[d] = x.o[d * ROW_TILE + i];
        write_out<T>(a, start + (tile.first + i) / R, tile.g * R + (tile.first + i) % R, row.data(), l[i]);
    }
}

// ---- tasks ------------------------------------------------------------------------------------------------------------

template <class T>
void attend(const Problem& a, i64 max_split, bool use_amx) {
    const i64 R = a.H / a.G, D = a.D;
    i64 decode_tokens = 0, work = 0;
    std::vector<i64> window_starts(a.S);
    for (i64 s = 0; s < a.S; s++) {
        const i64 query_len = a.starts[s + 1] - a.starts[s];
        window_starts[s] = a.window ? std::max<i64>(0, a.kv_lens[s] - a.window) : 0;
        if (query_len == 1) decode_tokens += (a.kv_lens[s] - window_starts[s]) * a.G;
        work += (a.kv_lens[s] - window_starts[s]) * a.H * query_len;
    }
    // Four tasks per thread balance the load if the system preempts a thread.
    const i64 tile_rows = use_amx ? amx::tile_rows(a.starts[a.S] * a.H / (4 * a.threads)) : ROW_TILE;
    i64 split_length = max_split ? max_split : std::max(MIN_SPLIT, decode_tokens / (4 * a.threads));
    split_length = (split_length + KV_TILE - 1) / KV_TILE * KV_TILE;
    std::vector<Split> splits;
    std::vector<Tile> tiles;
    i64 num_partials = 0;
    for (i64 s = 0; s < a.S; s++) {
        const i64 query_len = a.starts[s + 1] - a.starts[s], first = window_starts[s], end = a.kv_lens[s];
        const i64 num_pieces = (end - first + split_length - 1) / split_length;
        if (query_len == 1) {
            for (i64 g = 0; g < a.G; g++)
                for (i64 i = 0; i < num_pieces; i++)
                    splits.push_back({s, g, first + i * split_length, std::min(end, first + (i + 1) * split_length), i,
                                      num_pieces});
        } else {
            for (i64 row = (query_len * R - 1) / tile_rows * tile_rows; row >= 0; row -= tile_rows)  // longest tasks first
                for (i64 g = 0; g < a.G; g++) tiles.push_back({s, g, row, std::min(row + tile_rows, query_len * R)});
        }
        if (query_len == 1 && num_pieces > 1) num_partials += num_pieces * a.G;
    }
    const i64 size = 2 * R + R * D;
    std::vector<float> partials(num_partials * size);
    std::vector<float*> partial_of(splits.size());
    float* next_partial = partials.data();
    for (size_t i = 0; i < splits.size(); i++)
        if (splits[i].count > 1) partial_of[i] = next_partial, next_partial += size;
    const i64 num_splits = splits.size(), num_tiles = tiles.size();
#pragma omp parallel num_threads((int)a.threads) if (work * D > 1 << 16)
    {
        if (num_tiles && use_amx) {
            const amx::TileConfig tile_config;
            amx::Scratch scratch(D);
#pragma omp for schedule(dynamic, 1) nowait
            for (i64 i = 0; i < num_tiles; i++) amx::prefill(a, tiles[i], scratch);
        } else if (num_tiles) {
            Scratch scratch(D);
#pragma omp for schedule(dynamic, 1) nowait
            for (i64 i = 0; i < num_tiles; i++) prefill<T>(a, tiles[i], scratch);
        }
        std::vector<float> q(R * D), s(R * KV_TILE), own(size);
#pragma omp for schedule(dynamic, 1)
        for (i64 i = 0; i < num_splits; i++) {
            float* m = partial_of[i] ? partial_of[i] : own.data();
            decode<T>(a, splits[i], q.data(), s.data(), m, m + R, m + 2 * R);
            if (!partial_of[i])
                for (i64 r = 0; r < R; r++)
                    write_out<T>(a, a.starts[splits[i].s], splits[i].g * R + r, m + 2 * R + r * D, m[R + r]);
        }
        if (num_partials) {
#pragma omp for schedule(dynamic, 1)
            for (i64 i = 0; i < num_splits; i++)
                if (partial_of[i] && splits[i].index == 0) combine<T>(a, splits[i], partial_of[i], size);
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
    if (a->dtype == 0) attend<float>(*a, a->max_split, false);
    if (a->dtype == 1) attend<bf16>(*a, a->max_split, a->use_amx && amx::is_permitted());
    if (a->dtype == 2) attend<fp16>(*a, a->max_split, false);
}

// Copy K and V rows of `row` bytes to their slots. All strides in bytes.
void pdserve_write_kv(char* cache, i64 block, i64 half, i64 head, const char* k, i64 k_token, i64 k_head, const char* v,
                      i64 v_token, i64 v_head, const i64* slots, i64 T, i64 G, i64 B, i64 row, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (T * G * row > 1 << 18)
    for (i64 t = 0; t < T; t++) {
        char* target = cache + slots[t] / B * block + slots[t] % B * row;
        for (i64 g = 0; g < G; g++) {
            std::memcpy(target + g * head, k + t * k_token + g * k_head, row);
            std::memcpy(target + g * head + half, v + t * v_token + g * v_head, row);
        }
    }
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
