// Weights of 4 or 8 bits, unpacked to 16 bits in the order in which the products read them: so a product with them has the bits
// of the same product with the unpacked weight.
//
// A weight is (code - zero) · scale, rounded to the type of the scale and then to T. A scale belongs to `group` codes along K of
// one column, and so does a zero. Codes lie in words of 32 bits, PER = 32 / BITS in each, the first in the lowest bits:
//   [N / 16][K / PER][16]         a word holds the codes of one column in the order of K
//   [N / 16][K / 2 PER][2][16]    for pairs: words 2i and 2i + 1 of half h hold those of column 8h + i with even and with odd k
// Scales and zeros are [N / 16][K / group][16]. K and N are padded to multiples of 32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace low_bit {
namespace {

constexpr i64 RUN = 16;              // columns
constexpr i64 AHEAD = 512;  // words by which codes are prefetched: those of one run lie together

struct Weight {
    const uint32_t* codes;
    const void* scales;
    const uint8_t* zeros;  // null: the middle code
    i64 bits, scale_dtype, group, K;
};

inline vu load_words(const uint32_t* p) { vu v; std::memcpy(&v, p, sizeof v); return v; }

// The codes at one position of W words.
template <int BITS>
inline vf codes_at(vu words, int position) {
    const vu shifted = words >> (uint32_t)(BITS * position);
#if defined(__AVX512F__)
    if constexpr (BITS == 4)  // the lowest 4 bits of each lane are an index
        return (vf)_mm512_permutexvar_ps((__m512i)shifted, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#endif
    return __builtin_convertvector((vi)(shifted & (uint32_t)((1 << BITS) - 1)), vf);
}

// Scales and zeros of one group, for W columns.
template <class S>
struct Group {
    vf scale, zero, offset;  // the last: -zero · scale, which is exact for 16-bit scales
    // (code - zero) · scale, rounded to S. For 16-bit scales, it is exact before that.
    vf weight(vf code) const {
        if constexpr (std::is_same_v<S, float>) return (code - zero) * scale;
        else return round_to<S>(mul_add(code, scale, offset));
    }
};

template <int BITS, class S>
inline Group<S> group_at(const Weight& w, i64 run, i64 k, i64 column) {
    const i64 i = (run * ((w.K + w.group - 1) / w.group) + k / w.group) * RUN + column;
    vf zero = splat((float)(1 << (BITS - 1)));
    if (w.zeros)
        for (int lane = 0; lane < W; lane++) zero[lane] = w.zeros[i + lane];
    const vf scale = load((const S*)w.scales + i);
    return {scale, zero, -(zero * scale)};
}

// to[k - first][16] = weights of a run with k in [first, end), multiples of 16 for which no group ends in between two of them.
template <int BITS, class S, class T>
void unpack_single(T* to, const Weight& w, i64 run, i64 first, i64 end) {
    constexpr i64 PER = 32 / BITS;
    for (i64 k = first, stop; k < end; k = stop) {
        stop = std::min(end, (k / w.group + 1) * w.group);
        for (i64 column = 0; column < RUN; column += W) {
            const Group<S> group = group_at<BITS, S>(w, run, k, column);
            for (i64 j = k; j < stop; j += PER) {
                const vu words = load_words(w.codes + (run * w.K + j) / PER * RUN + column);
#pragma GCC unroll 8
                for (int i = 0; i < PER; i++)
                    store(to + (j + i - first) * RUN + column, group.weight(codes_at<BITS>(words, i)));
            }
        }
    }
}

#if defined(__AVX512BF16__)
// to[(k - first) / 2][16][2] = pairs of weights.
template <int BITS, class S>
void unpack_pairs(bf16* to, const Weight& w, i64 run, i64 first, i64 end) {
    constexpr i64 PER = 32 / BITS;
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (i64 k = first, stop; k < end; k = stop) {
        stop = std::min(end, (k / w.group + 1) * w.group);
        const Group<S> columns = group_at<BITS, S>(w, run, k, 0);
        Group<S> halves[2];
        for (int h = 0; h < 2; h++) {
            const __m512i lanes = _mm512_add_epi32(twice, _mm512_set1_epi32(8 * h));
            const auto spread = [&](vf v) { return (vf)_mm512_permutexvar_ps(lanes, (__m512)v); };
            halves[h] = {spread(columns.scale), spread(columns.zero), spread(columns.offset)};
        }
        for (i64 j = k; j < stop; j += 2 * PER) {
            const uint32_t* const source = w.codes + (run * w.K + j) / PER * RUN;
            __builtin_prefetch(source + AHEAD), __builtin_prefetch(source + AHEAD + RUN);
            const vu a = load_words(source), b = load_words(source + RUN);
            bf16* const target = to + (j - first) * RUN;
#pragma GCC unroll 8
            for (int i = 0; i < PER; i++) {
                vf low, high;
                if constexpr (std::is_same_v<S, bf16>) {  // rounded below
                    low = mul_add(codes_at<BITS>(a, i), halves[0].scale, halves[0].offset);
                    high = mul_add(codes_at<BITS>(b, i), halves[1].scale, halves[1].offset);
                } else {
                    low = halves[0].weight(codes_at<BITS>(a, i)), high = halves[1].weight(codes_at<BITS>(b, i));
                }
                _mm512_storeu_si512(target + i * 2 * RUN, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
            }
        }
    }
}
#endif

template <int BITS, class S, class T>
void unpack_as(T* to, const Weight& w, i64 run, i64 first, i64 end) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) return unpack_pairs<BITS, S>(to, w, run, first, end);
#endif
    unpack_single<BITS, S>(to, w, run, first, end);
}

// Unpack the terms [first, end) of a run, multiples of 32, to [end - first][16] or to as many pairs.
template <class T>
void unpack(T* to, const Weight& w, i64 run, i64 first, i64 end) {
    const auto scaled = [&](auto scale) {
        using S = decltype(scale);
        w.bits == 4 ? unpack_as<4, S>(to, w, run, first, end) : unpack_as<8, S>(to, w, run, first, end);
    };
    if (w.scale_dtype == 0) scaled(float{});
    else if (w.scale_dtype == 1) scaled(bf16{});
    else scaled(fp16{});
}

}  // namespace
}  // namespace low_bit
