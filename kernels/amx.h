// Prefill attention in bfloat16 on Intel's matrix instructions (AMX), after FlashAttention-2 (Dao 2023).
//
// A matrix tile is 16 rows of 16 words; a word is a float32 or a pair of bfloat16. The one product there is adds
// a (16 × 32, pairs along its rows) · b (32 × 16, pairs along its columns) to c (16 × 16, float32). One task is up to ROWS
// query rows (token × query head) of one sequence and key/value head. For LENGTH tokens of KV at a time, K is copied from
// the pool and V transposed, once for all of those rows; then for STRIP rows after the other:
//   scores^T [tokens × rows] = K · Q^T, the weights p = 2^(scores · factor - m), and
// output^T [D × rows] += V^T · p^T.
// All transposed, so that K is an operand as it lies there, vector lanes run along the query rows, and no softmax sums across
// lanes. Matrices are kept as tiles that follow each other, the second index first to change. D is padded with zeros to
// Dp, a multiple of 32. Sums are float32; p is rounded to bfloat16 for the second product.

#pragma once

#include "problem.h"
#include "tiles.h"

#ifdef PDSERVE_AMX

namespace amx {
namespace {

constexpr i64 SIDE = 16, PAIRS = 2 * SIDE, FLOATS = SIDE * SIDE, HALVES = 2 * FLOATS;
constexpr i64 ROWS = 1024, STRIP = 32, LENGTH = 256;
constexpr float LOG2_E = 1.44269504f;
constexpr float SLACK = 8;  // powers of two by which weights may exceed 1 before the output is rescaled

// Rows of a task, if so many are as good as any. The more, the more use is made of what was fetched.
inline i64 height(i64 rows) { return std::clamp((rows + STRIP - 1) / STRIP * STRIP, STRIP, ROWS); }

// This thread's tile registers are all 16 × 16 words while it lives.
struct Registers {
    Registers() {
        alignas(64) uint8_t config[64] = {1};
        for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = SIDE;
        _tile_loadconfig(config);
    }
    ~Registers() { _tile_release(); }
};

// c[i][j] = Σ_k a[i][k] · b[j][k], or += where `add`, for both j of a strip; I is even. Strides count tiles.
inline void multiply(float* c, i64 cj, const bf16* a, i64 ai, const bf16* b, i64 bj, i64 I, i64 K, bool add) {
    constexpr int BYTES = 4 * SIDE;
    asm volatile("" ::: "memory");  // GCC's tile loads don't tell that they read memory
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

// Of 16 × 16 words, in place.
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

inline __mmask32 first_of(i64 count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

// K and V of tokens [first, first + count), the last one repeated up to a multiple of PAIRS: K as k[token / 16][D / 32], and
// V^T as v[D / 16][token / 32], pairs along the tokens.
inline void fetch(const Rows<bf16>& kv, i64 first, i64 count, i64 Dp, bf16* k, bf16* v) {
    const i64 D = kv.a.D, end = (count + PAIRS - 1) / PAIRS * PAIRS;
    const bf16* rows[LENGTH];
    for (i64 t = 0; t < end; t++) {
        const bf16* const from = kv.k(first + std::min(t, count - 1));
        bf16* const to = k + t / SIDE * Dp * SIDE + t % SIDE * PAIRS;
        for (i64 d = 0; d < Dp; d += PAIRS)
            _mm512_store_si512(to + d * SIDE, _mm512_maskz_loadu_epi16(first_of(D - d), from + d));
        rows[t] = from + kv.a.half;
    }
    for (i64 t = 0; t < end; t += PAIRS)
        for (i64 d = 0; d < Dp; d += SIDE) {
            __m512 words[SIDE];
            const auto load = [&](i64 token) {
                return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)first_of(D - d), rows[token] + d));
            };
            for (i64 i = 0; i < SIDE; i++) {
                const __m512i low = load(t + 2 * i), high = load(t + 2 * i + 1);
                words[i] = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
            transpose(words);
            float* const to = (float*)v + (d / SIDE * (LENGTH / PAIRS) + t / PAIRS) * FLOATS;
            for (i64 i = 0; i < SIDE; i++) _mm512_store_ps(to + i * SIDE, words[i]);
        }
}

inline void prefetch(const Rows<bf16>& kv, i64 first, i64 end) {
    for (i64 t = first; t < end; t++)
        for (i64 d = 0; d < kv.a.D; d += PAIRS) _mm_prefetch(kv.k(t) + d, _MM_HINT_T1), _mm_prefetch(kv.v(t) + d, _MM_HINT_T1);
}

// 2^x for x <= SLACK, to 3e-6; 0 below -126.
inline __m512 exp2_(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.570101791e-3f);
    for (const float c : {5.591786031e-2f, 0.2402474483f, 0.6931218147f, 0.9999992614f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_GT_OQ), p, n);
}

// The scores of `count` tokens for 16 query rows become weights, pairs along the tokens. m and l are the running maximum
// (within SLACK) and the sum, of each row; o[D × rows] shrinks where m grows.
inline void soften(const float* s, i64 count, float factor, bf16* p, float* m, float* l, float* o, i64 Dp) {
    __m512 tops[4];
    for (__m512& x : tops) x = _mm512_load_ps(s);
    for (i64 t = 0; t < count; t += 4)
        for (i64 i = 0; i < 4; i++) tops[i] = _mm512_max_ps(_mm512_load_ps(s + (t + i) * SIDE), tops[i]);
    const __m512 by = _mm512_set1_ps(factor);
    const __m512 top = _mm512_mul_ps(by, _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3])));
    const __m512 before = _mm512_load_ps(m);
    const __mmask16 grown = _mm512_cmp_ps_mask(top, _mm512_add_ps(before, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    const __m512 now = _mm512_mask_mov_ps(before, grown, top);
    __m512 sums[2] = {_mm512_load_ps(l), _mm512_setzero_ps()};
    if (grown) {
        const __m512 shrink = exp2_(_mm512_sub_ps(before, now));
        sums[0] = _mm512_mul_ps(sums[0], shrink);
        const __mmask16 some = _mm512_cmp_ps_mask(shrink, _mm512_setzero_ps(), _CMP_GT_OQ);  // else o may be anything
        for (i64 d = 0; d < Dp; d++)
            _mm512_store_ps(o + d * SIDE, _mm512_maskz_mul_ps(some, _mm512_load_ps(o + d * SIDE), shrink));
        _mm512_store_ps(m, now);
    }
    alignas(64) static constexpr uint16_t ORDER[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i order = _mm512_load_si512(ORDER);
    for (i64 t = 0; t < count; t += 2) {
        const __m512 even = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + t * SIDE), by, now));
        const __m512 odd = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + t * SIDE + SIDE), by, now));
        sums[0] = _mm512_add_ps(sums[0], even);
        sums[1] = _mm512_add_ps(sums[1], odd);
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
        _mm512_store_si512(p + t * SIDE, _mm512_permutexvar_epi16(order, both));
    }
    _mm512_store_ps(l, _mm512_add_ps(sums[0], sums[1]));
}

