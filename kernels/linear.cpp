// Linear layers in bfloat16 on Intel AMX: y = x · wᵀ + bias, summed in float32 and rounded once; and the gated pair of layers,
// activation(x · wᵀ) · (x · upᵀ).
//
// A tile is 1 KiB: 16 rows of 64 bytes. Packed weights are stored tile by tile in the order of the instructions: [N / 16][K / 32]
// tiles, each 16 pairs along K × 16 columns × 2. The K / 32 tiles of 16 columns are called a run.
//   Few rows: memory-bound. Four runs (or two) are read side by side, each prefetched PREFETCH_TILES tiles ahead, which keeps
//   more cache lines in flight than the hardware prefetcher does.
//   Many rows: compute-bound if operands come from the caches. x is packed into tiles, as many rows as fit the L2 cache; DEPTH
//   tiles of two runs of weights stay in L1 while GROUP_BLOCKS × 32 rows pass, and the next weights are prefetched meanwhile.
// Low-bit weights are unpacked to tiles, two or four runs at a time, before the rows pass; of one row, in registers.
// The order of summation over K is the same for any number of rows, so a row's result does not depend on the rest of the batch.

#include <algorithm>
#include <cfloat>

#include "low_bit.h"
#include "tiles.h"
#include "vectors.h"

