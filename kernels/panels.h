// Products of more rows than registers have sums for, on vectors of 8 floats: weights become float32 once for many rows.
//
// A panel is DEPTH terms along K of one run of 16 columns, in float32: 16 KiB, which stay in the first-level cache while the
// rows of a block pass, ROWS at a time. The block's rows, too, are kept in float32, piece by piece of DEPTH terms, so that one
// piece stays in the second-level cache while the runs of a unit pass. Meanwhile the next panel's weights are prefetched.
// Sums wait in memory for the next panel, unrounded. So each is still one accumulator's in the order of K, as with few rows.

#pragma once

#include <algorithm>

#include "code_reader.h"
#include "tiles.h"
#include "vectors.h"

#if defined(__AVX__) && !defined(__AVX512F__)
#define PDSERVE_PANELS
namespace panels {
namespace {

constexpr i64 RUN = 16, DEPTH = 256, BLOCK = 192, UNIT = 64;
constexpr i64 STRIDE = DEPTH + 16;  // of rows: not a power of two, of which few would fit a set of the cache
constexpr int ROWS = 6, VECTORS = RUN / W, FUSED_ROWS = 4;

inline i64 quotient_up(i64 x, i64 y) { return (x + y - 1) / y; }

// Weights in 16 bits, [run][K][16].
template <class T>
struct Dense {
    const T* w;
    const i64 K;
    static constexpr i64 BYTES = RUN * sizeof(T);  // for each term
    const char* at(i64 run, i64 k) const { return (const char*)(w + (run * K + k) * RUN); }
    void fill(float* panel, i64 run, i64 k, i64 depth) const {
        const T* const from = (const T*)at(run, k);
        for (i64 i = 0; i < depth * RUN; i += W) store(panel + i, load(from + i));
    }
};

// Weights of 4 or 8 bits.
template <class Reader>
struct Codes {
    const low_bit::Weight& w;
    const i64 K;
    static constexpr i64 BYTES = Reader::BYTES;
    const char* at(i64 run, i64 k) const { return w.run(run) + k * BYTES; }
    void fill(float* panel, i64 run, i64 k, i64 depth) const {
        Reader reader(w, run);
        const auto keep = [=](i64 term, int, int v, vf weights) { store(panel + (term - k) * RUN + v * W, weights); };
        for (i64 g = k / w.group, first = k, end; first < k + depth; g++, first = end) {
            reader.begin_group(g);
            end = std::min(k + depth, (g + 1) * w.group);
            low_bit::read_group<1>(&reader, first, end, keep);
        }
    }
};

// sums[R][16] += x[R] · panel. Prefetches [ahead, stop), as far as the loop goes.
template <int R>
[[gnu::noinline]] void add(float* sums, const float* x, const float* panel, i64 depth, const char* ahead, const char* stop) {
    vf c[R][VECTORS];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) c[r][v] = load(sums + r * RUN + v * W);
    for (const float* const end = x + depth; x < end; x += 4, panel += 4 * RUN) {
        if (ahead < stop) __builtin_prefetch(ahead, 0, 2), ahead += 64;
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            vf weights[VECTORS];
            for (int v = 0; v < VECTORS; v++) weights[v] = load(panel + k * RUN + v * W);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const vf factor = splat(x[r * STRIDE + k]);
                for (int v = 0; v < VECTORS; v++) c[r][v] = mul_add(factor, weights[v], c[r][v]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(sums + r * RUN + v * W, c[r][v]);
}

// The same for any number of rows, which are divided evenly.
inline void add_rows(float* sums, const float* x, i64 rows, const float* panel, i64 depth, const char* ahead, i64 bytes) {
    static constexpr decltype(&add<1>) TILES[ROWS] = {add<1>, add<2>, add<3>, add<4>, add<5>, add<6>};
    const i64 tiles = quotient_up(rows, ROWS);
    for (i64 t = 0; t < tiles; t++) {
        const i64 first = rows * t / tiles, end = rows * (t + 1) / tiles;
        TILES[end - first - 1](sums + first * RUN, x + first * STRIDE, panel, depth, ahead + bytes * t / tiles,
                               ahead + bytes * (t + 1) / tiles);
    }
}

// to[piece][row][STRIDE] = from[row][K]
template <class T>
void widen(float* to, const T* from, i64 rows, i64 K) {
    for (i64 k = 0; k < K; k += W)
        for (i64 r = 0; r < rows; r++) store(to + (k / DEPTH * rows + r) * STRIDE + k % DEPTH, load(from + r * K + k));
}

// Write the sums of one row for the run of columns from n on. Those from N on are padding.
template <class T>
inline void write_out(T* y, const vf* sums, const T* bias, i64 N, i64 n) {
    for (i64 v = 0, column = n; v < VECTORS && column < N; v++, column += W)
        store(y + column, bias ? sums[v] + load(bias + column, N - column) : sums[v], N - column);
}

// Columns [n, n + UNIT) of y, as far as they go to `end`, for the widened rows of a block. `item` are the runs of earlier products.
template <class T, class Source>
void multiply_block(T* y, const float* x, const Source& w, const T* bias, i64 rows, i64 N, i64 n, i64 end, i64 item, float* panel,
                    float* sums) {
    const i64 runs = (end - n) / RUN, first = item + n / RUN;
    std::fill_n(sums, runs * rows * RUN, 0.f);
    for (i64 k = 0; k < w.K; k += DEPTH) {
        const i64 depth = std::min(DEPTH, w.K - k);
        for (i64 i = 0; i < runs; i++) {
            w.fill(panel, first + i, k, depth);
            const bool is_last = i + 1 == runs, ends = is_last && k + depth == w.K;
            const char* const ahead = ends ? w.at(first + runs, 0) : is_last ? w.at(first, k + depth) : w.at(first + i + 1, k);
            add_rows(sums + i * rows * RUN, x + k / DEPTH * rows * STRIDE, rows, panel, depth, ahead, depth * Source::BYTES);
        }
    }
    for (i64 i = 0; i < runs; i++)
        for (i64 r = 0; r < rows; r++) {
            const float* const sum = sums + (i * rows + r) * RUN;
            const vf both[VECTORS] = {load(sum), load(sum + W)};
            write_out(y + r * N, both, bias, N, n + i * RUN);
        }
}

// The columns of RUNS runs, from n on, of R rows, with codes that become weights in registers.
template <int R, int RUNS, class Reader, class T>
[[gnu::noinline]] void multiply_runs(T* y, const float* x, const low_bit::Weight& w, const T* bias, i64 N, i64 n, i64 run) {
    Reader readers[2] = {{w, run}, {w, run + RUNS - 1}};
    vf sums[RUNS][R][VECTORS] = {};
    for (i64 k = 0, g = 0, end; k < w.K; g++) {
        for (int i = 0; i < RUNS; i++) readers[i].begin_group(g);
        for (const i64 stop = std::min(w.K, k + w.group); k < stop; k = end) {
            end = std::min(stop, (k / DEPTH + 1) * DEPTH);
            const float* const terms = x + k / DEPTH * R * STRIDE + k % DEPTH - k;  // of one piece
            low_bit::read_group<RUNS>(readers, k, end, [&](i64 k, int i, int v, vf weights) {
                for (int r = 0; r < R; r++) sums[i][r][v] = mul_add(splat(terms[r * STRIDE + k]), weights, sums[i][r][v]);
            });
        }
    }
    for (int i = 0; i < RUNS; i++)
        for (int r = 0; r < R; r++) write_out(y + r * N, sums[i][r], bias, N, n + i * RUN);
}

// Widen the rows of blocks of up to `most` rows, and pass each with UNIT columns to `compute(y, rows widened, their number, first
// column, end, runs of earlier products)`. `pieces`: keep them piece by piece.
template <class T, class Compute>
void for_each_task(T* y, const T* x, i64 rows, i64 K, i64 N, i64 batch, int threads, i64 most, const Compute& compute) {
    const i64 padded = quotient_up(N, 32) * 32, units = quotient_up(N, UNIT);
    const i64 blocks = std::max<i64>(1, quotient_up(rows, most)), block = quotient_up(rows, blocks);
#pragma omp parallel num_threads(threads)
    {
        const amx::Buffer<float> wide(quotient_up(K, DEPTH) * block * STRIDE), panel(DEPTH * RUN), sums(block * UNIT);
        const T* widened = nullptr;
#pragma omp for schedule(static)
        for (i64 t = 0; t < batch * blocks * units; t++) {
            const i64 item = t / units / blocks, top = t / units % blocks * block, n = t % units * UNIT;
            const i64 count = std::min(block, rows - top), row = item * rows + top;
            if (count <= 0) continue;
            if (widened != x + row * K) widen((float*)wide, widened = x + row * K, count, K);
            compute(y + row * N, (const float*)wide, count, n, std::min(n + UNIT, padded), item * padded / RUN, (float*)panel,
                    (float*)sums);
        }
    }
}

template <class T, class Source>
void multiply(T* y, const T* x, const Source& w, const T* bias, i64 rows, i64 N, i64 batch, int threads) {
    const auto compute = [&](T* y, const float* x, i64 count, i64 n, i64 end, i64 item, float* panel, float* sums) {
        multiply_block(y, x, w, bias, count, N, n, end, item, panel, sums);
    };
    for_each_task(y, x, rows, w.K, N, batch, threads, BLOCK, compute);
}

// The same with low-bit weights, for few rows without panels.
template <class Reader, class T>
void multiply_codes(T* y, const T* x, const low_bit::Weight& w, const T* bias, i64 rows, i64 N, i64 batch, int threads) {
    if (rows > FUSED_ROWS) return multiply(y, x, Codes<Reader>{w, w.K}, bias, rows, N, batch, threads);
    const auto compute = [&](T* y, const float* x, i64 count, i64 n, i64 end, i64 item, float*, float*) {
        const i64 runs = count == 1 ? 2 : 1;  // sums for the latency of their additions
        const auto some = count == 1   ? multiply_runs<1, 2, Reader, T>
                          : count == 2 ? multiply_runs<2, 1, Reader, T>
                          : count == 3 ? multiply_runs<3, 1, Reader, T>
                                       : multiply_runs<4, 1, Reader, T>;
        for (; n < end; n += runs * RUN) some(y, x, w, bias, N, n, item + n / RUN);
    };
    for_each_task(y, x, rows, w.K, N, batch, threads, FUSED_ROWS, compute);
}

template <class T>
void low_bits(T* y, const T* x, const low_bit::Weight& w, const T* bias, i64 rows, i64 N, i64 batch, int threads) {
    const auto scaled = [&](auto scale) {
        using S = decltype(scale);
        using low_bit::CodeReader, low_bit::FLOAT8;
        if (w.bits == 4) multiply_codes<CodeReader<4, S, T>>(y, x, w, bias, rows, N, batch, threads);
        else if (w.bits == 8) multiply_codes<CodeReader<8, S, T>>(y, x, w, bias, rows, N, batch, threads);
        else multiply_codes<CodeReader<FLOAT8, S, T>>(y, x, w, bias, rows, N, batch, threads);
    };
    if (w.scale_dtype == 0) scaled(float{});
    else if (w.scale_dtype == 1) scaled(bf16{});
    else scaled(fp16{});
}

}  // namespace
}  // namespace panels
#endif
