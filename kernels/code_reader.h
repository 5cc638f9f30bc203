// Reads low-bit weights (Words of low_bit.h) with vectors of 8 floats, in few instructions.
//
// A code becomes a float without a conversion, as the upper bits of the fraction of 16 or 256. Products are rounded to fewer bits
// by adding and subtracting a power of two, which is right while they are far from the ends of the ranges of the types. Groups of
// other scales are rounded as elsewhere.

#pragma once

#include "low_bit.h"

#if defined(__AVX__) && !defined(__AVX512F__)
namespace low_bit {
namespace {

// Round to BITS leading bits, to even between two. x is 0 or not near the ends of the range of float32.
template <int BITS>
inline vf round_leading(vf x) {
    constexpr float FACTOR = 1 << (24 - BITS);
    const vf power = (vf)((vu)x & 0xff800000u);  // ±2^e, of which x + FACTOR · power has the last bit that x shall have
    return mul_add(power, splat(-FACTOR), mul_add(power, splat(FACTOR), x));
}

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
    const Weight& w;
    const i64 run;
    const char* const codes;
    Group<S> groups[VECTORS];
    bool is_ordinary;

    CodeReader(const Weight& w, i64 run) : w(w), run(run), codes(w.run(run)) {}

    void begin_group(i64 k) {
        vi ordinary = vi{} == 0;
        for (int v = 0; v < VECTORS; v++) {
            groups[v] = group_at<BITS, S>(w, run, k, v * W, SHIFT);
            const vf size = vmax(groups[v].scale, -groups[v].scale);
            ordinary &= ((size >= LEAST) & (size <= MOST)) | (size == 0.f);
        }
        is_ordinary = _mm256_movemask_ps((__m256)ordinary) == (1 << W) - 1;
    }

    // Code number j of each word, as a float from SHIFT on.
    static vf value(vu words, int j) {
        if constexpr (BITS == FLOAT8) return from_float8((vi)(words << (uint32_t)(24 - SIZE * j)));
        constexpr uint32_t MASK = ((1u << SIZE) - 1) << FIRST, EXPONENT = (127u + SIZE) << 23;
        const int left = FIRST - SIZE * j;
        return (vf)(((left >= 0 ? words << (uint32_t)left : words >> (uint32_t)-left) & MASK) | EXPONENT);
    }

    static vf weight(vf value, const Group<S>& group) {
        vf product;
        if constexpr (std::is_same_v<S, float>) product = (value - group.zero) * group.scale;
        else product = mul_add(value, group.scale, group.offset);
        if constexpr (LEADING<S> < 24) product = round_leading<LEADING<S>>(product);
        if constexpr (LEADING<T> < LEADING<S>) product = round_leading<LEADING<T>>(product);
        return product;
    }

    // Pass each weight vector of terms [k, k + PER) to `use`, with its number and that of its vector.
    template <class Use>
    void read(i64 k, const Use& use) const {
        const char* const source = codes + k * BYTES;
        __builtin_prefetch(source + AHEAD);
        vu words[VECTORS];
        for (int v = 0; v < VECTORS; v++) words[v] = load_words(source + v * W * 4);
        const auto all = [&](const auto& weight) {
#pragma GCC unroll 8
            for (int j = 0; j < PER; j++)
                for (int v = 0; v < VECTORS; v++) use(j, v, weight(value(words[v], j), groups[v]));
        };
        if (is_ordinary) all([](vf value, const Group<S>& group) { return weight(value, group); });
        else all([](vf value, const Group<S>& group) { return round_to<T>(group.weight(value)); });
    }
};

}  // namespace
}  // namespace low_bit
#endif
