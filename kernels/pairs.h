// Attention in bfloat16 by AVX-512's products of pairs (vdpbf16ps), without AMX, for prefill and decode.
//
// As in paged.cpp, vector lanes run along the head in decode and along the query rows in prefill, and both phases round alike:
//   - q · k is 16 sums of products of pairs, over the pairs j, j + 16, … of the head, which are then added by halves (`sum`);
//   - tiles of KV_TILE tokens and splits of SPLIT are counted from token 0. The running maximum m is within MAX_LOG2_WEIGHT, and
//     the weights p are powers of two; l adds those of a tile as 16 sums over the tokens t ≡ j (mod 16), by halves;
//   - o adds the products p · v of pairs of tokens, with p rounded to bfloat16.
// V is interleaved by pairs of tokens with unpacklo and unpackhi, so sums of 32 elements of the head are in the order of those
// until they are stored. K is read where it lies.

#pragma once

#include "bfloat16.h"
#include "tiles.h"

#ifdef PDSERVE_BFLOAT16

namespace pairs {
namespace {

constexpr i64 LINE = 32;  // elements of a vector
constexpr i64 KV_TILE = 64, ROW_TILE = 64, SPLIT = 512;

inline bool supports(const Problem& a) { return a.D % LINE == 0; }

inline vf add_products(vf sum, __m512i x, __m512i y) { return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)y); }
inline __m512i splat_pair(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}

// Addresses of K of the tokens of a tile. Those before the first visible one and after the last repeat it: no other may be read.
struct Rows {
    const bf16* k[KV_TILE];
    i64 tile, first, end;  // the tile's first token; [first, end) are visible, counted from it

    // The tile that contains token `from`, up to token `stop`.
    void load(const PagedKV<bf16>& kv, i64 from, i64 stop) {
        tile = from / KV_TILE * KV_TILE, first = from - tile, end = std::min(KV_TILE, stop - tile);
        for (i64 t = first, n; t < end; t += n) {
            n = kv.contiguous(tile + t, tile + end);
            const bf16* const row = kv.k(tile + t);
            for (i64 i = 0; i < n; i++) k[t + i] = row + i * kv.a.D;
        }
        std::fill_n(k, first, k[first]);
        std::fill(k + end, k + padded_end(), k[end - 1]);
    }
    i64 padded_end() const { return (end + W - 1) / W * W; }
};

inline void prefetch(const bf16* p, i64 elements) {
    for (i64 i = 0; i < elements; i += LINE) _mm_prefetch(p + i, _MM_HINT_T1);
}

// ---- decode -----------------------------------------------------------------------------------------------------------

// s[r][t] = q[r] · k[t] for N query rows and the tokens [begin, end), multiples of 4. Prefetches their V.
template <int N>
void score(const Problem& a, const Rows& rows, i64 begin, i64 end, const bf16* q, float* s) {
    constexpr int Z = 4;
    for (i64 t = begin; t < end; t += Z) {
        vf sums[N][Z] = {};
        for (i64 d = 0; d < a.D; d += LINE) {
            __m512i k[Z];
#pragma GCC unroll 4
            for (int z = 0; z < Z; z++) {
                k[z] = _mm512_loadu_si512(rows.k[t + z] + d);
                prefetch(rows.k[t + z] + a.half + d, LINE);
            }
            for (int r = 0; r < N; r++) {
                const __m512i query = _mm512_loadu_si512(q + r * a.q_head + d);
#pragma GCC unroll 4
                for (int z = 0; z < Z; z++) sums[r][z] = add_products(sums[r][z], query, k[z]);
            }
        }
        for (int r = 0; r < N; r++) sum4(sums[r], s + r * KV_TILE + t);
    }
}