struct Scratch {
    const i64 Dp;
    const Buffer<float> o, s, m, l;
    const Buffer<bf16> q, k, v, p;
    const Buffer<int32_t> at;  // position of the row's token in its sequence
    explicit Scratch(i64 D)
        : Dp((D + PAIRS - 1) / PAIRS * PAIRS), o(ROWS * Dp), s(LENGTH * STRIP), m(ROWS), l(ROWS), q(ROWS * Dp),
          k(LENGTH * Dp), v(LENGTH * Dp), p(LENGTH * STRIP), at(ROWS) {}
};

// The query rows as q[row / 16][D / 32], pairs along the head; rows beyond the tile repeat its last.
inline void fetch_queries(const Problem& a, const Tile& tile, i64 rows, Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s], news = a.starts[tile.s + 1] - start;
    const bf16* query = (const bf16*)a.q + start * a.q_token + tile.g * R * a.q_head;
    for (i64 i = 0; i < rows; i += SIDE) {
        const bf16* from[SIDE];
        for (i64 j = 0; j < SIDE; j++) {
            const i64 row = std::min(tile.first + i + j, tile.end - 1);
            from[j] = query + row / R * a.q_token + row % R * a.q_head;
            x.at[i + j] = (int32_t)(a.kv_lens[tile.s] - news + row / R);
            x.m[i + j] = NEVER;
            x.l[i + j] = 0;
        }
        for (i64 d = 0; d < x.Dp; d += PAIRS) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++)
                words[j] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(first_of(a.D - d), from[j] + d));
            transpose(words);
            for (i64 j = 0; j < SIDE; j++) _mm512_store_ps((float*)(x.q + i * x.Dp + d * SIDE + j * PAIRS), words[j]);
        }
    }
}

