// Matrix products of 16-bit weights without AMX, y = x · wᵀ + bias, summed in float32 and rounded once; and products of plain
// weights of any type, for layers whose weights cannot be packed.
//
// A row's result does not depend on how many rows there are, nor on the threads, by construction: each sum over K is one
// accumulator's (packed), or that of W lanes which are added by halves at the end (plain), in the order of K. Tiles of fewer
// rows and columns compute fewer sums, each in the same way.
//
// Packed weights are [N / 16][K][16], or, for instructions that multiply pairs, [N / 16][K / 2][16][2], with N and K padded with
// zeros to multiples of 32: the format of linear.cpp. 16 columns are called a run.

#include <algorithm>
#include <type_traits>

#include "low_bit.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr i64 RUN = 16, UNIT = 64, BLOCK_ROWS = 96;  // a task is up to BLOCK_ROWS rows × UNIT columns
constexpr i64 DEPTH = 128;                           // terms of low-bit weights that are unpacked at a time, for the L1 cache
constexpr int TILE_ROWS = 6, TILE_VECTORS = W == 16 ? 4 : 2;
constexpr int PLAIN_ROWS = 2, PLAIN_COLUMNS = 4;

// One term of W sums at a time: x is widened once per task.
template <class T>
struct Single {
    using X = float;
    static constexpr i64 TERMS = 1;
    static vf weights(const T* p) { return load(p); }
    static vf add(vf sum, const float* x, vf w) { return mul_add(splat(*x), w, sum); }
};

#if defined(__AVX512BF16__)
struct Pair {
    using X = bf16;
    static constexpr i64 TERMS = 2;
    static __m512i weights(const bf16* p) { return _mm512_loadu_si512(p); }
    static vf add(vf sum, const bf16* x, __m512i w) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
    }
};
template <class T>
using Terms = std::conditional_t<std::is_same_v<T, bf16>, Pair, Single<T>>;
#else
template <class T>
using Terms = Single<T>;
#endif

// Terms [first, end) of K for the columns from `origin` on. Sums over a part of K are kept in between, [rows][UNIT].
template <class T>
struct Layer {
    const T *w, *bias;
    i64 K, N, first, end, origin;
    float* sums;
};
template <class T>
Layer<T> dense(const T* w, const T* bias, i64 K, i64 N) { return {w, bias, K, N, 0, K, 0, nullptr}; }