// Turn the scores of one row and tile into weights p, and update m and l. Returns the rescaling factor of o.
inline float weigh(const Problem& a, const Rows& rows, float* s, bf16* p, float& m, float& l) {
    const i64 stop = rows.padded_end();
    for (i64 t = 0; a.softcap > 0 && t < stop; t += W) store(s + t, apply_softcap(load(s + t) * a.scale, a));
    std::fill(s, s + rows.first, MASKED);
    std::fill(s + rows.end, s + stop, MASKED);
    __m512 largest = _mm512_loadu_ps(s);
    for (i64 t = W; t < stop; t += W) largest = _mm512_max_ps(_mm512_loadu_ps(s + t), largest);
    const float factor = exponent_factor(a), tile_max = factor * _mm512_reduce_max_ps(largest);
    float rescale = 1;
    if (tile_max > m + MAX_LOG2_WEIGHT) {
        rescale = ((vf)exp2_(_mm512_set1_ps(m - tile_max)))[0];
        m = tile_max;
    }
    vf total = {};
    for (i64 t = 0; t < stop; t += W) {
        const __m512 weight = exp2_(_mm512_fmsub_ps(_mm512_loadu_ps(s + t), _mm512_set1_ps(factor), _mm512_set1_ps(m)));
        total += (vf)weight;
        store(p + t, (vf)weight);
    }
    l = mul_add(l, rescale, sum(total));
    return rescale;
}

// o[r] += Σ p[r][t] · v[t] for N query rows, Z vectors of sums at a time, an even number. Prefetches K of `next`, if any.
template <int N, int Z>
void add_values(const Problem& a, const Rows& rows, const bf16* p, float* o, i64 d, const Rows* next) {
    vf sums[N][Z];
    for (int r = 0; r < N; r++)
        for (int z = 0; z < Z; z++) sums[r][z] = load(o + r * a.D + d + z * W);
    for (i64 t = rows.first / 2 * 2; t < rows.end; t += 2) {
        const bf16 *const even = rows.k[t] + a.half + d, *const odd = rows.k[t + 1] + a.half + d;
        if (next) prefetch(next->k[t] + d, Z * W), prefetch(next->k[t + 1] + d, Z * W);
        __m512i weights[N];
        for (int r = 0; r < N; r++) weights[r] = splat_pair(p + r * KV_TILE + t);
#pragma GCC unroll 4
        for (int z = 0; z < Z; z += 2) {
            const __m512i x = _mm512_loadu_si512(even + z * W), y = _mm512_loadu_si512(odd + z * W);
            const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
            for (int r = 0; r < N; r++) {
                sums[r][z] = add_products(sums[r][z], weights[r], low);
                sums[r][z + 1] = add_products(sums[r][z + 1], weights[r], high);
            }
        }
    }
    for (int r = 0; r < N; r++)
        for (int z = 0; z < Z; z++) store(o + r * a.D + d + z * W, sums[r][z]);
}

template <int N>
void add_all_values(const Problem& a, const Rows& rows, const bf16* p, float* o, const Rows* next) {
    constexpr int Z = N == 4 ? 4 : 8;  // N × Z sums in registers
    i64 d = 0;
    for (; d + Z * W <= a.D; d += Z * W) add_values<N, Z>(a, rows, p, o, d, next);
    for (; d < a.D; d += LINE) add_values<N, 2>(a, rows, p, o, d, next);
}

// Call f<N>(r) for all rows of a key/value head, N at a time.
template <class F>
void for_rows(i64 R, const F& f) {
    i64 r = 0;
    for (; r + 4 <= R; r += 4) f(std::integral_constant<int, 4>(), r);
    for (; r + 2 <= R; r += 2) f(std::integral_constant<int, 2>(), r);
    for (; r < R; r++) f(std::integral_constant<int, 1>(), r);
}

