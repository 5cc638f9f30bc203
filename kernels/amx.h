// Attention in bfloat16 on Intel AMX, after FlashAttention-2 (Dao 2023), for prefill and decode.
//
// A matrix tile is 16 rows of 16 words; a word is a float32 or a pair of bfloat16. The product instruction adds
// a (16 × 32, pairs along its rows) · b (32 × 16, pairs along its columns) to c (16 × 16, float32). A task is up to TILE_ROWS
// query rows (token × query head) of one sequence and key/value head. Per KV_TILE tokens of KV, K is copied from the pool and V
// transposed, once for all of those rows; then for each STRIP of rows:
//   scores^T [tokens × rows] = K · Q^T, the weights p = 2^(scores · factor - m), and
//   output^T [D × rows] += V^T · p^T.
// Everything is transposed, so that K is an operand in its own layout, vector lanes run along the query rows, and the softmax
// never sums across lanes. Matrices are stored tile by tile, the second index varying fastest. D is padded with zeros to Dp, a
// multiple of 32. Sums are float32; p is rounded to bfloat16 for the second product.
//
// As in paged.cpp, a row has the same result in both phases and in any batch: a decoding token's rows take the same steps as a
// tile of prefill. KV_TILE and SPLIT are counted from token 0, and a row's maximum and rescaling depend on no other row.

#pragma once

#include "problem.h"
#include "tiles.h"

#ifdef PDSERVE_AMX

