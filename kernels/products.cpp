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

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr i64 RUN = 16, UNIT = 64, BLOCK_ROWS = 96;  // a task is up to BLOCK_ROWS rows × UNIT columns
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

template <class T>
struct Layer {
    const T *w, *bias;
    i64 K, N;
};

// Columns [n, n + VECTORS · W) of ROWS rows of y. Columns from N on are padding.
template <int ROWS, int VECTORS, class T>
inline void multiply(const Layer<T>& a, T* y, const typename Terms<T>::X* x, i64 n) {
    using M = Terms<T>;
    const T* w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = a.w + (n + v * W) / RUN * RUN * a.K + (n + v * W) % RUN * M::TERMS;
    vf sums[ROWS][VECTORS] = {};
    for (i64 k = 0; k < a.K; k += M::TERMS) {
        decltype(M::weights(w[0])) weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = M::weights(w[v] + k * RUN);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = M::add(sums[r][v], x + r * a.K + k, weights[v]);
    }
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            if (const i64 first = n + v * W; first < a.N)
                store(y + r * a.N + first, a.bias ? sums[r][v] + load(a.bias + first, a.N - first) : sums[r][v], a.N - first);
}

// Columns [n, end) of `rows` rows, ROWS at a time, then of the rest.
template <int ROWS, class T>
inline void multiply_rows(const Layer<T>& a, T* y, const typename Terms<T>::X* x, i64 rows, i64 n, i64 end) {
    for (; rows >= ROWS; rows -= ROWS, y += ROWS * a.N, x += ROWS * a.K) {
        i64 column = n;
        for (; column + TILE_VECTORS * W <= end; column += TILE_VECTORS * W) multiply<ROWS, TILE_VECTORS>(a, y, x, column);
        for (; column < end; column += 2 * W) multiply<ROWS, 2>(a, y, x, column);
    }
    if constexpr (ROWS > 1)
        if (rows) multiply_rows<ROWS - 1>(a, y, x, rows, n, end);
}

inline const bf16* widened(const bf16* x, i64, bf16*) { return x; }
template <class T>
const float* widened(const T* x, i64 count, float* to) {
    for (i64 i = 0; i < count; i += W) store(to + i, load(x + i));
    return to;
}

template <class T>
void packed(T* y, const T* x, const T* w, const T* bias, i64 rows, i64 K, i64 N, i64 batch, int threads) {
    using X = typename Terms<T>::X;
    const i64 padded = (N + 31) / 32 * 32, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, units = (N + UNIT - 1) / UNIT;
#pragma omp parallel num_threads(threads)
    {
        const amx::Buffer<X> scratch(std::is_same_v<T, X> ? 1 : std::min(rows, BLOCK_ROWS) * K);
#pragma omp for schedule(static)
        for (i64 t = 0; t < batch * blocks * units; t++) {
            const i64 item = t / units / blocks, top = t / units % blocks * BLOCK_ROWS, n = t % units * UNIT;
            const i64 count = std::min(BLOCK_ROWS, rows - top), first = item * rows + top;
            const Layer<T> layer{w + item * padded * K, bias, K, N};
            const X* const x_block = widened(x + first * K, count * K, scratch);
            multiply_rows<TILE_ROWS>(layer, y + first * N, x_block, count, n, std::min(n + UNIT, padded));
        }
    }
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
        multiply_plain_rows<PLAIN_ROWS>(Layer<T>{w, bias, K, N}, y + top * N, x + top * K, std::min(BLOCK_ROWS, rows - top),
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