// Attention of one token's rows over one split, with the result m[R], l[R], o[R × D]. `next` is the thread's next split, if known.
inline void decode(const Problem& a, const Split& split, const Split* next, float* s, bf16* p, float* partial) {
    const i64 R = a.H / a.G, D = a.D;
    float *const m = partial, *const l = m + R, *const o = l + R;
    std::fill_n(m, R, MIN_SCORE);
    std::fill_n(l, R + R * D, 0.f);
    const PagedKV<bf16> kv(a, split.s, split.g);
    const bf16* const q = (const bf16*)a.q + a.starts[split.s] * a.q_token + split.g * R * a.q_head;
    Rows buffers[2], *rows = buffers, *ahead = buffers + 1;
    rows->load(kv, split.first, split.end);
    for (i64 end = split.first; end < split.end;) {
        end = rows->tile + rows->end;
        const bool prefetches = end < split.end || next;
        if (end < split.end) ahead->load(kv, end, split.end);
        else if (next) ahead->load(PagedKV<bf16>(a, next->s, next->g), next->first, next->end);
        // The tokens of the next tile that this one has too.
        const bool fits = prefetches && ahead->first <= rows->first && ahead->padded_end() >= rows->padded_end();
        for_rows(R, [&](auto n, i64 r) {
            score<n.value>(a, *rows, rows->first / 4 * 4, rows->padded_end(), q + r * a.q_head, s + r * KV_TILE);
        });
        for (i64 r = 0; r < R; r++) {
            const float rescale = weigh(a, *rows, s + r * KV_TILE, p + r * KV_TILE, m[r], l[r]);
            for (i64 d = 0; rescale != 1 && d < D; d += W) store(o + r * D + d, load(o + r * D + d) * rescale);
        }
        for_rows(R, [&](auto n, i64 r) {
            add_all_values<n.value>(a, *rows, p + r * KV_TILE, o + r * D, fits && r == 0 ? ahead : nullptr);
        });
        std::swap(rows, ahead);
    }
}

// Combine the splits of one sequence and head, of which each has m[R], l[R], o[R × D].
inline void combine(const Problem& a, const Split& split, const float* partial, i64 size, float* total) {
    const i64 R = a.H / a.G, D = a.D;
    for (i64 r = 0; r < R; r++) {
        float first_m, first_l;
        begin_row(a, split.g * R + r, LOG2_E, first_m, first_l);
        __m512 m = _mm512_set1_ps(first_m), l = _mm512_set1_ps(first_l);
        std::fill_n(total, D, 0.f);
        for (i64 i = 0; i < split.count; i++) {
            const float *const p = partial + i * size, *const o = p + 2 * R + r * D;
            const __m512 m_split = _mm512_set1_ps(p[r]), m_new = _mm512_max_ps(m, m_split);
            const vf old_weight = (vf)split_weight(m, m_new), weight = (vf)split_weight(m_split, m_new);
            l = (__m512)mul_add((vf)l, old_weight, p[R + r] * weight);
            for (i64 d = 0; d < D; d += W) store(total + d, mul_add(load(total + d), old_weight, load(o + d) * weight));
            m = m_new;
        }
        const __m512 inverse_l = _mm512_div_ps(_mm512_set1_ps(1), l);
        bf16* const out = (bf16*)a.out + a.starts[split.s] * a.out_token + (split.g * R + r) * a.out_head;
        for (i64 d = 0; d < D; d += LINE)
            store_in_order(out + d, inverse_l * _mm512_loadu_ps(total + d), inverse_l * _mm512_loadu_ps(total + d + W));
    }
}

// ---- prefill ----------------------------------------------------------------------------------------------------------

// Buffers of one thread: q[D / 2][ROW_TILE] pairs, v[D / 16][KV_TILE / 2][16] pairs, p[KV_TILE / 2][ROW_TILE] pairs, scores
// s[KV_TILE][ROW_TILE], and o[D][ROW_TILE] of the current split and in total of those before it.
struct Scratch {
    const amx::Buffer<bf16> q, v, p;
    const amx::Buffer<float> s, o, total_o;
    alignas(64) float m[ROW_TILE], l[ROW_TILE], rescale[ROW_TILE], total_m[ROW_TILE], total_l[ROW_TILE];
    alignas(64) int32_t positions[ROW_TILE];  // of each row's token in its sequence
    explicit Scratch(i64 D)
        : q(D * ROW_TILE), v(D * KV_TILE), p(KV_TILE * ROW_TILE), s(KV_TILE * ROW_TILE), o(D * ROW_TILE),
          total_o(D * ROW_TILE) {}
};

