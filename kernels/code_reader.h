// Reads low-bit weights (Words of low_bit.h) with vectors of 8 floats, in few instructions.
//
// A code becomes a float without a conversion, as the upper bits of the fraction of 16 or 256. Products with scales of few bits
// are exact. Others are rounded to fewer bits by floats that are not near the ends of the ranges of the types; groups whose
// scales are, as elsewhere.

#pragma once

#include "low_bit.h"

#if defined(__AVX__) && !defined(__AVX512F__)
namespace low_bit {
namespace {

// Round to BITS leading bits, to even between two (Veltkamp's splitting, Dekker 1971; all fractions were tried for 8 and 11 bits).
// x is 0 or not near the ends of the range of float32.
template <int BITS>
inline vf round_leading(vf x) {
    const vf high = x * splat((float)((1 << (24 - BITS)) + 1));
    return high - (high - x);
}

// How the products of a group are rounded, from the fastest on.
enum class Rounding { NONE, LEADING, OF_TYPES };

template <class T>
constexpr int LEADING = std::is_same_v<T, bf16> ? 8 : std::is_same_v<T, fp16> ? 11 : 24;

// Reads the weights of one run, both of its vectors side by side, so that their sums advance together.
template <int BITS, class S, class T>
struct CodeReader {
    static constexpr int VECTORS = RUN / W, SIZE = num_bits(BITS), PER = 32 / SIZE, FIRST = 23 - SIZE;
    static constexpr i64 BYTES = RUN * SIZE / 8;  // of one term
    static constexpr float SHIFT = BITS == FLOAT8 ? 0 : 1 << SIZE;
    // Scales with which products with codes (floats of 8 bits: 2^-9 to 448) are in the range of bfloat16, or also in that of float16.
    static constexpr bool IN_HALF = std::is_same_v<T, fp16> || std::is_same_v<S, fp16>;
    static constexpr float LEAST = IN_HALF ? (BITS == FLOAT8 ? 0x1p-5f : 0x1p-14f) : 0x1p-100f;
    static constexpr float MOST = IN_HALF ? 0x1p6f : 0x1p90f;
    // Leading bits that a scale may have if its products with codes shall be exact in S and T. Of integers around the middle, the
    // largest is a power of two.
    static constexpr int EXACT = std::min(LEADING<S>, LEADING<T>) - (BITS == FLOAT8 ? 4 : SIZE - 1);
    static constexpr uint32_t INEXACT = (1u << (24 - EXACT)) - 1;  // the others, without the first, which floats do not store
    const Weight& w;
    const i64 first_group;
    const char* const codes;
    Group<S> groups[VECTORS];
    Rounding rounding;

    CodeReader(const Weight& w, i64 run) : w(w), first_group(run * w.groups()), codes(w.run(run)) {}

    void begin_group(i64 number) {
        vi ordinary = vi{} == 0;
        vu inexact = vu{} + (w.zeros ? 1 : 0);
        for (int v = 0; v < VECTORS; v++) {
            groups[v] = group_at<BITS, S>(w, first_group + number, v * W, SHIFT);
            const vf size = vmax(groups[v].scale, -groups[v].scale);
            ordinary &= ((size >= LEAST) & (size <= MOST)) | (size == 0.f);
            inexact |= (vu)groups[v].scale & INEXACT;
        }
        rounding = _mm256_movemask_ps((__m256)ordinary) != (1 << W) - 1               ? Rounding::OF_TYPES
                   : _mm256_testz_si256((__m256i)inexact, (__m256i)inexact) ? Rounding::NONE
                                                                            : Rounding::LEADING;
    }

    // Code number j of each word, as a float from SHIFT on.
    static vf value(vu words, int j) {
        if constexpr (BITS == FLOAT8) return from_float8((vi)(words << (uint32_t)(24 - SIZE * j)));
        constexpr uint32_t MASK = ((1u << SIZE) - 1) << FIRST, EXPONENT = (127u + SIZE) << 23;
        const int left = FIRST - SIZE * j;
        return (vf)(((left >= 0 ? words << (uint32_t)left : words >> (uint32_t)-left) & MASK) | EXPONENT);
    }

    // The weights of code number j of each word of vector v.
    template <Rounding ROUNDING>
    vf weight(vu words, int j, int v) const {
        const Group<S>& group = groups[v];
        const vf code = value(words, j);
        if constexpr (ROUNDING == Rounding::OF_TYPES) return round_to<T>(group.weight(code));
        vf product;
        if constexpr (std::is_same_v<S, float>) product = (code - group.zero) * group.scale;
        else product = mul_add(code, group.scale, group.offset);
        if constexpr (ROUNDING == Rounding::NONE) return product;
        if constexpr (LEADING<S> < 24) product = round_leading<LEADING<S>>(product);
        if constexpr (LEADING<T> < LEADING<S>) product = round_leading<LEADING<T>>(product);
        return product;
    }
};

// Pass the weight vectors of terms [k, end) of RUNS runs, within a group, to `use(its term, its run, its vector, weights)`, term by
// term, so that sums of different columns advance together.
template <int RUNS, class Reader, class Use>
inline void read_group(const Reader* readers, i64 k, i64 end, const Use& use) {
    const auto read = [&](auto rounding) {
        for (; k < end; k += Reader::PER) {
            vu words[RUNS][Reader::VECTORS];
            for (int i = 0; i < RUNS; i++) {
                const char* const source = readers[i].codes + k * Reader::BYTES;
                __builtin_prefetch(source + AHEAD);
                for (int v = 0; v < Reader::VECTORS; v++) words[i][v] = load_words(source + v * W * 4);
            }
#pragma GCC unroll 8
            for (int j = 0; j < Reader::PER; j++)
#pragma GCC unroll 2
                for (int i = 0; i < RUNS; i++)
#pragma GCC unroll 2
                    for (int v = 0; v < Reader::VECTORS; v++)
                        use(k + j, i, v, readers[i].template weight<decltype(rounding)::value>(words[i][v], j, v));
        }
    };
    Rounding rounding = Rounding::NONE;
    for (int i = 0; i < RUNS; i++) rounding = std::max(rounding, readers[i].rounding);
    if (rounding == Rounding::NONE) read(std::integral_constant<Rounding, Rounding::NONE>{});
    else if (rounding == Rounding::LEADING) read(std::integral_constant<Rounding, Rounding::LEADING>{});
    else read(std::integral_constant<Rounding, Rounding::OF_TYPES>{});
}

}  // namespace
}  // namespace low_bit
#endif