// Columns [n, n + VECTORS · W) of the rows [row, row + ROWS) of y. Columns from N on are padding.
template <int ROWS, int VECTORS, class T>
[[gnu::noinline]] void multiply(const Layer<T>& a, T* y, const typename Terms<T>::X* x, i64 row, i64 n) {
    using M = Terms<T>;
    const i64 depth = a.end - a.first;
    const T* w[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const i64 column = n - a.origin + v * W;
        w[v] = a.w + column / RUN * RUN * depth + column % RUN * M::TERMS;
    }
    const auto kept = [&](int r, int v) { return a.sums + (row + r) * UNIT + n - a.origin + v * W; };
    vf sums[ROWS][VECTORS] = {};
    if (a.first)
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = load(kept(r, v));
    y += row * a.N, x += row * a.K + a.first;
    for (i64 k = 0; k < depth; k += M::TERMS) {
        decltype(M::weights(w[0])) weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = M::weights(w[v] + k * RUN);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = M::add(sums[r][v], x + r * a.K + k, weights[v]);
    }
    if (a.end < a.K) {
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(kept(r, v), sums[r][v]);
        return;
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            if (const i64 first = n + v * W; first < a.N)
                store(y + r * a.N + first, a.bias ? sums[r][v] + load(a.bias + first, a.N - first) : sums[r][v], a.N - first);
}

// Columns [n, end) of the rows [row, rows), ROWS at a time, then of the rest.
template <int ROWS, class T>
inline void multiply_rows(const Layer<T>& a, T* y, const typename Terms<T>::X* x, i64 row, i64 rows, i64 n, i64 end) {
    for (; rows - row >= ROWS; row += ROWS) {
        i64 column = n;
        for (; column + TILE_VECTORS * W <= end; column += TILE_VECTORS * W)
            multiply<ROWS, TILE_VECTORS>(a, y, x, row, column);
        for (; column < end; column += 2 * W) multiply<ROWS, 2>(a, y, x, row, column);
    }
    if constexpr (ROWS > 1)
        if (row < rows) multiply_rows<ROWS - 1>(a, y, x, row, rows, n, end);
}

inline const bf16* widened(const bf16* x, i64, bf16*) { return x; }
template <class T>
const float* widened(const T* x, i64 count, float* to) {
    for (i64 i = 0; i < count; i += W) store(to + i, load(x + i));
    return to;
}

// y = x · wᵀ + bias, in tasks: `compute(y, x, item, rows, first column, end)` for up to BLOCK_ROWS rows and UNIT columns.
template <class T, class Compute>
void for_each_task(T* y, const T* x, i64 rows, i64 K, i64 N, i64 batch, int threads, const Compute& compute) {
    using X = typename Terms<T>::X;
    const i64 padded = (N + 31) / 32 * 32, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, units = (N + UNIT - 1) / UNIT;
#pragma omp parallel num_threads(threads)
    {
        const amx::Buffer<X> scratch(std::is_same_v<T, X> ? 1 : std::min(rows, BLOCK_ROWS) * K);
#pragma omp for schedule(static)
        for (i64 t = 0; t < batch * blocks * units; t++) {
            const i64 item = t / units / blocks, top = t / units % blocks * BLOCK_ROWS, n = t % units * UNIT;
            const i64 count = std::min(BLOCK_ROWS, rows - top), first = item * rows + top;
            compute(y + first * N, widened(x + first * K, count * K, scratch), item, count, n, std::min(n + UNIT, padded));
        }
    }
}

template <class T>
void packed(T* y, const T* x, const T* w, const T* bias, i64 rows, i64 K, i64 N, i64 batch, int threads) {
    const i64 padded = (N + 31) / 32 * 32;
    const auto compute = [&](T* y, const auto* x, i64 item, i64 count, i64 n, i64 end) {
        multiply_rows<TILE_ROWS>(dense(w + item * padded * K, bias, K, N), y, x, 0, count, n, end);
    };
    for_each_task(y, x, rows, K, N, batch, threads, compute);
}

// The same with low-bit weights, of which each task unpacks DEPTH terms at a time.
template <class T>
void low_bits(T* y, const T* x, const low_bit::Weight& w, const T* bias, i64 rows, i64 N, i64 batch, int threads) {
    const i64 runs = (N + 31) / 32 * 2;
    const auto compute = [&](T* y, const auto* x, i64 item, i64 count, i64 n, i64 end) {
        alignas(64) T unpacked[UNIT * DEPTH];
        alignas(64) float sums[BLOCK_ROWS * UNIT];
        for (i64 first = 0, stop; first < w.K; first = stop) {
            stop = std::min(w.K, first + DEPTH);
            for (i64 run = n / RUN; run < end / RUN; run++)
                low_bit::unpack(unpacked + (run - n / RUN) * RUN * (stop - first), w, item * runs + run, first, stop);
            multiply_rows<TILE_ROWS>(Layer<T>{unpacked, bias, w.K, N, first, stop, n, sums}, y, x, 0, count, n, end);
        }
    };
    for_each_task(y, x, rows, w.K, N, batch, threads, compute);
}

// Columns [n, n + COLUMNS) of ROWS rows of y, of plain weights [N][K].
template <int ROWS, int COLUMNS, class T>
inline void multiply_plain(const Layer<T>& a, T* y, const T* x, i64 n) {
    vf sums[ROWS][COLUMNS] = {};
    const auto add = [&](i64 k, i64 count) {
        vf weights[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) weights[c] = load(a.w + (n + c) * a.K + k, count);
        for (int r = 0; r < ROWS; r++) {
            const vf factor = load(x + r * a.K + k, count);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] = mul_add(factor, weights[c], sums[r][c]);
        }
    };
    i64 k = 0;
    for (; k + W <= a.K; k += W) add(k, W);
    if (k < a.K) add(k, a.K - k);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
            from_float(y[r * a.N + n + c], sum(sums[r][c]) + (a.bias ? to_float(a.bias[n + c]) : 0));
}

template <int ROWS, class T>
inline void multiply_plain_rows(const Layer<T>& a, T* y, const T* x, i64 rows, i64 n) {
    for (; rows >= ROWS; rows -= ROWS, y += ROWS * a.N, x += ROWS * a.K) {
        i64 column = n;
        const i64 end = std::min(n + PLAIN_COLUMNS, a.N);
        if (column + PLAIN_COLUMNS <= end) multiply_plain<ROWS, PLAIN_COLUMNS>(a, y, x, column), column += PLAIN_COLUMNS;
        for (; column < end; column++) multiply_plain<ROWS, 1>(a, y, x, column);
    }
    if constexpr (ROWS > 1)
        if (rows) multiply_plain_rows<ROWS - 1>(a, y, x, rows, n);
}

