// Weights of 4 or 8 bits, unpacked to 16 bits in registers on their way into a product, or beforehand for many rows: so a product
// with them has the bits of the same product with the unpacked weight.
//
// Codes are integers of 4 or 8 bits, or floats of 8 bits (e4m3), of which zero is 0.
// A weight is (code - zero) · scale, rounded to the type of the scale and then to T. A scale belongs to `group` codes along K of
// one column, and so does a zero. Scales and zeros are [N / 16][K / group][16]. K and N are padded to multiples of 32.
// Codes of 16 columns (a run) lie together, in one of two orders:
//   Words  [K / PER][16] words of 32 bits, each with PER = 32 / BITS codes of one column, the first in the lowest bits
//   Pairs  [K / (2 · PER)][2][8][2] such words: of 8 columns each, of which a column's first has the even terms, the second the odd

#pragma once

#include <algorithm>
#include <type_traits>

#include "vectors.h"

namespace low_bit {
namespace {

constexpr i64 RUN = 16, STEP = 32;  // columns, and terms along K that are read together
constexpr i64 AHEAD = 4096;         // bytes by which codes are prefetched
constexpr int FLOAT8 = -8;          // in place of the number of bits
constexpr int num_bits(int bits) { return bits < 0 ? -bits : bits; }
template <int BITS>
constexpr float MIDDLE = BITS == FLOAT8 ? 0 : 1 << (num_bits(BITS) - 1);  // the zero of weights without zeros

struct Weight {
    const char* codes;
    const void* scales;
    const uint8_t* zeros;  // null: the middle code
    i64 bits, scale_dtype, group, K;
    bool is_exact;  // no weight needs rounding, to the type of the scale or to T
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
    vf zero = splat(MIDDLE<BITS>);
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
    const i64 first_group;
    const char* const codes;
    Group<S> groups[VECTORS];

    Words(const Weight& w, i64 run) : w(w), first_group(run * w.groups()), codes(w.run(run)) {}
    void begin_group(i64 number) {
        for (int v = 0; v < VECTORS; v++) groups[v] = group_at<BITS, S>(w, first_group + number, v * W);
    }
    // Pass each weight vector of terms [k, k + STEP) to `use`, with its number.
    template <class Use>
    void read(i64 k, int v, const Use& use) const {
        constexpr int SIZE = num_bits(BITS), PER = 32 / SIZE;
        for (int i = 0; i < STEP; i += PER) {
            const vu words = load_words(codes + ((k + i) / PER * RUN + v * W) * 4);
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
// A pair along K of 16 columns, 8 in each half, not yet rounded to bfloat16.
struct Halves {
    vf first, second;
    __m512i rounded() const { return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }
};

// Reads the weights of one run from Pairs.
template <int BITS, class S>
struct Pairs {
    static constexpr int VECTORS = 1, COUNT = STEP / 2, SIZE = num_bits(BITS), PER = 32 / SIZE;
    using Vector = Halves;
    // An integer is read as part of the fraction of a float from a power of two on, which its zero has on top. It lies so high
    // there that the product of both with a scale of 16 bits is exact; two places serve two codes of 4 bits after one shift.
    static constexpr int PLACES = BITS == 4 ? 2 : 1;
    static constexpr int place(int j) { return BITS == 4 ? 12 + 4 * (j % 2) : 15; }
    static constexpr float from(int place) { return (float)(1 << (23 - place)); }
    const Weight& w;
    const i64 first_group;
    const char* const codes;
    Group<S> halves[2][PLACES];  // for 8 columns, two lanes of each

    Pairs(const Weight& w, i64 run) : w(w), first_group(run * w.groups()), codes(w.run(run)) {}

    void begin_group(i64 number) {
        const Group<S> columns = group_at<BITS, S>(w, first_group + number, 0);
        for (int h = 0; h < 2; h++) {
            const __m512i lanes = _mm512_add_epi32(_mm512_set1_epi32(8 * h),
                                                   _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7));
            const auto spread = [&](vf x) { return (vf)_mm512_permutexvar_ps(lanes, (__m512)x); };
            const vf scale = spread(columns.scale);
            const auto begin = [&](vf zero) {
                for (int i = 0; i < PLACES; i++) {
                    const vf high = BITS == FLOAT8 ? zero : zero + from(place(i));
                    halves[h][i] = {scale, high, scale * -high};
                }
            };
            if (w.zeros) begin(spread(columns.zero));
            else begin(splat(MIDDLE<BITS>));  // constants: a group may have one step only
        }
    }

    // Code number j of each word.
    static vf code(vi words, int j) {
        if constexpr (BITS == FLOAT8) return from_float8(words << (24 - 8 * j));
        const int left = place(j) - SIZE * j;
        const vi shifted = left >= 0 ? words << left : (vi)((vu)words >> (uint32_t)-left);
        const __m512i mask = _mm512_set1_epi32(((1 << SIZE) - 1) << place(j));
        const __m512i power = _mm512_castps_si512(_mm512_set1_ps(from(place(j))));
        return (vf)_mm512_ternarylogic_epi32((__m512i)shifted, mask, power, 0xea);  // (shifted & mask) | power
    }

    vf weight(vf code, int half, int j) const {
        const Group<S>& group = halves[half][j % PLACES];
        // bfloat16 is rounded below
        return std::is_same_v<S, bf16> ? mul_add(code, group.scale, group.offset) : group.weight(code);
    }

    template <class Use>
    void read(i64 k, int, const Use& use) const {
        const char* const source = codes + k * RUN * SIZE / 8;
#pragma GCC unroll 4
        for (int i = 0; i < COUNT / PER; i++) {
            const vi first = (vi)load_words(source + 128 * i), second = (vi)load_words(source + 128 * i + 64);
            _mm_prefetch(source + AHEAD + 128 * i, _MM_HINT_T0);
            _mm_prefetch(source + AHEAD + 128 * i + 64, _MM_HINT_T0);
#pragma GCC unroll 8
            for (int j = 0; j < PER; j++) {
                use(i * PER + j, Halves{weight(code(first, j), 0, j), weight(code(second, j), 1, j)});
            }
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
    for (i64 k = 0, group = 0; k < w.K; group++) {
        reader.begin_group(group);
        for (const i64 end = std::min(w.K, k + w.group); k < end; k += STEP)
#pragma GCC unroll 4
            for (int v = 0; v < Reader::VECTORS; v++) use(k, v);
    }
}

inline void store_weights(bf16* p, vf weights) { store(p, weights); }
inline void store_weights(fp16* p, vf weights) { store(p, weights); }
#if defined(__AVX512BF16__)
inline void store_weights(bf16* p, const Halves& weights) { _mm512_storeu_si512(p, weights.rounded()); }
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
