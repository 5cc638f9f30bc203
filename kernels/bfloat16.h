// What attention in bfloat16 needs of AVX-512, for amx*.h and pairs.h: weights as powers of two, and the order of pairs.

#pragma once

#include "problem.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PDSERVE_BFLOAT16

namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr float MAX_LOG2_WEIGHT = 8;  // log2 of the weight above which the output is rescaled

// Mask of the first `count` of 32 lanes.
inline __mmask32 lane_mask(i64 count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }

// Transpose 16 × 16 words in place.
inline void transpose(__m512* r) {
    __m512 t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
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

// 2^x for x <= MAX_LOG2_WEIGHT to 3e-6; 0 below -126.
inline __m512 exp2_(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.570101791e-3f);
    for (const float c : {5.591786031e-2f, 0.2402474483f, 0.6931218147f, 0.9999992614f})
        p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_GT_OQ), p, n);
}

// The rows of which a tile's maximum is so far above the running one that the output must be rescaled.
inline __mmask16 is_raised(__m512 tile_max, __m512 m) {
    return _mm512_cmp_ps_mask(tile_max, _mm512_add_ps(m, _mm512_set1_ps(MAX_LOG2_WEIGHT)), _CMP_GT_OQ);
}

// 2^(m_old - m_new), and 1 for other rows than the raised ones: exp2_(0) is not quite 1.
inline __m512 rescaling(__m512 m_old, __m512 m_new, __mmask16 raised) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(1), raised, exp2_(_mm512_sub_ps(m_old, m_new)));
}

// What turns a score into the exponent of its weight; a softcap has applied the scale.
inline float exponent_factor(const Problem& a) { return (a.softcap > 0 ? 1 : a.scale) * LOG2_E; }

// 2^(m - m_new), exactly 1 where they are equal.
inline __m512 split_weight(__m512 m, __m512 m_new) {
    const __m512 weight = exp2_(_mm512_sub_ps(m, m_new));
    return _mm512_mask_mov_ps(weight, _mm512_cmp_ps_mask(m, m_new, _CMP_EQ_OQ), _mm512_set1_ps(1));
}

// Pairs of two vectors: of 16 and 16 float32, rounded to bfloat16, lane i has element i of both.
inline __m512i pairs_of(__m512 even, __m512 odd) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(ORDER), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// Store 32 sums, of which x has elements 0 to 3 of every 8, and y 4 to 7: the order of unpacklo and unpackhi.
inline void store_in_order(bf16* to, __m512 x, __m512 y) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    const __m512 first = _mm512_permutex2var_ps(x, low, y), second = _mm512_permutex2var_ps(x, high, y);
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

}  // namespace

#endif