// Rows beyond the tile repeat its last.
inline void load_queries(const Problem& a, const Tile& tile, i64 vectors, Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s], cached = a.kv_lens[tile.s] - (a.starts[tile.s + 1] - start);
    const bf16* const query = (const bf16*)a.q + start * a.q_token + tile.g * R * a.q_head;
    for (i64 i = 0; i < vectors * W; i += W) {
        const bf16* source[W];
        for (i64 j = 0; j < W; j++) {
            const i64 row = std::min(tile.first + i + j, tile.end - 1);
            source[j] = query + row / R * a.q_token + row % R * a.q_head;
            x.positions[i + j] = (int32_t)(cached + row / R);
            begin_row(a, tile.g * R + row % R, LOG2_E, x.total_m[i + j], x.total_l[i + j]);
        }
        for (i64 d = 0; d < a.D; d += LINE) {
            __m512 words[W];
            for (i64 j = 0; j < W; j++) words[j] = _mm512_loadu_ps(source[j] + d);
            transpose(words);
            for (i64 j = 0; j < W; j++) _mm512_store_ps(x.q + (d / 2 + j) * 2 * ROW_TILE + 2 * i, words[j]);
        }
    }
}

// s[t][x] = k[t] · q[x] for I tokens × V vectors of rows, rounded as in decode: L of the 16 sums at a time.
template <int I, int V, int L>
inline void score(float* s, const bf16* const* k, const bf16* q, i64 D) {
    vf waiting[5][I][V];
    int level = 0;
#pragma GCC unroll 16
    for (int n = 0; n < W; n += L) {
        vf sums[L][I][V] = {};
        for (i64 d = 0; d < D; d += LINE)
#pragma GCC unroll 4
            for (int j = 0; j < L; j++) {
                const i64 pair = d + 2 * bit_reversed(n + j);
                __m512i query[V];
                for (int x = 0; x < V; x++) query[x] = _mm512_load_si512(q + pair * ROW_TILE + 2 * x * W);
                for (int i = 0; i < I; i++) {
                    const __m512i key = splat_pair(k[i] + pair);
                    for (int x = 0; x < V; x++) sums[j][i][x] = add_products(sums[j][i][x], key, query[x]);
                }
            }
        for (int half = 1; half < L; half *= 2)
            for (int j = 0; j < L; j += 2 * half)
                for (int i = 0; i < I; i++)
                    for (int x = 0; x < V; x++) sums[j][i][x] += sums[j + half][i][x];
        for (level = 0; n / L >> level & 1; level++)
            for (int i = 0; i < I; i++)
                for (int x = 0; x < V; x++) sums[0][i][x] += waiting[level][i][x];
        for (int i = 0; i < I; i++)
            for (int x = 0; x < V; x++) waiting[level][i][x] = sums[0][i][x];
    }
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(s + i * ROW_TILE + x * W, waiting[level][i][x]);
}

// Turn the scores of a tile for 16 rows, from row i on, into weights p. Updates m, l and the rescaling factor of o. `masks`
// tells whether some row does not see some token.
inline void weigh(const Problem& a, const Rows& rows, Scratch& x, i64 i, bool masks) {
    const i64 stop = rows.padded_end();
    const __m512i position = _mm512_load_si512(x.positions + i), window = _mm512_set1_epi32(a.window ? (int)a.window : INT32_MAX);
    __m512 largest = _mm512_set1_ps(MASKED);
    for (i64 t = 0; t < stop; t++) {
        float* const s = x.s + t * ROW_TILE + i;
        __m512 score = _mm512_load_ps(s);
        if (a.softcap > 0) score = (__m512)apply_softcap((vf)score * a.scale, a);
        if (masks || t >= rows.end) {
            const __m512i distance = _mm512_sub_epi32(position, _mm512_set1_epi32((int)(rows.tile + t)));
            const __mmask16 visible = _mm512_cmplt_epi32_mask(distance, window) & ~_mm512_movepi32_mask(distance);
            score = _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), visible, score);
        }
        if (masks || a.softcap > 0 || t >= rows.end) _mm512_store_ps(s, score);
        largest = _mm512_max_ps(score, largest);
    }
    const __m512 factor = _mm512_set1_ps(exponent_factor(a)), tile_max = _mm512_mul_ps(factor, largest);
    const __m512 m_old = _mm512_load_ps(x.m + i);
    const __mmask16 raised = is_raised(tile_max, m_old);
    const __m512 m = _mm512_mask_mov_ps(m_old, raised, tile_max);
    const __m512 rescale = raised ? rescaling(m_old, m, raised) : _mm512_set1_ps(1);
    vf totals[W] = {};
    for (i64 group = 0; group < stop; group += W)
