// Linear layers in bfloat16 on Intel's matrix instructions (AMX): y = x · wᵀ + bias, sums in float32, rounded once.
//
// A tile is 1 KiB: 16 rows of 64 bytes. Weights lie as the instructions read them, tile after tile, for 16 columns of y at a
// time: [N / 16][K / 32] tiles, each of 16 pairs along K × 16 columns × 2. With few rows the time is that of reading them, so
// four such runs (or two) are read side by side, each fetched AHEAD of its use: more lines are under way than a processor asks
// for by itself. The sum over K is taken in the same order whatever the number of rows, so a row's result does not depend
// on the rows that are computed with it.

#include <algorithm>

#include "tiles.h"
#include "vectors.h"

namespace {

#ifdef PDSERVE_AMX
constexpr i64 SIDE = 16, TILE_K = 32, TILE_BYTES = 1024;
constexpr i64 AHEAD = 4;   // tiles
constexpr i64 ROWS = 256;  // rows of x that stay in the second-level cache while the weights pass
constexpr i64 UNIT = 2;    // runs of SIDE columns that are always computed together

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
    template <bool FETCH>
    const char* take(i64 left) {
        if (FETCH) {
            if (left == AHEAD) ahead = next;
            for (int i = 0; i < TILE_BYTES; i += 64) _mm_prefetch(ahead + i, _MM_HINT_T0);
            ahead += TILE_BYTES;
        }
        now += TILE_BYTES;
        return now - TILE_BYTES;
    }
};

// c[rows][64]: up to 16 rows, four runs.
template <bool FETCH>
void wide(float* c, const bf16* x, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    Run a(w, w + 4 * run), b(w + run, w + 5 * run), d(w + 2 * run, w + 6 * run), e(w + 3 * run, w + 7 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.take<FETCH>(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.take<FETCH>(tiles - k), 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, d.take<FETCH>(tiles - k), 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, e.take<FETCH>(tiles - k), 64);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, c, 256);
    _tile_stored(1, c + 16, 256);
    _tile_stored(2, c + 32, 256);
    _tile_stored(3, c + 48, 256);
}

// c[rows][32]: up to 32 rows, of which `lower` are the second 16, and two runs.
template <bool FETCH>
void high(float* c, const bf16* x, const bf16* lower, i64 x_bytes, const char* w, i64 run, i64 tiles) {
    Run a(w, w + 2 * run), b(w + run, w + 3 * run);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (i64 k = 0; k < tiles; k++) {
        _tile_loadd(4, x + k * TILE_K, x_bytes);
        _tile_loadd(6, a.take<FETCH>(tiles - k), 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b.take<FETCH>(tiles - k), 64);
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
    for (i64 r = 0; r < rows; r++)
        for (i64 n = 0; n < columns; n += SIDE) {
            const __mmask16 some = columns - n < SIDE ? (1 << (columns - n)) - 1 : 0xffff;
            const __m256i narrow = bias ? _mm256_maskz_loadu_epi16(some, bias + n) : __m256i{};
            const __m512 add = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
            const __m512 sum = _mm512_add_ps(_mm512_load_ps(c + r * width + n), add);
            _mm256_mask_storeu_epi16(y + r * y_row + n, some, (__m256i)_mm512_cvtneps_pbh(sum));
        }
}

// Columns [first, end) of y; both are multiples of 32, but that N may end before.
void linear(bf16* y, const bf16* x, const char* w, const bf16* bias, i64 rows, i64 K, i64 N, i64 first, i64 end) {
    const i64 tiles = K / TILE_K, run = tiles * TILE_BYTES, unit = UNIT * SIDE;
    alignas(64) float c[4 * SIDE * SIDE];
    i64 configured = 0;
    for (i64 top = 0; top < rows; top += ROWS)
        for (i64 n = first, width; n < end; n += width) {
            width = rows <= SIDE && n + 2 * unit <= end ? 2 * unit : unit;
            for (i64 m = top, bottom = std::min(rows, top + ROWS); m < bottom; m += 2 * SIDE) {
                const i64 some = std::min(2 * SIDE, bottom - m), second = some > SIDE ? some - SIDE : some;
                const bf16 *const from = x + m * K, *const lower = some > SIDE ? from + SIDE * K : from;
                if (configured != some) configure(std::min(some, SIDE), second), configured = some;
                const char* const weights = w + n / SIDE * run;
                if (width > unit) wide<true>(c, from, 2 * K, weights, run, tiles);
                else if (m == top) high<true>(c, from, lower, 2 * K, weights, run, tiles);
                else high<false>(c, from, lower, 2 * K, weights, run, tiles);
                write_out(y + m * N + n, N, c, width, some, std::min(width, N - n), bias ? bias + n : nullptr);
            }
        }
    _tile_release();
}
#endif

}  // namespace

extern "C" {

// y[rows][N] = x[rows][K] · wᵀ + bias, if pdserve_amx(); K is a multiple of 32, and w has columns up to a multiple of 32.
void pdserve_linear(void* y, const void* x, const void* w, const void* bias, i64 rows, i64 K, i64 N, i64 threads) {
#ifdef PDSERVE_AMX
    const i64 units = (N + UNIT * SIDE - 1) / (UNIT * SIDE);
#pragma omp parallel for num_threads((int)threads) schedule(static)
    for (i64 t = 0; t < threads; t++)
        linear((bf16*)y, (const bf16*)x, (const char*)w, (const bf16*)bias, rows, K, N, units * t / threads * UNIT * SIDE,
               units * (t + 1) / threads * UNIT * SIDE);
#endif
}
}
