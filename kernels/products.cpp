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
#include "panels.h"
#include "tiles.h"
#include "vectors.h"

namespace {

constexpr i64 RUN = 16, UNIT = 64, BLOCK_ROWS = 96;  // a task is up to BLOCK_ROWS rows × UNIT columns
constexpr int TILE_ROWS = 6, TILE_VECTORS = W == 16 ? 4 : 2;
constexpr int PLAIN_ROWS = 2, PLAIN_COLUMNS = 4;
constexpr i64 UNPACKED_ROWS = 192, UNPACKED = 1 << 17;  // rows for which weights are unpacked at a time, and these weights
constexpr int FUSED_ROWS = 4;                           // rows for which weights are unpacked in registers

// One term of W sums at a time: x is widened once per task.
template <class T>
struct Single {
    using X = float;
    using Y = T;
    static constexpr i64 TERMS = 1;
    static vf weights(const T* p) { return load(p); }
    static vf add(vf sum, const float* x, vf w) { return mul_add(splat(*x), w, sum); }
};

#if defined(__AVX512BF16__)
struct Pair {
    using X = bf16;
    using Y = bf16;
    static constexpr i64 TERMS = 2;
    static __m512i weights(const bf16* p) { return _mm512_loadu_si512(p); }
    static vf add(vf sum, const bf16* x, const low_bit::Halves& w) { return add(sum, x, w.rounded()); }
    static vf add(vf sum, const bf16* x, __m512i w) {
        int32_t pair;
        std::memcpy(&pair, x, 4);
        return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)w);
    }
};
using Half = Pair;
#else
using Half = Single<bf16>;
#endif

// Four terms of W sums at a time, of bytes without and with a sign, summed in 32 bits without loss.
struct Bytes {
    using X = uint8_t;
    using Y = int32_t;
    static constexpr i64 TERMS = 4;
    static vi weights(const int8_t* p) { vi v; std::memcpy(&v, p, sizeof v); return v; }
    static vf add(vf sum, const uint8_t* x, vi w) {
        int32_t word;
        std::memcpy(&word, x, 4);
#if defined(__AVX512VNNI__)
        return (vf)_mm512_dpbusd_epi32((__m512i)sum, _mm512_set1_epi32(word), (__m512i)w);
#elif defined(__AVX2__) && !defined(__AVX512F__)  // 16 bits at a time: sums of products of bytes would saturate
        const __m256i even = _mm256_set1_epi32(word & 0xff00ff), odd = _mm256_set1_epi32(word >> 8 & 0xff00ff);
        const __m256i w_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8), w_odd = _mm256_srai_epi16((__m256i)w, 8);
        return (vf)((vi)sum + (vi)_mm256_madd_epi16(even, w_even) + (vi)_mm256_madd_epi16(odd, w_odd));
#else
        return (vf)((vi)sum + (w << 24 >> 24) * x[0] + (w << 16 >> 24) * x[1] + (w << 8 >> 24) * x[2] + (w >> 24) * x[3]);
#endif
    }
};
inline void store(int32_t* p, vf sums, i64 n) { std::memcpy(p, &sums, std::min<i64>(n, W) * 4); }
inline vf load(const int32_t* p, i64 n) { vf v = {}; std::memcpy(&v, p, std::min<i64>(n, W) * 4); return v; }

template <class T>
using Terms = std::conditional_t<std::is_same_v<T, bf16>, Half, std::conditional_t<std::is_same_v<T, int8_t>, Bytes, Single<T>>>;

template <class T>
struct Layer {
    const T* w;
    const typename Terms<T>::Y* bias;
    i64 K, N;
};

// Write sums of one row for the columns from n on. Those from N on are padding.
template <int VECTORS, class T>
inline void write_out(const Layer<T>& a, typename Terms<T>::Y* y, const vf* sums, i64 n) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        if (const i64 first = n + v * W; first < a.N)
            store(y + first, a.bias ? sums[v] + load(a.bias + first, a.N - first) : sums[v], a.N - first);
}

// Columns [n, n + VECTORS · W) of ROWS rows of y; the weights are those from column `origin` on.
template <int ROWS, int VECTORS, class T>
[[gnu::noinline]] void multiply(const Layer<T>& a, typename Terms<T>::Y* y, const typename Terms<T>::X* x, i64 n, i64 origin) {
    using M = Terms<T>;
    const T* w[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const i64 column = n - origin + v * W;
        w[v] = a.w + column / RUN * RUN * a.K + column % RUN * M::TERMS;
    }
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
    for (int r = 0; r < ROWS; r++) write_out<VECTORS>(a, y + r * a.N, sums[r], n);
}

