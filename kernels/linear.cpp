// Linear layers in bfloat16 on Intel's matrix instructions (AMX): y = x · wᵀ + bias, sums in float32, rounded once;
// and two such with an activation and a product in between.
//
// A tile is 1 KiB: 16 rows of 64 bytes. Weights lie as the instructions read them, tile after tile, for 16 columns of y at a
// time: [N / 16][K / 32] tiles, each of 16 pairs along K × 16 columns × 2. With few rows the time is that of reading them, so
// four such runs (or two) are read side by side, each fetched AHEAD of its use: more lines are under way than a processor asks
// for by itself. With many rows the time is that of the products, as long as operands come from the caches: x is put into tiles,
// as much of it as stays in the second-level cache; DEPTH tiles of two runs of weights stay in the first while GROUP × 32 rows
// pass, and what comes next is fetched meanwhile. The sum over K is taken in the same order whatever the number of rows, so a
// row's result does not depend on the rows that are computed with it.

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

namespace {

#ifdef PDSERVE_AMX
constexpr i64 SIDE = 16, TILE_K = 32, TILE_BYTES = 1024;
constexpr i64 AHEAD = 4;  // tiles
constexpr i64 UNIT = 2;   // runs of SIDE columns that are always computed together
constexpr i64 PAIR = 2 * SIDE, DEPTH = 8, GROUP = 8;
constexpr i64 PACKED = 1 << 18, LEAST = 128;  // numbers of x that are packed at a time; but so many rows at least
constexpr i64 ENOUGH = 256;                   // rows for a thread, so that it need not share them with others

// y = x · wᵀ + bias; with `up`, y = activation(x · wᵀ) · (x · upᵀ), all of it rounded before the product.
struct Layer {
    const char *w, *up;
    const bf16* bias;
    i64 activation, K, N;
};

// Tiles 0, 1 and 4 get the first rows, 2, 3 and 5 the second; 6 and 7 are for weights.
void configure(i64 first, i64 second) {
    alignas(64) uint8_t config[64] = {1};
    const i64 rows[8] = {first, first, second, second, first, second, SIDE, SIDE};
    for (int i = 0; i < 8; i++) config[16 + 2 * i] = 64, config[48 + i] = (uint8_t)rows[i];
    asm volatile("" ::: "memory");  // GCC does not tell that all of it is read
    _tile_loadconfig(config);
}

// One run of weights: the tile to use next, and the one to fetch.
struct Run {
    const char *now, *ahead, *const next;
    Run(const char* w, const char* next) : now(w), ahead(w + AHEAD * TILE_BYTES), next(next) {}
    const char* take(i64 left) {
        if (left == AHEAD) ahead = next;
        for (int i = 0; i < TILE_BYTES; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
        ahead += TILE_BYTES;
        now += TILE_BYTES;
        return now - TILE_BYTES;
    }
};

// c[rows][64]: up to 16 rows, four runs.
void wide(float* c, const bf16* x, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    Run a(w, w + 4 * run), b(w + run, w + 5 * run), d(w + 2 * run, w + 6 * run), e(w + 3 * run, w + 7 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.take(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.take(tiles - k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, d.take(tiles - k), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, e.take(tiles - k), 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, 256);
    _tile_stored(1, c + 16, 256);
    _tile_stored(2, c + 32, 256);
    _tile_stored(3, c + 48, 256);
}

// c[rows][32]: up to 32 rows, of which `lower` are the second 16, and two runs.
void high(float* c, const bf16* x, const bf16* lower, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    Run a(w, w + 2 * run), b(w + run, w + 3 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.take(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.take(tiles - k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, lower + k * TILE_K, x_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
}

// The first columns of c[rows][width], rounded.
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
            store(y + n, rounded<bf16>(activation(load(y + n, columns - n))) * rounded<bf16>(load(c + n)), columns - n);
}

// What was computed with the weights `w`, for the columns from n on.
void write_out(const Layer& a, const char* w, bf16* y, const float* c, i64 width, i64 rows, i64 n) {
    const i64 columns = std::min(width, a.N - n);
    if (w != a.up) write_out(y + n, a.N, c, width, rows, columns, a.bias ? a.bias + n : nullptr);
    else (a.activation ? write_gated<gelu_tanh> : write_gated<silu>)(y + n, a.N, c, width, rows, columns);
}

// Columns [first, end) of y, both multiples of 32 but that N may end before, for up to 32 rows.
void few(const Layer& a, bf16* y, const bf16* x, i64 rows, i64 first, i64 end) {
    const i64 tiles = a.K / TILE_K, run = tiles * TILE_BYTES, unit = UNIT * SIDE;
    const i64 second = rows > SIDE ? rows - SIDE : rows;
    const bf16* const lower = rows > SIDE ? x + SIDE * a.K : x;
    alignas(64) float c[4 * SIDE * SIDE];
    configure(std::min(rows, SIDE), second);
    for (i64 n = first, width; n < end; n += width) {
        width = rows <= SIDE && n + 2 * unit <= end ? 2 * unit : unit;
        for (const char* const w : {a.w, a.up}) {
            if (!w) continue;
            const char* const weights = w + n / SIDE * run;
            if (width > unit) wide(c, x, 2 * a.K, weights, run, tiles);
            else high(c, x, lower, 2 * a.K, weights, run, tiles);
            write_out(a, w, y, c, width, rows, n);
        }
    }
    _tile_release();
}

// 32 rows after the other, as [K / 32] pairs of tiles; rows that are missing repeat the last one.
void pack(bf16* to, const bf16* x, i64 rows, i64 K) {
    for (i64 r = 0; r < (rows + PAIR - 1) / PAIR * PAIR; r++) {
        const bf16* const from = x + std::min(r, rows - 1) * K;
        bf16* const tile = to + r / PAIR * PAIR * K + (r / SIDE % 2 * SIDE + r % SIDE) * TILE_K;
        for (i64 k = 0; k < K; k += TILE_K) _mm512_store_si512(tile + k * PAIR, _mm512_loadu_si512(from + k));
    }
}

// c[32][32] = x · wᵀ over `tiles` of K, or += where `add`. With each of them, `lines` at `ahead` are fetched.
template <bool ADD>
void square(float* c, const bf16* x, const char* w, i64 run, i64 tiles, const char* ahead, i64 lines) {
    asm volatile("" ::: "memory");  // GCC's tile loads don't tell that they read memory
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
    for (i64 k = 0; k < tiles; k++, x += PAIR * TILE_K, w += TILE_BYTES) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + run, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, x + SIDE * TILE_K, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (i64 i = 0; i < lines; i++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    _tile_stored(0, c, 128);
    _tile_stored(1, c + 16, 128);
    _tile_stored(2, c + 512, 128);
    _tile_stored(3, c + 528, 128);
}

// The same as `few` for more rows.
void many(const Layer& a, bf16* y, const bf16* x, i64 rows, i64 first, i64 end) {
    const i64 K = a.K, tiles = K / TILE_K, run = tiles * TILE_BYTES, most = std::max(LEAST, PACKED / K / PAIR * PAIR);
    const amx::Buffer<bf16> packed(std::min(most, (rows + PAIR - 1) / PAIR * PAIR) * K);
    alignas(64) float c[GROUP * PAIR * PAIR];
    configure(SIDE, SIDE);
    for (i64 top = 0; top < rows; top += most) {
        const i64 some = std::min(most, rows - top), lines = (PAIR * PAIR + some - 1) / some;
        pack(packed, x + top * K, some, K);
        for (i64 n = first; n < end; n += PAIR)
            for (const char* const w : {a.w, a.up}) {
                if (!w) continue;
                const char *const weights = w + n / SIDE * run, *const other = a.up && w == a.w ? a.up : a.w;
                const char* ahead = other + (other == a.up ? n : n + PAIR < end ? n + PAIR : first) / SIDE * run;
                for (i64 group = 0, part; group < some; group += part) {
                    part = std::min(some - group, GROUP * PAIR);
                    for (i64 k = 0, depth; k < tiles; k += depth) {
                        depth = std::min(DEPTH, tiles - k);
                        for (i64 m = 0; m < part; m += PAIR, ahead += depth * lines * 64)
                            (k ? square<true> : square<false>)(c + m * PAIR, packed + (group + m) * K + k * PAIR * TILE_K,
                                                               weights + k * TILE_BYTES, run, depth, ahead, lines);
                    }
                    write_out(a, w, y + (top + group) * a.N, c, PAIR, part, n);
                }
            }
    }
    _tile_release();
}
#endif

}  // namespace

extern "C" {

// y[rows][N] = x[rows][K] · wᵀ + bias, if pdserve_amx(); K is a multiple of 32, and w has columns up to a multiple of 32.
// With `up`, another such weight, y = activation(x · wᵀ) · (x · upᵀ): 0 silu, 1 gelu by its approximation with tanh.
void pdserve_linear(void* y, const void* x, const void* w, const void* bias, i64 rows, i64 K, i64 N, i64 threads,
                    const void* up, i64 activation) {
#ifdef PDSERVE_AMX
    if (rows == 0) return;
    const Layer layer{(const char*)w, (const char*)up, (const bf16*)bias, activation, K, N};
    i64 high = 1;  // threads share the rows as long as each has many, else the columns
    while (threads % (2 * high) == 0 && rows >= 2 * high * ENOUGH) high *= 2;
    const i64 units = (N + PAIR - 1) / PAIR, wide = threads / high;
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (i64 t = 0; t < threads; t++) {
        const i64 top = rows * (t / wide) / high, bottom = rows * (t / wide + 1) / high;
        (rows > PAIR ? many : few)(layer, (bf16*)y + top * N, (const bf16*)x + top * K, bottom - top,
                                   units * (t % wide) / wide * PAIR, units * (t % wide + 1) / wide * PAIR);
    }
#endif
}
}