namespace amx {
namespace {

constexpr i64 SIDE = 16, PAIRS = 2 * SIDE, FLOATS = SIDE * SIDE, HALVES = 2 * FLOATS;
constexpr i64 TILE_ROWS = 1024, STRIP = 32, KV_TILE = 256;
constexpr i64 SPLIT = 2048;  // KV tokens: combining is dearer than in paged.cpp, as the output of 1024 rows fills half an L2 cache
constexpr float LOG2_E = 1.44269504f;
constexpr float MAX_LOG2_WEIGHT = 8;  // log2 of the weight above which the output is rescaled

// Query rows of a task, given the number that balances the load. The more rows, the more reuse of the loaded KV.
inline i64 tile_rows(i64 rows) { return std::clamp((rows + STRIP - 1) / STRIP * STRIP, STRIP, TILE_ROWS); }

// Configures the thread's tile registers as 16 × 16 words each, for its lifetime.
struct TileConfig {
    TileConfig() {
        alignas(64) uint8_t config[64] = {1};
        for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = SIDE;
        _tile_loadconfig(config);
    }
    ~TileConfig() { _tile_release(); }
};

// c[i][j] = Σ_k a[i][k] · b[j][k], or += if `add`, for both j of a strip; I is even. Strides count tiles.
inline void multiply(float* c, i64 cj, const bf16* a, i64 ai, const bf16* b, i64 bj, i64 I, i64 K, bool add) {
    constexpr int BYTES = 4 * SIDE;
    asm volatile("" ::: "memory");  // GCC does not know that tile loads read memory
    for (i64 i = 0; i < I; i += 2) {
        float *const c00 = c + i * FLOATS, *const c01 = c00 + cj * FLOATS;
        float *const c10 = c00 + FLOATS, *const c11 = c01 + FLOATS;
        if (add) {
            _tile_loadd(0, c00, BYTES);
            _tile_loadd(1, c01, BYTES);
            _tile_loadd(2, c10, BYTES);
            _tile_loadd(3, c11, BYTES);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (i64 k = 0; k < K; k++) {
            _tile_loadd(4, a + (i * ai + k) * HALVES, BYTES);
            _tile_loadd(5, a + ((i + 1) * ai + k) * HALVES, BYTES);
            _tile_loadd(6, b + k * HALVES, BYTES);
            _tile_loadd(7, b + (bj + k) * HALVES, BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c00, BYTES);
        _tile_stored(1, c01, BYTES);
        _tile_stored(2, c10, BYTES);
        _tile_stored(3, c11, BYTES);
    }
}

// Transpose 16 × 16 words in place.
inline void transpose(__m512* r) {
    __m512 t[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    const auto pairs = [&](int i, int j, bool high) {
        const __m512d x = _mm512_castps_pd(t[i]), y = _mm512_castps_pd(t[j]);
        return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
    };
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {  // u[i]: columns c, 4 + c, 8 + c, 12 + c of rows 4i to 4i + 3
        __m512 u[4];
        for (int i = 0; i < 4; i++) u[i] = pairs(4 * i + c / 2, 4 * i + c / 2 + 2, c % 2);
        const __m512 even01 = _mm512_shuffle_f32x4(u[0], u[1], 0x88), odd01 = _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
        const __m512 even23 = _mm512_shuffle_f32x4(u[2], u[3], 0x88), odd23 = _mm512_shuffle_f32x4(u[2], u[3], 0xdd);
        r[c] = _mm512_shuffle_f32x4(even01, even23, 0x88);
        r[4 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        r[8 + c] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        r[12 + c] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
}

// Mask of the first `count` of 32 lanes.
inline __mmask32 lane_mask(i64 count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

// Load K and V of tokens [first + skipped, first + count): K as k[token / 16][D / 32], and V^T as v[D / 16][token / 32], pairs
// along the tokens. Up to multiples of PAIRS, the first and the last token are repeated.
inline void load_kv(const PagedKV<bf16>& kv, i64 first, i64 skipped, i64 count, i64 Dp, bf16* k, bf16* v) {
    const i64 D = kv.a.D, begin = skipped / PAIRS * PAIRS, end = (count + PAIRS - 1) / PAIRS * PAIRS;
    const bf16* rows[KV_TILE];
    for (i64 t = begin; t < end; t++) {
        const bf16* const source = kv.k(first + std::clamp(t, skipped, count - 1));
        bf16* const target = k + t / SIDE * Dp * SIDE + t % SIDE * PAIRS;
        for (i64 d = 0; d < Dp; d += PAIRS)
            _mm512_store_si512(target + d * SIDE, _mm512_maskz_loadu_epi16(lane_mask(D - d), source + d));
        rows[t] = source + kv.a.half;
    }
    for (i64 t = begin; t < end; t += PAIRS)
        for (i64 d = 0; d < Dp; d += SIDE) {
            __m512 words[SIDE];
            const auto load = [&](i64 token) {
                return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)lane_mask(D - d), rows[token] + d));
            };
            for (i64 i = 0; i < SIDE; i++) {
                const __m512i low = load(t + 2 * i), high = load(t + 2 * i + 1);
                words[i] = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
            transpose(words);
            float* const target = (float*)v + (d / SIDE * (KV_TILE / PAIRS) + t / PAIRS) * FLOATS;
            for (i64 i = 0; i < SIDE; i++) _mm512_store_ps(target + i * SIDE, words[i]);
        }
}

inline void prefetch(const PagedKV<bf16>& kv, i64 first, i64 end) {
    for (i64 t = first; t < end; t++)
        for (i64 d = 0; d < kv.a.D; d += PAIRS) _mm_prefetch(kv.k(t) + d, _MM_HINT_T1), _mm_prefetch(kv.v(t) + d, _MM_HINT_T1);
}

// 2^x for x <= MAX_LOG2_WEIGHT to 3e-6; 0 below -126.
inline __m512 exp2_(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.570101791e-3f);
    for (const float c : {5.591786031e-2f, 0.2402474483f, 0.6931218147f, 0.9999992614f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_GT_OQ), p, n);
}

// Turn the scores of `count` tokens for 16 query rows into weights p, pairs along the tokens. m and l are the running maximum
// (within MAX_LOG2_WEIGHT) and sum of each row; o[D × rows] is rescaled where m grows.
inline void online_softmax(const float* s, i64 count, float factor, bf16* p, float* m, float* l, float* o, i64 Dp) {
    __m512 maxima[4];
    for (__m512& x : maxima) x = _mm512_load_ps(s);
    for (i64 t = 0; t < count; t += 4)
        for (i64 i = 0; i < 4; i++) maxima[i] = _mm512_max_ps(_mm512_load_ps(s + (t + i) * SIDE), maxima[i]);
    const __m512 factor16 = _mm512_set1_ps(factor);
    const __m512 max01 = _mm512_max_ps(maxima[0], maxima[1]), max23 = _mm512_max_ps(maxima[2], maxima[3]);
    const __m512 tile_max = _mm512_mul_ps(factor16, _mm512_max_ps(max01, max23));
    const __m512 m_old = _mm512_load_ps(m);
    const __mmask16 raised = _mm512_cmp_ps_mask(tile_max, _mm512_add_ps(m_old, _mm512_set1_ps(MAX_LOG2_WEIGHT)), _CMP_GT_OQ);
    const __m512 m_new = _mm512_mask_mov_ps(m_old, raised, tile_max);
    __m512 sums[2] = {_mm512_load_ps(l), _mm512_setzero_ps()};
    if (raised) {
        // exp2_(0) is not quite 1: rows whose maximum stays must not be touched because another row's grows.
        const __m512 rescale = _mm512_mask_mov_ps(_mm512_set1_ps(1), raised, exp2_(_mm512_sub_ps(m_old, m_new)));
        sums[0] = _mm512_mul_ps(sums[0], rescale);
        // Where the factor is 0, o may be uninitialised.
        const __mmask16 nonzero = _mm512_cmp_ps_mask(rescale, _mm512_setzero_ps(), _CMP_GT_OQ);
        for (i64 d = 0; d < Dp; d++)
            _mm512_store_ps(o + d * SIDE, _mm512_maskz_mul_ps(nonzero, _mm512_load_ps(o + d * SIDE), rescale));
        _mm512_store_ps(m, m_new);
    }
    alignas(64) static constexpr uint16_t ORDER[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(ORDER);
    for (i64 t = 0; t < count; t += 2) {
        const __m512 even = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + t * SIDE), factor16, m_new));
        const __m512 odd = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + t * SIDE + SIDE), factor16, m_new));
        sums[0] = _mm512_add_ps(sums[0], even);
        sums[1] = _mm512_add_ps(sums[1], odd);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_store_si512(p + t * SIDE, _mm512_permutexvar_epi16(order, both));
    }
    _mm512_store_ps(l, _mm512_add_ps(sums[0], sums[1]));
}

