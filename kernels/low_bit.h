// Weights of 4 or 8 bits, unpacked to 16 bits in registers on their way into a product, or beforehand for many rows: so a product
// with them has the bits of the same product with the unpacked weight.
//
// Codes are integers of 4 or 8 bits, or floats of 8 bits (e4m3), of which zero is 0.
// A weight is (code - zero) · scale, rounded to the type of the scale and then to T. A scale belongs to `group` codes along K of
// one column, and so does a zero. Scales and zeros are [N / 16][K / group][16]. K and N are padded to multiples of 32.
// Codes of 16 columns (a run) lie together, in one of two orders:
//   Words  [K / PER][16] words of 32 bits, each with PER = 32 / BITS codes of one column, the first in the lowest bits
//   Quads  for vectors of 4 columns × 8 k: [K / 32][4] vectors, of which number v has the columns v, 4 + v, 8 + v and 12 + v:
//          4 bits: 16 bytes of each column; those of the lower halves have k = 0 … 15, those of the upper ones 16 … 31
//          8 bits: 8 words of each column; byte b of word i has k = 8b + i

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace low_bit {
namespace {

constexpr i64 RUN = 16, STEP = 32;  // columns, and terms along K that are read together
constexpr i64 AHEAD = 2048;         // bytes by which codes are prefetched
constexpr int FLOAT8 = -8;          // in place of the number of bits
constexpr int num_bits(int bits) { return bits < 0 ? -bits : bits; }

struct Weight {
    const char* codes;
    const void* scales;
    const uint8_t* zeros;  // null: the middle code
    i64 bits, scale_dtype, group, K;
    const char* run(i64 run) const { return codes + run * RUN * K * num_bits((int)bits) / 8; }
    i64 groups() const { return (K + group - 1) / group; }  // of a column
};

inline vu load_words(const void* p) { vu v; std::memcpy(&v, p, sizeof v); return v; }

// The values of floats of 8 bits, of which each word has one as its upper byte. Others of its bits do not matter.
inline vf from_float8(vi words) {
    const vf value = (vf)((words >> 4) & (int32_t)0x87f00000);  // sign, exponent and fraction in their places
    return value * 1.329227995784916e36f;                       // 2^120: the difference of the exponents' biases
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

// Group number g of all runs in order, for W of its columns; `shift` is added to the zeros.
template <int BITS, class S>
inline Group<S> group_at(const Weight& w, i64 g, i64 column, float shift = 0) {
    const i64 i = g * RUN + column;
    vf zero = splat(BITS == FLOAT8 ? 0 : (float)(1 << (BITS - 1)));
    if (w.zeros)
        for (int lane = 0; lane < W; lane++) zero[lane] = w.zeros[i + lane];
    zero += shift;
    const vf scale = load((const S*)w.scales + i);
    return {scale, zero, -(zero * scale)};
}

// Reads the weights of one run from Words, W columns at a time, as float32 of the precision of T.
template <int BITS, class S, class T>
struct Words {
    static constexpr int VECTORS = RUN / W, COUNT = STEP;
    using Vector = vf;
    const Weight& w;
    const i64 run;
    Group<S> groups[VECTORS];

    Words(const Weight& w, i64 run) : w(w), run(run) {}
    void begin_group(i64 k) {
        for (int v = 0; v < VECTORS; v++) groups[v] = group_at<BITS, S>(w, run * w.groups() + k / w.group, v * W);
    }
    // Pass each weight vector of terms [k, k + STEP) to `use`, with its number.
    template <class Use>
    void read(i64 k, int v, const Use& use) const {
        constexpr int SIZE = num_bits(BITS), PER = 32 / SIZE;
        for (int i = 0; i < STEP; i += PER) {
            const vu words = load_words(w.run(run) + ((k + i) / PER * RUN + v * W) * 4);
#pragma GCC unroll 8
            for (int j = 0; j < PER; j++) {
                const vu code = (words >> (uint32_t)(SIZE * j)) & (uint32_t)((1 << SIZE) - 1);
                const vf value = BITS == FLOAT8 ? from_float8((vi)(code << 24)) : __builtin_convertvector((vi)code, vf);
                use(i + j, round_to<T>(groups[v].weight(value)));
            }
        }
    }
};

#if defined(__AVX512BF16__)
// Reads the weights of one run from Quads.
template <int BITS, class S>
struct Quads {
    static constexpr int VECTORS = 4, COUNT = STEP / 8;
    using Vector = __m512i;
    static constexpr float SHIFT = BITS == 8 ? 256 : 0;  // integers of 8 bits are read as the fraction of a float from 256 on
    const Weight& w;
    const i64 run;
    Group<S> halves[VECTORS][2];    // of 8 bits, for two columns, 8 lanes of each
    __m512i low[VECTORS], high[VECTORS];  // of 4 bits: the bytes of the 16 weights of each of 4 columns

    Quads(const Weight& w, i64 run) : w(w), run(run) {}

    void begin_group(i64 k) {
        const Group<S> columns = group_at<BITS, S>(w, run * w.groups() + k / w.group, 0, SHIFT);
        for (int v = 0; v < VECTORS; v++)
            for (int h = 0; h < 2; h++) {
                const int a = v + 8 * h, b = a + 4;
                const __m512i lanes = _mm512_setr_epi32(a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b);
                const auto spread = [&](vf x) { return (vf)_mm512_permutexvar_ps(lanes, (__m512)x); };
                halves[v][h] = {spread(columns.scale), spread(columns.zero), spread(columns.offset)};
            }
        for (int v = 0; BITS == 4 && v < VECTORS; v++) tabulate(v);
    }

    // Split the weights of all 16 codes into tables of their lower and of their upper bytes.
    void tabulate(int v) {
        const vf first = (vf)_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
        const __m512i apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
        const __m512i x = _mm512_shuffle_epi8(pairs(v, first, first), apart);
        const __m512i y = _mm512_shuffle_epi8(pairs(v, first + 8, first + 8), apart);
        low[v] = _mm512_unpacklo_epi64(x, y), high[v] = _mm512_unpackhi_epi64(x, y);
    }

    // The weights of codes of 4 columns, 8 of each.
    __m512i pairs(int v, vf a, vf b) const {
        const auto weight = [&](vf code, const Group<S>& group) {
            // bfloat16 is rounded below
            return std::is_same_v<S, bf16> ? mul_add(code, group.scale, group.offset) : group.weight(code);
        };
        return (__m512i)_mm512_cvtne2ps_pbh((__m512)weight(b, halves[v][1]), (__m512)weight(a, halves[v][0]));
    }

    template <class Use>
    void read(i64 k, int v, const Use& use) const {
        const char* const source = w.run(run) + (k / STEP * VECTORS + v) * (STEP * 4 * num_bits(BITS) / 8);
        for (int i = 0; i < num_bits(BITS) / 4; i++) _mm_prefetch(source + AHEAD + 64 * i, _MM_HINT_T0);
        if constexpr (BITS == 4) {
            const __m512i codes = _mm512_loadu_si512(source), nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m512i index = _mm512_and_si512(i ? _mm512_srli_epi16(codes, 4) : codes, nibble);
                const __m512i l = _mm512_shuffle_epi8(low[v], index), h = _mm512_shuffle_epi8(high[v], index);
                use(2 * i, _mm512_unpacklo_epi8(l, h)), use(2 * i + 1, _mm512_unpackhi_epi8(l, h));
            }
        } else {
            const __m512i a = _mm512_loadu_si512(source), b = _mm512_loadu_si512(source + 64);
            const auto code = [&](__m512i words, int byte) {
                if constexpr (BITS == FLOAT8) return from_float8((vi)words << (24 - 8 * byte));
                // as the upper bits of a fraction
                const __m512i shifted = byte < 2 ? _mm512_slli_epi32(words, 15 - 8 * byte) : _mm512_srli_epi32(words, 8 * byte - 15);
                const __m512i mask = _mm512_set1_epi32(0x7f8000), from_256 = _mm512_set1_epi32(0x43800000);
                return (vf)_mm512_ternarylogic_epi32(shifted, mask, from_256, 0xea);  // (shifted & mask) | from_256
            };
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) use(i, pairs(v, code(a, i), code(b, i)));
        }
    }
};

// Reads the same as pairs along K of 16 columns.
template <int BITS, class S>
struct Pairs : Quads<BITS, S> {
    static constexpr int VECTORS = 1, COUNT = STEP / 2;
    using Quads<BITS, S>::Quads;

    template <class Use>
    void read(i64 k, int, const Use& use) const {
        __m512 weights[4][4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) Quads<BITS, S>::read(k, v, [&](int i, __m512i x) { weights[i][v] = (__m512)x; });
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            transpose_quarters(weights[i]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) use(4 * i + j, (__m512i)weights[i][j]);
        }
    }
};
template <int BITS, class S, class T>
using Reader = std::conditional_t<std::is_same_v<T, bf16>, Pairs<BITS, S>, Words<BITS, S, T>>;
#else
template <int BITS, class S, class T>
using Reader = Words<BITS, S, T>;
#endif