#pragma GCC unroll 8
        for (i64 j = 0; j < W; j += 2) {
            const float* const s = x.s + (group + j) * ROW_TILE + i;
            const __m512 even = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s), factor, m));
            const __m512 odd = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + ROW_TILE), factor, m));
            totals[j] += (vf)even;
            totals[j + 1] += (vf)odd;
            _mm512_store_si512(x.p + (group + j) * ROW_TILE + 2 * i, pairs_of(even, odd));
        }
    for (int n = W / 2; n; n /= 2)
        for (int j = 0; j < n; j++) totals[j] += totals[j + n];
    _mm512_store_ps(x.m + i, m);
    _mm512_store_ps(x.rescale + i, rescale);
    store(x.l + i, mul_add(load(x.l + i), (vf)rescale, totals[0]));
}

// o[d][x] = o[d][x] · rescale[x] + Σ_t v[t][d] · p[t][x] for I sums of the head × V vectors of rows.
template <int I, int V>
inline void add_values(float* o, const float* rescale, const bf16* v, const bf16* p, i64 count) {
    vf sums[I][V];
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) sums[i][x] = load(o + i * ROW_TILE + x * W) * load(rescale + x * W);
    for (i64 t = 0; t < count; t += 2) {
        __m512i weights[V];
        for (int x = 0; x < V; x++) weights[x] = _mm512_load_si512(p + t * ROW_TILE + 2 * x * W);
#pragma GCC unroll 8
        for (int i = 0; i < I; i++) {
            const __m512i value = splat_pair(v + t * W + 2 * i);
            for (int x = 0; x < V; x++) sums[i][x] = add_products(sums[i][x], value, weights[x]);
        }
    }
    for (int i = 0; i < I; i++)
        for (int x = 0; x < V; x++) store(o + i * ROW_TILE + x * W, sums[i][x]);
}

// Attend from the loaded rows to the visible ones of the tokens of a tile.
inline void attend_tile(const Problem& a, const Rows& rows, i64 vectors, Scratch& x) {
    const i64 stop = rows.padded_end(), first_position = x.positions[0], last_position = x.positions[vectors * W - 1];
    for (i64 i = 0; i < vectors; i++)
        for (i64 t = 0; t < stop; t += 8) score<8, 1, 2>(x.s + t * ROW_TILE + i * W, rows.k + t, x.q + 2 * i * W, a.D);
    const bool masks = rows.tile + rows.end - 1 > first_position || (a.window && rows.tile + a.window <= last_position);
    for (i64 i = 0; i < vectors; i++) weigh(a, rows, x, i * W, masks);
    for (i64 t = 0; t < stop; t += 2)
        for (i64 d = 0; d < a.D; d += LINE) {
            const __m512i even = _mm512_loadu_si512(rows.k[t] + a.half + d), odd = _mm512_loadu_si512(rows.k[t + 1] + a.half + d);
            bf16* const target = x.v + d * KV_TILE + t * W;
            _mm512_store_si512(target, _mm512_unpacklo_epi16(even, odd));
            _mm512_store_si512(target + W * KV_TILE, _mm512_unpackhi_epi16(even, odd));
        }
    for (i64 i = 0; i < vectors; i += 2)
        for (i64 d = 0; d < a.D; d += 8) {
            float *const o = x.o + d * ROW_TILE + i * W, *const rescale = x.rescale + i * W;
            const bf16 *const v = x.v + d / W * W * KV_TILE + d % W * 2, *const p = x.p + 2 * i * W;
            if (i + 1 < vectors) add_values<8, 2>(o, rescale, v, p, stop);
            else add_values<8, 1>(o, rescale, v, p, stop);
        }
}