// Buffers of one thread for up to `rows` query rows. m, l and o are of the current split, the totals of those before it.
struct Scratch {
    const i64 Dp;
    const Buffer<float> o, s, m, l, total_o, total_m, total_l;
    const Buffer<bf16> q, k, v, p;
    const Buffer<int32_t> positions;  // of each row's token in its sequence
    Scratch(i64 D, i64 rows)
        : Dp((D + PAIRS - 1) / PAIRS * PAIRS), o(rows * Dp), s(KV_TILE * STRIP), m(rows), l(rows), total_o(rows * Dp),
          total_m(rows), total_l(rows), q(rows * Dp), k(KV_TILE * Dp), v(KV_TILE * Dp), p(KV_TILE * STRIP), positions(rows) {}
};

// Load the query rows as q[row / 16][D / 32], pairs along the head. Rows beyond the tile repeat its last.
inline void load_queries(const Problem& a, const Tile& tile, i64 rows, Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s], query_len = a.starts[tile.s + 1] - start;
    const bf16* query = (const bf16*)a.q + start * a.q_token + tile.g * R * a.q_head;
    for (i64 i = 0; i < rows; i += SIDE) {
        const bf16* source[SIDE];
        for (i64 j = 0; j < SIDE; j++) {
            const i64 row = std::min(tile.first + i + j, tile.end - 1);
            source[j] = query + row / R * a.q_token + row % R * a.q_head;
            x.positions[i + j] = (int32_t)(a.kv_lens[tile.s] - query_len + row / R);
            x.total_m[i + j] = MIN_SCORE;
            x.total_l[i + j] = 0;
        }
        for (i64 d = 0; d < x.Dp; d += PAIRS) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++)
                words[j] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lane_mask(a.D - d), source[j] + d));
            transpose(words);
            for (i64 j = 0; j < SIDE; j++) _mm512_store_ps((float*)(x.q + i * x.Dp + d * SIDE + j * PAIRS), words[j]);
        }
    }
}

inline void write_out(const Problem& a, const Tile& tile, const Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s];
    for (i64 i = 0; i < tile.end - tile.first; i += SIDE) {
        const i64 rows = std::min(SIDE, tile.end - tile.first - i);
        const __m512 inverse_l = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(x.total_l + i));
        bf16* target[SIDE];
        for (i64 j = 0, row = tile.first + i; j < rows; j++, row++)
            target[j] = (bf16*)a.out + (start + row / R) * a.out_token + (tile.g * R + row % R) * a.out_head;
        for (i64 d = 0; d < a.D; d += SIDE) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++) words[j] = _mm512_mul_ps(inverse_l, _mm512_load_ps(x.total_o + i * x.Dp + (d + j) * SIDE));
            transpose(words);
            for (i64 j = 0; j < rows; j++)
                _mm256_mask_storeu_epi16(target[j] + d, (__mmask16)lane_mask(a.D - d), (__m256i)_mm512_cvtneps_pbh(words[j]));
        }
    }
}