inline void write_out(const Problem& a, const Tile& tile, const Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s];
    for (i64 i = 0; i < tile.end - tile.first; i += SIDE) {
        const i64 rows = std::min(SIDE, tile.end - tile.first - i);
        const __m512 share = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(x.l + i));
        bf16* to[SIDE];
        for (i64 j = 0, row = tile.first + i; j < rows; j++, row++)
            to[j] = (bf16*)a.out + (start + row / R) * a.out_token + (tile.g * R + row % R) * a.out_head;
        for (i64 d = 0; d < a.D; d += SIDE) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++) words[j] = _mm512_mul_ps(share, _mm512_load_ps(x.o + i * x.Dp + (d + j) * SIDE));
            transpose(words);
            for (i64 j = 0; j < rows; j++)
                _mm256_mask_storeu_epi16(to[j] + d, (__mmask16)first_of(a.D - d), (__m256i)_mm512_cvtneps_pbh(words[j]));
        }
    }
}

// Scores of tokens [first, first + count) that the 16 rows at the positions `at` do not see become HIDDEN.
inline void hide(float* s, i64 first, i64 count, const int32_t* at, i64 window) {
    const __m512i position = _mm512_load_si512(at), reach = _mm512_set1_epi32(window ? (int)window : INT32_MAX);
    for (i64 t = 0; t < count; t++) {
        const __m512i back = _mm512_sub_epi32(position, _mm512_set1_epi32((int)(first + t)));
        const __mmask16 seen = _mm512_cmplt_epi32_mask(back, reach) & ~_mm512_movepi32_mask(back);
        _mm512_store_ps(s + t * SIDE, _mm512_mask_mov_ps(_mm512_set1_ps(HIDDEN), seen, _mm512_load_ps(s + t * SIDE)));
    }
}

// The strip's rows, beginning with `row`, attend to those of the tokens [first, first + count) that they see.
inline void attend(const Problem& a, i64 row, i64 first, i64 count, Scratch& x) {
    const i64 Dp = x.Dp, low = x.at[row] - first, high = x.at[row + STRIP - 1] - first;
    const i64 begin = a.window ? std::max<i64>(0, low + 1 - a.window) / PAIRS * PAIRS : 0;
    const i64 length = (std::min(count, high + 1) - begin + PAIRS - 1) / PAIRS * PAIRS;
    const i64 clear = a.window ? 0 : std::clamp<i64>(low + 1, 0, length);  // tokens that all rows see
    if (length <= 0) return;
    multiply(x.s, length / SIDE, x.k + begin * Dp, Dp / PAIRS, x.q + row * Dp, Dp / PAIRS, length / SIDE, Dp / PAIRS, false);
    for (i64 i = 0; i < STRIP; i += SIDE) {
        float* const s = x.s + i * length;
        if (a.softcap > 0)
            for (i64 t = 0; t < length; t++) store(s + t * SIDE, capped(load(s + t * SIDE) * a.scale, a));
        hide(s + clear * SIDE, first + begin + clear, length - clear, x.at + row + i, a.window);
        soften(s, length, (a.softcap > 0 ? 1 : a.scale) * LOG2_E, x.p + i * length, x.m + row + i, x.l + row + i,
               x.o + (row + i) * Dp, Dp);
    }
    multiply(x.o + row * Dp, Dp / SIDE, x.v + begin / PAIRS * HALVES, LENGTH / PAIRS, x.p, length / PAIRS, Dp / SIDE,
             length / PAIRS, true);
}

inline void prefill(const Problem& a, const Tile& tile, Scratch& x) {
    const Rows<bf16> kv(a, tile.s, tile.g);
    const i64 rows = (tile.end - tile.first + STRIP - 1) / STRIP * STRIP;
    fetch_queries(a, tile, rows, x);
    const i64 stop = x.at[rows - 1] + 1;
    for (i64 first = a.window ? std::max<i64>(0, x.at[0] + 1 - a.window) : 0, next; first < stop; first = next) {
        next = std::min(first + LENGTH, stop);
        const i64 coming = std::min(LENGTH, stop - next);
        fetch(kv, first, next - first, x.Dp, x.k, x.v);
        for (i64 row = 0; row < rows; row += STRIP) {
            prefetch(kv, next + row * coming / rows, next + (row + STRIP) * coming / rows);
            attend(a, row, first, next - first, x);
        }
    }
    write_out(a, tile, x);
}

}  // namespace
}  // namespace amx

#else

namespace amx {
namespace {

inline i64 height(i64 rows) { return rows; }
struct Registers {};
struct Scratch { explicit Scratch(i64) {} };
inline void prefill(const Problem&, const Tile&, Scratch&) {}

}  // namespace
}  // namespace amx

#endif