// Add the current split of 16 rows, from row i on, to those before it.
inline void add_split(const Problem& a, Scratch& x, i64 i) {
    const __m512 m_old = _mm512_load_ps(x.total_m + i), m_split = _mm512_load_ps(x.m + i), m_new = _mm512_max_ps(m_old, m_split);
    const vf old_weight = (vf)split_weight(m_old, m_new), weight = (vf)split_weight(m_split, m_new);
    _mm512_store_ps(x.total_m + i, m_new);
    store(x.total_l + i, mul_add(load(x.total_l + i), old_weight, load(x.l + i) * weight));
    for (i64 d = 0; d < a.D; d++) {
        float* const total = x.total_o + d * ROW_TILE + i;
        store(total, mul_add(load(total), old_weight, load(x.o + d * ROW_TILE + i) * weight));
    }
}

inline void write_out(const Problem& a, const Tile& tile, Scratch& x) {
    const i64 R = a.H / a.G, rows = tile.end - tile.first;
    for (i64 i = 0; i < rows; i += W) {
        const __m512 inverse_l = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(x.total_l + i));
        for (i64 d = 0; d < a.D; d += LINE) {
            __m512 low[W], high[W];
            for (i64 j = 0; j < W; j++) {
                low[j] = inverse_l * _mm512_load_ps(x.total_o + (d + j) * ROW_TILE + i);
                high[j] = inverse_l * _mm512_load_ps(x.total_o + (d + W + j) * ROW_TILE + i);
            }
            transpose(low);
            transpose(high);
            for (i64 j = 0, row = tile.first + i; j < W && row < tile.end; j++, row++) {
                const i64 token = a.starts[tile.s] + row / R, head = tile.g * R + row % R;
                store_in_order((bf16*)a.out + token * a.out_token + head * a.out_head + d, low[j], high[j]);
            }
        }
    }
}

inline void prefill(const Problem& a, const Tile& tile, Scratch& x) {
    const i64 rows = tile.end - tile.first, vectors = (rows + W - 1) / W;
    const PagedKV<bf16> kv(a, tile.s, tile.g);
    load_queries(a, tile, vectors, x);
    std::fill_n((float*)x.total_o, a.D * ROW_TILE, 0.f);
    const i64 begin = a.window ? std::max<i64>(0, x.positions[0] + 1 - a.window) : 0, stop = x.positions[rows - 1] + 1;
    for (i64 first = begin; first < stop;) {
        const i64 split_end = std::min(stop, first / SPLIT * SPLIT + SPLIT);
        std::fill_n(x.m, ROW_TILE, MIN_SCORE);
        std::fill_n(x.l, ROW_TILE, 0.f);
        std::fill_n((float*)x.o, a.D * ROW_TILE, 0.f);
        for (Rows tile_rows; first < split_end; first = tile_rows.tile + tile_rows.end) {
            tile_rows.load(kv, first, split_end);
            attend_tile(a, tile_rows, vectors, x);
        }
        for (i64 i = 0; i < vectors * W; i += W) add_split(a, x, i);
    }
    write_out(a, tile, x);
}

// The kernel of one thread.
struct Kernel {
    static constexpr i64 SPLIT = pairs::SPLIT;
    const Problem& a;
    Scratch x;
    const amx::Buffer<float> s, o;
    const amx::Buffer<bf16> p;
    Kernel(const Problem& a, bool prefills)
        : a(a), x(prefills ? a.D : 0), s(a.H / a.G * KV_TILE), o(a.D), p(a.H / a.G * KV_TILE) {}
    static i64 tile_rows(i64) { return ROW_TILE; }
    static i64 partial_size(const Problem& a) { return a.H / a.G * (2 + a.D); }
    void prefill(const Tile& tile) { pairs::prefill(a, tile, x); }
    void decode(const Split& split, const Split* next, float* partial) { pairs::decode(a, split, next, s, p, partial); }
    void combine(const Split& split, const float* partials) { pairs::combine(a, split, partials, partial_size(a), o); }
};

}  // namespace
}  // namespace pairs

#endif