// Mask the scores of tokens [first, first + count) outside of the causal mask and window of 16 rows at `positions`.
inline void mask_scores(float* s, i64 first, i64 count, const int32_t* positions, i64 window) {
    const __m512i position = _mm512_load_si512(positions), window16 = _mm512_set1_epi32(window ? (int)window : INT32_MAX);
    for (i64 t = 0; t < count; t++) {
        const __m512i distance = _mm512_sub_epi32(position, _mm512_set1_epi32((int)(first + t)));
        const __mmask16 visible = _mm512_cmplt_epi32_mask(distance, window16) & ~_mm512_movepi32_mask(distance);
        _mm512_store_ps(s + t * SIDE, _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), visible, _mm512_load_ps(s + t * SIDE)));
    }
}

// Attend from one strip of rows, starting at `row`, to the visible ones of the tokens [first, first + count).
inline void attend_strip(const Problem& a, i64 row, i64 first, i64 count, Scratch& x) {
    const i64 Dp = x.Dp, first_position = x.positions[row] - first, last_position = x.positions[row + STRIP - 1] - first;
    const i64 kv_begin = a.window ? std::max<i64>(0, first_position + 1 - a.window) / PAIRS * PAIRS : 0;
    const i64 length = (std::min(count, last_position + 1) - kv_begin + PAIRS - 1) / PAIRS * PAIRS;
    const i64 unmasked = a.window ? 0 : std::clamp<i64>(first_position + 1, 0, length);  // leading tokens visible to all rows
    if (length <= 0) return;
    multiply(x.s, length / SIDE, x.k + kv_begin * Dp, Dp / PAIRS, x.q + row * Dp, Dp / PAIRS, length / SIDE, Dp / PAIRS, false);
    for (i64 i = 0; i < STRIP; i += SIDE) {
        float* const s = x.s + i * length;
        if (a.softcap > 0)
            for (i64 t = 0; t < length; t++) store(s + t * SIDE, apply_softcap(load(s + t * SIDE) * a.scale, a));
        mask_scores(s + unmasked * SIDE, first + kv_begin + unmasked, length - unmasked, x.positions + row + i, a.window);
        online_softmax(s, length, (a.softcap > 0 ? 1 : a.scale) * LOG2_E, x.p + i * length, x.m + row + i, x.l + row + i,
                       x.o + (row + i) * Dp, Dp);
    }
    multiply(x.o + row * Dp, Dp / SIDE, x.v + kv_begin / PAIRS * HALVES, KV_TILE / PAIRS, x.p, length / PAIRS, Dp / SIDE,
             length / PAIRS, true);
}

// Attend from `rows` loaded query rows to their visible ones of the tokens [begin, stop), which lie in one split.
inline void attend_split(const Problem& a, const PagedKV<bf16>& kv, i64 rows, i64 begin, i64 stop, Scratch& x) {
    std::fill_n((float*)x.m, rows, MIN_SCORE);
    std::fill_n((float*)x.l, rows, 0.f);
    for (i64 first = begin / KV_TILE * KV_TILE, next; first < stop; first = next) {
        next = std::min(first + KV_TILE, stop);
        const i64 next_count = std::min(KV_TILE, stop - next);
        load_kv(kv, first, std::max<i64>(0, begin - first), next - first, x.Dp, x.k, x.v);
        for (i64 row = 0; row < rows; row += STRIP) {
            prefetch(kv, next + row * next_count / rows, next + (row + STRIP) * next_count / rows);
            attend_strip(a, row, first, next - first, x);
        }
    }
}

// 2^(m - m_new), exactly 1 where they are equal.
inline __m512 split_weight(__m512 m, __m512 m_new) {
    const __m512 weight = exp2_(_mm512_sub_ps(m, m_new));
    return _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(m, m_new, _CMP_EQ_OQ), _mm512_set1_ps(1));
}