// Call f with a null pointer to the reader that a weight needs.
template <class T, class F>
void with_reader(const Weight& w, const F& f) {
    const auto scaled = [&](auto scale) {
        using S = decltype(scale);
        if (w.bits == 4) f((Reader<4, S, T>*)nullptr);
        else if (w.bits == 8) f((Reader<8, S, T>*)nullptr);
        else f((Reader<FLOAT8, S, T>*)nullptr);
    };
    if (w.scale_dtype == 0) scaled(float{});
    else if (w.scale_dtype == 1) scaled(bf16{});
    else scaled(fp16{});
}

// Call `use(k, v)` for all steps and vectors of a run in order, its reader ready for them.
template <class Reader, class Use>
inline void for_each_step(Reader& reader, const Use& use) {
    const Weight& w = reader.w;
    for (i64 k = 0; k < w.K;) {
        reader.begin_group(k);
        for (const i64 end = std::min(w.K, k + w.group); k < end; k += STEP)
            for (int v = 0; v < Reader::VECTORS; v++) use(k, v);
    }
}

inline void store_weights(bf16* p, vf weights) { store(p, weights); }
inline void store_weights(fp16* p, vf weights) { store(p, weights); }
#if defined(__AVX512BF16__)
inline void store_weights(bf16* p, __m512i weights) { _mm512_storeu_si512(p, weights); }
#endif

// Unpack a run in the order in which products read weights.
template <class T>
void unpack(T* to, const Weight& w, i64 run) {
    with_reader<T>(w, [&](auto* type) {
        using R = std::remove_pointer_t<decltype(type)>;
        R reader(w, run);
        for_each_step(reader, [&](i64 k, int v) {
            reader.read(k, v, [&](int i, auto weights) {
                store_weights(to + k * RUN + (i * R::VECTORS + v) * (STEP / R::COUNT * RUN / R::VECTORS), weights);
            });
        });
    });
}

}  // namespace
}  // namespace low_bit