namespace {

#ifdef PDSERVE_AMX
constexpr i64 SIDE = 16, TILE_K = 32, TILE_BYTES = 1024;
constexpr i64 PREFETCH_TILES = 4;  // tiles prefetched ahead of their use
constexpr i64 RUNS = 2;            // runs that are always computed together
constexpr i64 BLOCK = 2 * SIDE, DEPTH = 8, GROUP_BLOCKS = 8;
constexpr i64 PACKED_ELEMENTS = 1 << 18, MIN_PACKED_ROWS = 128;  // elements of x packed at a time; minimum in rows
constexpr i64 UNPACKED_FOR = 8;                                  // times as many rows pass once weights are unpacked
constexpr i64 MIN_THREAD_ROWS = 256;                             // a thread with fewer rows shares them with others, by columns

// y = x · wᵀ + bias; with `up`, y = activation(x · wᵀ) · (x · upᵀ), both factors rounded before the product. With `low`, the
// weights are those from its run `first_run` on, and w only says that there are some.
struct Layer {
    const char *w, *up;
    const bf16* bias;
    i64 activation, K, N;
    const low_bit::Weight* low;
    i64 first_run;
};

// Return the tiles of `width` columns from n on, unpacked into `scratch` if they are in low bits.
const char* tiles_of(const Layer& a, const char* w, i64 n, i64 width, bf16* scratch) {
    if (!a.low) return w + n / SIDE * a.K / TILE_K * TILE_BYTES;
    for (i64 i = 0; i < width / SIDE; i++)
        low_bit::unpack(scratch + i * SIDE * a.K, *a.low, a.first_run + n / SIDE + i);
    return (const char*)scratch;
}

// Tile registers: 0, 1 and 4 for the first 16 rows, 2, 3 and 5 for the second, 6 and 7 for weights.
void configure(i64 first_rows, i64 second_rows) {
    alignas(64) uint8_t config[64] = {1};
    const i64 rows[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, SIDE, SIDE};
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = (uint8_t)rows[i];
    asm volatile("" ::: "memory");  // GCC does not know that all of it is read
    _tile_loadconfig(config);
}

// Reads the tiles of one run in order and prefetches ahead of them, at the end into run `next`.
struct WeightStream {
    const char *current, *prefetch, *const next;
    WeightStream(const char* w, const char* next) : current(w), prefetch(w + PREFETCH_TILES * TILE_BYTES), next(next) {}
    const char* next_tile(i64 remaining) {
        if (remaining == PREFETCH_TILES) prefetch = next;
        for (int i = 0; i < TILE_BYTES; i += 64) _mm_prefetch(prefetch + i, _MM_HINT_T0);
        prefetch += TILE_BYTES;
        current += TILE_BYTES;
        return current - TILE_BYTES;
    }
};

// c[rows][64] = x · wᵀ for up to 16 rows and four runs.
void multiply_16x64(float* c, const bf16* x, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    WeightStream a(w, w + 4 * run), b(w + run, w + 5 * run), d(w + 2 * run, w + 6 * run), e(w + 3 * run, w + 7 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.next_tile(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.next_tile(tiles - k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, d.next_tile(tiles - k), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, e.next_tile(tiles - k), 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, 256);
    _tile_stored(1, c + 16, 256);
    _tile_stored(2, c + 32, 256);
    _tile_stored(3, c + 48, 256);
}

// c[rows][32] = x · wᵀ for up to 32 rows, of which x_second are the second 16, and two runs.
void multiply_32x32(float* c, const bf16* x, const bf16* x_second, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    WeightStream a(w, w + 2 * run), b(w + run, w + 3 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.next_tile(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.next_tile(tiles - k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x_second + k * TILE_K, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
}

// y = c[rows][width] + bias, rounded; the first `columns` columns.
void write_out(bf16* y, i64 y_row, const float* c, i64 width, i64 rows, i64 columns, const bf16* bias) {
    for (i64 r = 0; r < rows; r++, c += width, y += y_row)
        for (i64 n = 0; n < columns; n += SIDE)
            store(y + n, bias ? load(c + n) + load(bias + n, columns - n) : load(c + n), columns - n);
}

// y = activation(y) · c.
template <vf activation(vf)>
void write_gated(bf16* y, i64 y_row, const float* c, i64 width, i64 rows, i64 columns) {
    for (i64 r = 0; r < rows; r++, c += width, y += y_row)
        for (i64 n = 0; n < columns; n += SIDE)
            store(y + n, round_to<bf16>(activation(load(y + n, columns - n))) * round_to<bf16>(load(c + n)), columns - n);
}

// Write the product with the weights `w` to the columns from n on: y if w is the first factor, the gated product if it is `up`.
void write_out(const Layer& a, const char* w, bf16* y, const float* c, i64 width, i64 rows, i64 n) {
    const i64 columns = std::min(width, a.N - n);
    if (w != a.up) write_out(y + n, a.N, c, width, rows, columns, a.bias ? a.bias + n : nullptr);
    else (a.activation ? write_gated<gelu_tanh> : write_gated<silu>)(y + n, a.N, c, width, rows, columns);
}

// c[16] = x · wᵀ for one row and a run of low-bit weights, which are unpacked in registers. x is in float32. Sums are those of the
// tile instructions: of even and of odd terms apart in each tile, and then the sum of both.
template <bool IS_EXACT, class Reader>
[[gnu::noinline]] void multiply_codes(float* c, const float* x, Reader reader) {
    vf sums[2] = {};  // IS_EXACT: of 8 columns each, in two lanes each
    low_bit::for_each_step(reader, [&](i64 k, int v) {
        vf a = {}, b = {};
        reader.read(k, v, [&](int i, const low_bit::Halves& pairs) {
            if constexpr (IS_EXACT) {
                double pair;
                std::memcpy(&pair, x + k + 2 * i, 8);
                const vf factors = (vf)_mm512_set1_pd(pair);
                a = mul_add(factors, pairs.first, a);
                b = mul_add(factors, pairs.second, b);
            } else {
                const vi rounded = (vi)pairs.rounded();
                a = mul_add(splat(x[k + 2 * i]), (vf)(rounded << 16), a);
                b = mul_add(splat(x[k + 2 * i + 1]), (vf)(rounded & (int32_t)0xffff0000), b);
            }
        });
        if constexpr (IS_EXACT) {
            sums[0] += a + (vf)_mm512_permute_ps((__m512)a, 0xb1);
            sums[1] += b + (vf)_mm512_permute_ps((__m512)b, 0xb1);
        } else {
            sums[0] += a + b;
        }
    });
    for (int n = 0; n < SIDE; n++) c[n] = IS_EXACT ? sums[n / 8][n % 8 * 2] : sums[0][n];
}

// Columns [first, end) of one row of y, of low-bit weights.
void one_row(const Layer& a, bf16* y, const bf16* x, i64, i64 first, i64 end) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);  // as the tile instructions do, which also read subnormal numbers as 0
    const amx::Buffer<float> wide(a.K);
    for (i64 k = 0; k < a.K; k += W) {
        const vf value = load(x + k);
        store(wide + k, vmax(value, -value) < FLT_MIN ? vf{} : value);
    }
    low_bit::with_reader<bf16>(*a.low, [&](auto* type) {
        using R = std::remove_pointer_t<decltype(type)>;
        float c[SIDE];
        for (i64 n = first; n < end; n += SIDE) {
            (a.low->is_exact ? multiply_codes<true, R> : multiply_codes<false, R>)(c, wide, R(*a.low, a.first_run + n / SIDE));
            write_out(a, a.w, y, c, SIDE, 1, n);
        }
    });
    _mm_setcsr(mode);
}

// Columns [first, end) of y for up to 32 rows. Both are multiples of 32, but N may end before `end`.
void few_rows(const Layer& a, bf16* y, const bf16* x, i64 rows, i64 first, i64 end) {
    const i64 tiles = a.K / TILE_K, run = tiles * TILE_BYTES, unit = RUNS * SIDE;
    const i64 second_rows = rows > SIDE ? rows - SIDE : rows;
    const bf16* const x_second = rows > SIDE ? x + SIDE * a.K : x;
    alignas(64) float c[4 * SIDE * SIDE];
    const amx::Buffer<bf16> scratch(a.low ? 2 * unit * a.K : 1);
    configure(std::min(rows, SIDE), second_rows);
    for (i64 n = first, width; n < end; n += width) {
        width = rows <= SIDE && n + 2 * unit <= end ? 2 * unit : unit;
        for (const char* const w : {a.w, a.up}) {
            if (!w) continue;
            const char* const weights = tiles_of(a, w, n, width, scratch);
            if (width > unit) multiply_16x64(c, x, 2 * a.K, weights, run, tiles);
            else multiply_32x32(c, x, x_second, 2 * a.K, weights, run, tiles);
            write_out(a, w, y, c, width, rows, n);
        }
    }
    _tile_release();
}

// Pack x as blocks of 32 rows, each [K / 32] pairs of tiles. Missing rows repeat the last one.
void pack(bf16* target, const bf16* x, i64 rows, i64 K) {
    for (i64 r = 0; r < (rows + BLOCK - 1) / BLOCK * BLOCK; r++) {
        const bf16* const source = x + std::min(r, rows - 1) * K;
        bf16* const tile = target + r / BLOCK * BLOCK * K + (r / SIDE % 2 * SIDE + r % SIDE) * TILE_K;
        for (i64 k = 0; k < K; k += TILE_K) _mm512_store_si512(tile + k * BLOCK, _mm512_loadu_si512(source + k));
    }
}

// c[32][32] = x · wᵀ over `tiles` tiles of K, or += if ADD. Prefetches `lines` cache lines per tile.
template <bool ADD>
void multiply_packed(float* c, const bf16* x, const char* w, i64 run, i64 tiles, const char* prefetch, i64 lines) {
    asm volatile("" ::: "memory");  // GCC does not know that tile loads read memory
    if (ADD) {
        _tile_loadd(0, c, 128);
        _tile_loadd(1, c + 16, 128);
        _tile_loadd(2, c + 512, 128);
        _tile_loadd(3, c + 528, 128);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (i64 k = 0; k < tiles; k++, x += BLOCK * TILE_K, w += TILE_BYTES) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + run, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + SIDE * TILE_K, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (i64 i = 0; i < lines; i++, prefetch += 64) _mm_prefetch(prefetch, _MM_HINT_T1);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
}

// Columns [first, end) of y, as in few_rows, for any number of rows. Low-bit weights are unpacked in panels of columns that stay in
// the L2 cache while all rows pass.
void many_rows(const Layer& a, bf16* y, const bf16* x, i64 rows, i64 first, i64 end) {
    const i64 K = a.K, tiles = K / TILE_K, run = tiles * TILE_BYTES;
    const i64 fitting = PACKED_ELEMENTS / K / BLOCK * BLOCK, fitting_rows = std::max(MIN_PACKED_ROWS, fitting);
    const i64 max_packed_rows = (a.low ? UNPACKED_FOR : 1) * fitting_rows;
    const i64 panel = a.low ? std::max(BLOCK, fitting) : BLOCK, max_group_rows = std::min(GROUP_BLOCKS * BLOCK, fitting_rows);
    const amx::Buffer<bf16> packed(std::min(max_packed_rows, (rows + BLOCK - 1) / BLOCK * BLOCK) * K);
    alignas(64) float c[GROUP_BLOCKS * BLOCK * BLOCK];
    const amx::Buffer<bf16> scratch(a.low ? panel * K : 1);
    configure(SIDE, SIDE);
    for (i64 top = 0; top < rows; top += max_packed_rows) {
        const i64 packed_rows = std::min(max_packed_rows, rows - top);
        const i64 lines = a.low ? 0 : (BLOCK * BLOCK + packed_rows - 1) / packed_rows;
        pack(packed, x + top * K, packed_rows, K);
        // The product of some packed rows and 32 columns.
        const auto product = [&](const char* w, const char* weights, const char*& prefetch, i64 group, i64 group_rows, i64 n) {
            for (i64 k = 0, depth; k < tiles; k += depth) {
                depth = std::min(DEPTH, tiles - k);
                for (i64 m = 0; m < group_rows; m += BLOCK, prefetch += depth * lines * 64)
                    (k ? multiply_packed<true> : multiply_packed<false>)(
                        c + m * BLOCK, packed + (group + m) * K + k * BLOCK * TILE_K, weights + k * TILE_BYTES, run, depth,
                        prefetch, lines);
            }
            write_out(a, w, y + (top + group) * a.N, c, BLOCK, group_rows, n);
        };
        for (i64 n = first, width; n < end; n += width) {
            width = std::min(panel, end - n);
            for (const char* const w : {a.w, a.up}) {
                if (!w) continue;
                const char *const weights = tiles_of(a, w, n, width, scratch), *const next_weights = a.up && w == a.w ? a.up : a.w;
                const char* prefetch =
                    next_weights + (next_weights == a.up ? n : n + width < end ? n + width : first) / SIDE * run;
                for (i64 group = 0; group < packed_rows; group += max_group_rows)
                    for (i64 column = 0; column < width; column += BLOCK)
                        product(w, weights + column / SIDE * run, prefetch, group,
                                std::min(packed_rows - group, max_group_rows), n + column);
            }
        }
    }
    _tile_release();
}

// y = the layer's result for any number of rows. Threads split the rows while each has enough, else the columns.
void multiply(const Layer& a, bf16* y, const bf16* x, i64 rows, i64 threads) {
    i64 row_threads = 1;
    while (threads % (2 * row_threads) == 0 && rows >= 2 * row_threads * MIN_THREAD_ROWS) row_threads *= 2;
    const i64 units = (a.N + BLOCK - 1) / BLOCK, column_threads = threads / row_threads;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (i64 t = 0; t < threads; t++) {
        const i64 top = rows * (t / column_threads) / row_threads;
        const i64 bottom = rows * (t / column_threads + 1) / row_threads;
        const auto product = a.low && rows == 1 ? one_row : rows > BLOCK ? many_rows : few_rows;
        product(a, y + top * a.N, x + top * a.K, bottom - top,
                                              units * (t % column_threads) / column_threads * BLOCK,
                                              units * (t % column_threads + 1) / column_threads * BLOCK);
    }
}
#endif

}  // namespace

extern "C" {

// y[batch][rows][N] = x[batch][rows][K] · w[batch]ᵀ + bias[N], if pdserve_amx(). K is a multiple of 32; w is packed, with N
// padded to such a multiple. With `up`, another such weight, y = activation(x · wᵀ) · (x · upᵀ); activation: 0 silu, 1 gelu
// (tanh approximation). Threads split a batch of several products by its items.
void pdserve_linear(void* y, const void* x, const void* w, const void* bias, i64 rows, i64 K, i64 N, i64 batch, i64 threads,
                    const void* up, i64 activation) {
#ifdef PDSERVE_AMX
    if (rows == 0) return;
    const i64 bytes = (N + BLOCK - 1) / BLOCK * BLOCK * K * sizeof(bf16);
    const auto product = [&](i64 i, i64 threads) {
        const Layer layer{(const char*)w + i * bytes, (const char*)up, (const bf16*)bias, activation, K, N, nullptr, 0};
        multiply(layer, (bf16*)y + i * rows * N, (const bf16*)x + i * rows * K, rows, threads);
    };
    if (batch == 1) return product(0, threads);  // within a parallel region, threads would be created anew
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (i64 i = 0; i < batch; i++) product(i, 1);
#endif
}

// The same without `up`, with low-bit weights as in low_bit.h, bits 4, 8 or -8 for floats; scales in float32 (0), bfloat16 (1) or float16 (2).
void pdserve_linear_low_bits(void* y, const void* x, const void* codes, const void* scales, const void* zeros, i64 bits,
                             i64 scale_dtype, i64 group, const void* bias, i64 rows, i64 K, i64 N, i64 batch, i64 threads,
                             i64 is_exact) {
#ifdef PDSERVE_AMX
    if (rows == 0) return;
    const low_bit::Weight w{(const char*)codes, scales, (const uint8_t*)zeros, bits, scale_dtype, group, K, is_exact != 0};
    const auto product = [&](i64 i, i64 threads) {
        const Layer layer{(const char*)codes, nullptr, (const bf16*)bias, 0, K, N, &w, i * ((N + BLOCK - 1) / BLOCK) * RUNS};
        multiply(layer, (bf16*)y + i * rows * N, (const bf16*)x + i * rows * K, rows, threads);
    };
    if (batch == 1) return product(0, threads);
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (i64 i = 0; i < batch; i++) product(i, 1);
#endif
}
}