// Add a split's m, l and o of `rows` query rows to those of the splits before it.
inline void add_split(const float* m, const float* l, const float* o, i64 rows, Scratch& x) {
    for (i64 i = 0; i < rows; i += SIDE) {
        const __m512 m_old = _mm512_load_ps(x.total_m + i), m_split = _mm512_load_ps(m + i);
        const __m512 m_new = _mm512_max_ps(m_old, m_split);
        const __m512 old_weight = split_weight(m_old, m_new), weight = split_weight(m_split, m_new);
        const __m512 split_l = _mm512_mul_ps(_mm512_load_ps(l + i), weight);
        // Rows that have seen no token yet: their o is uninitialised.
        const __mmask16 old = _mm512_cmp_ps_mask(m_old, _mm512_set1_ps(MIN_SCORE), _CMP_GT_OQ);
        const __mmask16 seen = _mm512_cmp_ps_mask(m_split, _mm512_set1_ps(MIN_SCORE), _CMP_GT_OQ);
        _mm512_store_ps(x.total_m + i, m_new);
        _mm512_store_ps(x.total_l + i, _mm512_fmadd_ps(_mm512_load_ps(x.total_l + i), old_weight, split_l));
        for (i64 d = 0; d < x.Dp; d++) {
            float* const total = x.total_o + i * x.Dp + d * SIDE;
            const __m512 split_o = _mm512_maskz_mul_ps(seen, _mm512_load_ps(o + i * x.Dp + d * SIDE), weight);
            _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(old, total), old_weight, split_o));
        }
    }
}

// The kernel of one thread.
struct Kernel {
    static constexpr i64 SPLIT = amx::SPLIT;
    const TileConfig tile_config;
    const Problem& a;
    Scratch x;
    Kernel(const Problem& a, bool prefills) : a(a), x(a.D, prefills ? TILE_ROWS : decode_rows(a)) {}
    static i64 decode_rows(const Problem& a) { return (a.H / a.G + STRIP - 1) / STRIP * STRIP; }
    static i64 tile_rows(i64 rows) { return amx::tile_rows(rows); }
    static i64 partial_size(const Problem& a) { return decode_rows(a) * (2 + (a.D + PAIRS - 1) / PAIRS * PAIRS); }

    void prefill(const Tile& tile) {
        const PagedKV<bf16> kv(a, tile.s, tile.g);
        const i64 rows = (tile.end - tile.first + STRIP - 1) / STRIP * STRIP;
        load_queries(a, tile, rows, x);
        const i64 begin = a.window ? std::max<i64>(0, x.positions[0] + 1 - a.window) : 0, stop = x.positions[rows - 1] + 1;
        for (i64 split = begin / SPLIT * SPLIT; split < stop; split += SPLIT) {
            attend_split(a, kv, rows, std::max(begin, split), std::min(split + SPLIT, stop), x);
            add_split(x.m, x.l, x.o, rows, x);
        }
        write_out(a, tile, x);
    }

    // Attention of one decoding token's rows over one split. The partial result is m[rows], l[rows], o[rows × Dp].
    void decode(const Split& split, float* partial) {
        const i64 rows = decode_rows(a);
        load_queries(a, {split.s, split.g, 0, a.H / a.G}, rows, x);
        attend_split(a, PagedKV<bf16>(a, split.s, split.g), rows, split.first, split.end, x);
        std::copy_n((const float*)x.m, rows, partial);
        std::copy_n((const float*)x.l, rows, partial + rows);
        std::copy_n((const float*)x.o, rows * x.Dp, partial + 2 * rows);
    }

    void combine(const Split& split, const float* partials) {
        const i64 rows = decode_rows(a), size = partial_size(a);
        std::fill_n((float*)x.total_m, rows, MIN_SCORE);
        std::fill_n((float*)x.total_l, rows, 0.f);
        for (i64 i = 0; i < split.count; i++) {
            const float* const m = partials + i * size;
            add_split(m, m + rows, m + 2 * rows, rows, x);
        }
        write_out(a, {split.s, split.g, 0, a.H / a.G}, x);
    }
};

}  // namespace
}  // namespace amx

#else

namespace amx {
namespace {

struct Kernel {
    static constexpr i64 SPLIT = 1;
    Kernel(const Problem&, bool) {}
    static i64 tile_rows(i64 rows) { return rows; }
    static i64 partial_size(const Problem&) { return 0; }
    void prefill(const Tile&) {}
    void decode(const Split&, float*) {}
    void combine(const Split&, const float*) {}
};

}  // namespace
}  // namespace amx

#endif