// Columns [n, end) of `rows` rows, ROWS at a time, then of the rest.
template <int ROWS, class T>
inline void multiply_rows(const Layer<T>& a, typename Terms<T>::Y* y, const typename Terms<T>::X* x, i64 rows, i64 n, i64 end) {
    constexpr i64 TILE = (W == 8 && ROWS <= 3 ? 2 : 1) * TILE_VECTORS * W, REST = std::min<i64>(TILE, 32);
    const i64 origin = n;
    for (; rows >= ROWS; rows -= ROWS, y += ROWS * a.N, x += ROWS * a.K) {
        i64 column = n;
        for (; column + TILE <= end; column += TILE) multiply<ROWS, TILE / W>(a, y, x, column, origin);
        for (; column < end; column += REST) multiply<ROWS, REST / W>(a, y, x, column, origin);
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

// y = x · wᵀ + bias, in tasks: `compute(y, x, item, rows, first column, end, unpacked)` for up to `block` rows and `unit` columns,
// of which `unpacked` has room for the weights if `unpacks`.
template <class T, class Compute>
void for_each_task(T* y, const T* x, i64 rows, i64 K, i64 N, i64 batch, int threads, i64 block, i64 unit, bool unpacks,
                   const Compute& compute) {
    using X = typename Terms<T>::X;
    const i64 padded = (N + 31) / 32 * 32, blocks = (rows + block - 1) / block, units = (N + unit - 1) / unit;
#pragma omp parallel num_threads(threads)
    {
        const amx::Buffer<X> scratch(std::is_same_v<T, X> ? 1 : std::min(rows, block) * K);
        const amx::Buffer<T> unpacked(unpacks ? unit * K : 1);
#pragma omp for schedule(static)
        for (i64 t = 0; t < batch * blocks * units; t++) {
            const i64 item = t / units / blocks, top = t / units % blocks * block, n = t % units * unit;
            const i64 count = std::min(block, rows - top), first = item * rows + top;
            compute(y + first * N, widened(x + first * K, count * K, scratch), item, count, n, std::min(n + unit, padded),
                    (T*)unpacked);
        }
    }
}

template <class T>
void packed(T* y, const T* x, const T* w, const T* bias, i64 rows, i64 K, i64 N, i64 batch, int threads) {
#ifdef PDSERVE_PANELS
    if (rows > TILE_ROWS) return panels::multiply(y, x, panels::Dense<T>{w, K}, bias, rows, N, batch, threads);
#endif
    const i64 padded = (N + 31) / 32 * 32;
    const auto compute = [&](T* y, const auto* x, i64 item, i64 count, i64 n, i64 end, T*) {
        multiply_rows<TILE_ROWS>(Layer<T>{w + (item * padded + n) * K, bias, K, N}, y, x, count, n, end);
    };
    for_each_task(y, x, rows, K, N, batch, threads, BLOCK_ROWS, UNIT, false, compute);
}

// The run of columns from n on of up to ROWS rows of y, of weights that are unpacked in registers. Missing rows repeat the last.
template <int ROWS, class Reader, class T>
[[gnu::noinline]] void multiply_codes(const Layer<T>& a, Reader reader, T* y, const typename Terms<T>::X* x, i64 rows, i64 n) {
    using M = Terms<T>;
    const typename M::X* row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = x + std::min<i64>(r, rows - 1) * a.K;
    vf sums[ROWS][Reader::VECTORS] = {};
    low_bit::for_each_step(reader, [&](i64 k, int v) {
        reader.read(k, v, [&](int i, typename Reader::Vector weights) {
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) sums[r][v] = M::add(sums[r][v], row[r] + k + i * M::TERMS, weights);
        });
    });
    for (i64 r = 0; r < std::min<i64>(ROWS, rows); r++) write_out<Reader::VECTORS>(a, y + r * a.N, sums[r], n);
}

// The same with low-bit weights. For few rows, they are unpacked in registers.
template <class T>
void low_bits(T* y, const T* x, const low_bit::Weight& w, const T* bias, i64 rows, i64 N, i64 batch, int threads) {
#ifdef PDSERVE_PANELS
    return panels::low_bits(y, x, w, bias, rows, N, batch, threads);
#else
    const i64 runs = (N + 31) / 32 * 2;
    const bool fused = rows <= FUSED_ROWS;
    const i64 unit = fused ? UNIT : std::clamp<i64>(UNPACKED / w.K / 32 * 32, 32, UNIT);
    const auto compute = [&](T* y, const auto* x, i64 item, i64 count, i64 n, i64 end, T* unpacked) {
        if (!fused) {
            for (i64 column = n; column < end; column += RUN)
                low_bit::unpack(unpacked + (column - n) * w.K, w, item * runs + column / RUN);
            return multiply_rows<TILE_ROWS>(Layer<T>{unpacked, bias, w.K, N}, y, x, count, n, end);
        }
        low_bit::with_reader<T>(w, [&](auto* type) {
            using R = std::remove_pointer_t<decltype(type)>;
            for (i64 column = n; column < end; column += RUN)
                (rows > 1 ? multiply_codes<FUSED_ROWS, R, T> : multiply_codes<1, R, T>)(
                    Layer<T>{nullptr, bias, w.K, N}, R(w, item * runs + column / RUN), y, x, count, column);
        });
    };
    for_each_task(y, x, rows, w.K, N, batch, threads, UNPACKED_ROWS, unit, !fused, compute);
#endif
}

// Weights [N][K] of 8 bits, packed as words of 4 along K, that multiply rows rounded to 8 bits.
struct ByteWeight {
    const int8_t* w;
    const float* scales;   // [N]
    const int32_t* sums;  // [N], of each column
    i64 K, N;
};

// Round a row to bytes around 128, the largest value to 127 more or less. Returns the scale.
template <class T>
float round_row(uint8_t* to, const T* x, i64 K) {
    vf largest = {};
    for (i64 k = 0; k < K; k += W) largest = vmax(largest, vmax(load(x + k), -load(x + k)));
    float most = 0;
    for (int i = 0; i < W; i++) most = std::max(most, largest[i]);
    const float scale = most / 127;
    const vf divisor = splat(scale > 0 ? scale : 1), magic = splat(12582912.f);  // 1.5 × 2^23: adding it rounds to an integer
    for (i64 k = 0; k < K; k += W) {
        const vi integers = __builtin_convertvector(load(x + k) / divisor + magic - magic, vi) + 128;
#if defined(__AVX512F__)
        _mm_storeu_si128((__m128i*)(to + k), _mm512_cvtepi32_epi8((__m512i)integers));
#else
        for (int i = 0; i < W; i++) to[k + i] = (uint8_t)integers[i];
#endif
    }
    return scale;
}

// y = (rounded x · wᵀ) · scales · scale of the row + bias. Sums are exact.
template <class T>
void bytes(T* y, const T* x, const ByteWeight& a, const T* bias, i64 rows, int threads) {
    const i64 K = a.K, N = a.N, padded = (N + 31) / 32 * 32;
    const i64 blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, units = (padded + UNIT - 1) / UNIT;
    const amx::Buffer<uint8_t> rounded(rows * K);
    const amx::Buffer<float> scales(rows);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) int32_t sums[BLOCK_ROWS * UNIT];
#pragma omp for schedule(static)
        for (i64 r = 0; r < rows; r++) scales[r] = round_row(rounded + r * K, x + r * K, K);
#pragma omp for schedule(static)
        for (i64 t = 0; t < blocks * units; t++) {
            const i64 top = t / units * BLOCK_ROWS, n = t % units * UNIT, count = std::min(BLOCK_ROWS, rows - top);
            const Layer<int8_t> layer{a.w + n * K, nullptr, K, UNIT};
            multiply_rows<TILE_ROWS>(layer, sums, rounded + top * K, count, 0, std::min(UNIT, padded - n));
            for (i64 r = 0; r < count; r++)
                for (i64 column = n; column < std::min(n + UNIT, N); column += W) {
                    const i64 left = N - column;
                    const vi sum = (vi)load(sums + r * UNIT + column - n, W) - 128 * (vi)load(a.sums + column, left);
                    vf value = __builtin_convertvector(sum, vf) * load(a.scales + column, left) * scales[top + r];
                    if (bias) value += load(bias + column, left);
                    store(y + (top + r) * N + column, value, left);
                }
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

// As pdserve_packed, with low-bit weights as in low_bit.h, bits 4, 8 or -8 for floats; scales in float32 (0), bfloat16 (1) or float16 (2).
void pdserve_low_bits(i64 dtype, void* y, const void* x, const void* codes, const void* scales, const void* zeros, i64 bits,
                      i64 scale_dtype, i64 group, const void* bias, i64 rows, i64 K, i64 N, i64 batch, i64 threads) {
    const low_bit::Weight w{(const char*)codes, scales, (const uint8_t*)zeros, bits, scale_dtype, group, K, false};
    if (dtype == 1) low_bits((bf16*)y, (const bf16*)x, w, (const bf16*)bias, rows, N, batch, (int)threads);
    else low_bits((fp16*)y, (const fp16*)x, w, (const fp16*)bias, rows, N, batch, (int)threads);
}

// y[rows][N] = (x[rows][K], rounded to 8 bits row by row, · w[N][K]ᵀ) · scales[N] + bias[N] in bfloat16 (dtype 1) or float16 (2). w is
// packed as words of 4 bytes along K, a multiple of 32; `sums` are those of its rows.
void pdserve_bytes(i64 dtype, void* y, const void* x, const void* w, const void* scales, const void* sums, const void* bias,
                   i64 rows, i64 K, i64 N, i64 threads) {
    const ByteWeight weight{(const int8_t*)w, (const float*)scales, (const int32_t*)sums, K, N};
    if (dtype == 1) bytes((bf16*)y, (const bf16*)x, weight, (const bf16*)bias, rows, (int)threads);
    else bytes((fp16*)y, (const fp16*)x, weight, (const fp16*)bias, rows, (int)threads);
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
