// KV in 8 bits: rows of D integers and their scale in float16, the last two bytes. A value is integer · scale, rounded to the type
// of the queries.
//
// Rows are rounded as they are written, so whoever reads them reads the same. Attention turns the rows of a task, once for all of
// its query rows, into a block of its own, and goes on as with KV of that type: its result has the bits of attention over it.

#pragma once

#include <algorithm>

#include "problem.h"
#include "tiles.h"
#include "vectors.h"

namespace byte_kv {
namespace {

constexpr float LARGEST = 127, LARGEST_SCALE = 65504;
constexpr i64 AHEAD = 8, WHOLE = 64;  // tokens by which rows are prefetched, and to multiples of which a block is read

inline vf load_bytes(const int8_t* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vf v;
    for (int i = 0; i < W; i++) v[i] = p[i];
    return v;
#endif
}

inline void store_bytes(int8_t* p, vf integers, i64 n) {
    const vi x = __builtin_convertvector(integers, vi);
#if defined(__AVX512F__)
    if (n >= W) return _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
#endif
    for (i64 i = 0; i < std::min<i64>(n, W); i++) p[i] = (int8_t)x[i];
}

// Round a row; its scale is that of its largest absolute value.
template <class T>
void write(int8_t* to, const T* row, i64 D) {
    vf largest = {};
    for (i64 d = 0; d < D; d += W) {
        const vf x = load(row + d, D - d);
        largest = vmax(largest, vmax(x, -x));
    }
    float most = 0;
    for (int i = 0; i < W; i++) most = std::max(most, largest[i]);
    const fp16 scale = (fp16)std::min(most / LARGEST, LARGEST_SCALE);
    std::memcpy(to + D, &scale, sizeof scale);
    const vf divisor = splat(scale ? (float)scale : std::numeric_limits<float>::infinity()), limit = splat(LARGEST);
    const vf magic = splat(12582912.f);  // 1.5 × 2^23: adding it rounds to an integer
    for (i64 d = 0; d < D; d += W) {
        const vf x = load(row + d, D - d) / divisor, bounded = -vmax(-vmax(x, -limit), -limit);
        store_bytes(to + d, bounded + magic - magic, D - d);
    }
}

template <class T>
inline void read(T* to, const int8_t* row, i64 D) {
    fp16 half;
    std::memcpy(&half, row + D, sizeof half);
    const float scale = (float)half;
    i64 d = 0;
    for (; d + W <= D; d += W) store(to + d, load_bytes(row + d) * scale);
    for (; d < D; d++) from_float(to[d], row[d] * scale);
}

// The problem over one block of type T that has all tokens. Its address depends on the task.
inline Problem in_one_block(const Problem& a, i64 tokens) {
    static constexpr i64 FIRST = 0;
    Problem plain = a;
    plain.tables = &FIRST, plain.M = 0;
    plain.B = i64{1} << 40, plain.block = 0, plain.head = 0, plain.half = tokens * a.D;
    return plain;
}

// The kernel of one thread over KV in 8 bits, by one over KV of type T.
template <class Inner, class T>
struct Kernel {
    static constexpr i64 SPLIT = Inner::SPLIT;
    const Problem& a;
    const i64 tokens;
    Problem plain;
    const amx::Buffer<T> kv;
    Inner inner;

    Kernel(const Problem& a, bool prefills)
        : a(a), tokens(most_tokens(a)), plain(in_one_block(a, tokens)), kv(2 * tokens * a.D), inner(plain, prefills) {}
    static i64 tile_rows(i64 rows) { return Inner::tile_rows(rows); }
    static i64 partial_size(const Problem& a) { return Inner::partial_size(in_one_block(a, 0)); }

    // The most that one task reads.
    static i64 most_tokens(const Problem& a) {
        i64 most = SPLIT;
        for (i64 s = 0; s < a.S; s++)
            if (a.starts[s + 1] - a.starts[s] > 1) most = std::max(most, a.kv_lens[s]);
        return (most + WHOLE - 1) / WHOLE * WHOLE + WHOLE;
    }

    // Read the tokens [begin, end) of a sequence and head.
    void read_rows(i64 s, i64 g, i64 begin, i64 end) {
        const auto row = [&](i64 token) {
            const i64 block = a.tables[s * a.M + token / a.B];
            return (const int8_t*)a.cache + block * a.block + g * a.head + token % a.B * (a.D + (i64)sizeof(fp16));
        };
        const i64 first = begin / WHOLE * WHOLE;
        for (i64 t = begin; t < end; t++) {
            const int8_t *const k = row(t), *const next = row(std::min(t + AHEAD, end - 1));
            for (i64 d = 0; d < a.D; d += 64) __builtin_prefetch(next + d), __builtin_prefetch(next + a.half + d);
            read((T*)kv + (t - first) * a.D, k, a.D), read((T*)kv + plain.half + (t - first) * a.D, k + a.half, a.D);
        }
        plain.cache = (T*)kv - first * a.D;
    }

    void prefill(const Tile& tile) {
        const i64 R = a.H / a.G, query_len = a.starts[tile.s + 1] - a.starts[tile.s];
        const i64 position = a.kv_lens[tile.s] - query_len + tile.first / R;
        const i64 end = a.kv_lens[tile.s] - query_len + (tile.end - 1) / R + 1;
        read_rows(tile.s, tile.g, a.window ? std::max<i64>(0, position + 1 - a.window) : 0, end);
        inner.prefill(tile);
    }
    void decode(const Split& split, const Split*, float* partial) {
        read_rows(split.s, split.g, split.first, split.end);
        inner.decode(split, nullptr, partial);
    }
    void combine(const Split& split, const float* partials) { inner.combine(split, partials); }
};

}  // namespace
}  // namespace byte_kv