template <class T>
void plain(T* y, const T* x, const T* w, const T* bias, i64 rows, i64 K, i64 N, int threads) {
    const i64 blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, units = (N + PLAIN_COLUMNS - 1) / PLAIN_COLUMNS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 t = 0; t < blocks * units; t++) {
        const i64 top = t / units * BLOCK_ROWS;
        multiply_plain_rows<PLAIN_ROWS>(dense(w, bias, K, N), y + top * N, x + top * K, std::min(BLOCK_ROWS, rows - top),
                                        t % units * PLAIN_COLUMNS);
    }
}

// to[run][word][16] = from[run · 16][word]: a run's words of 16 rows side by side. A cache line of each row at a time.
template <class Word>
void pack(Word* to, const Word* from, i64 runs, i64 words, int threads) {
    constexpr i64 LINE = 64 / sizeof(Word);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 i = 0; i < runs; i++)
        for (i64 first = 0; first < words; first += LINE)
            for (i64 r = 0; r < RUN; r++)
                for (i64 word = first; word < std::min(first + LINE, words); word++)
                    to[(i * words + word) * RUN + r] = from[(i * RUN + r) * words + word];
}

}  // namespace

extern "C" {

// Pack `runs` runs of 16 rows of K 16-bit numbers, or of K / 2 pairs of them. K is a multiple of 32.
void pdserve_pack(void* to, const void* from, i64 runs, i64 K, i64 pairs, i64 threads) {
    if (pairs) pack((uint32_t*)to, (const uint32_t*)from, runs, K / 2, (int)threads);
    else pack((uint16_t*)to, (const uint16_t*)from, runs, K, (int)threads);
}

// y[batch][rows][N] = x[batch][rows][K] · w[batch]ᵀ + bias[N] in bfloat16 (dtype 1) or float16 (2). K is a multiple of 32.
void pdserve_packed(i64 dtype, void* y, const void* x, const void* w, const void* bias, i64 rows, i64 K, i64 N, i64 batch,
                    i64 threads) {
    if (dtype == 1) packed((bf16*)y, (const bf16*)x, (const bf16*)w, (const bf16*)bias, rows, K, N, batch, (int)threads);
    else packed((fp16*)y, (const fp16*)x, (const fp16*)w, (const fp16*)bias, rows, K, N, batch, (int)threads);
}

// As pdserve_packed, with weights of 4 or 8 bits as in low_bit.h; scales in float32 (0), bfloat16 (1) or float16 (2).
void pdserve_low_bits(i64 dtype, void* y, const void* x, const void* codes, const void* scales, const void* zeros, i64 bits,
                      i64 scale_dtype, i64 group, const void* bias, i64 rows, i64 K, i64 N, i64 batch, i64 threads) {
    const low_bit::Weight w{(const uint32_t*)codes, scales, (const uint8_t*)zeros, bits, scale_dtype, group, K};
    if (dtype == 1) low_bits((bf16*)y, (const bf16*)x, w, (const bf16*)bias, rows, N, batch, (int)threads);
    else low_bits((fp16*)y, (const fp16*)x, w, (const fp16*)bias, rows, N, batch, (int)threads);
}

// y[rows][N] = x[rows][K] · w[N][K]ᵀ + bias[N] in float32 (dtype 0), bfloat16 (1) or float16 (2).
void pdserve_plain(i64 dtype, void* y, const void* x, const void* w, const void* bias, i64 rows, i64 K, i64 N, i64 threads) {
    if (dtype == 0) plain((float*)y, (const float*)x, (const float*)w, (const float*)bias, rows, K, N, (int)threads);
    else if (dtype == 1) plain((bf16*)y, (const bf16*)x, (const bf16*)w, (const bf16*)bias, rows, K, N, (int)threads);
    else plain((fp16*)y, (const fp16*)x, (const fp16*)w, (const fp16*)bias, rows, K, N, (int)threads);
}

// Instructions of the products in bfloat16, the widest first.
const char* pdserve_instructions() {
#if defined(PDSERVE_AMX)
    if (amx::is_permitted()) return "amx";
#endif
#if defined(__AVX512BF16__)
    return "avx512bf16";
#else
    return W == 16 ? "avx512" : W == 8 ? "avx2" : "vector4";
#endif
}
}
