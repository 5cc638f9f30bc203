// Low-rank products of adapters, y += scale · (x · Aᵀ) · B, over rows that are grouped by adapter.
//
// A row's result does not depend on the other rows, their adapters or the threads, by construction. `shrink` sums over K in
// chunks of CHUNK terms, each in the lanes of one vector in the order of K. `expand` adds the chunks in their order, then
// the R terms in theirs, in float32, and rounds once.
//
// While sequences decode, the time is that of reading A and B: each thread reads runs of several rows at once. Where many rows
// have an adapter, as those of prompts, 16-bit numbers are widened once for all their products.

#include <omp.h>

#include <algorithm>
#include <vector>

#include "tiles.h"
#include "vectors.h"

namespace {

constexpr i64 CHUNK = 1024, BLOCK_ROWS = 16, PANEL = 64;
constexpr i64 AHEAD = 256;  // numbers of a row of A that are fetched before they are read; of B, those of the next panel are
constexpr size_t LINE = 64;  // bytes that are fetched at once
constexpr i64 SHARED_WORK = 1 << 14;  // products of numbers from which on further threads help
constexpr int TILE_ROWS = W == 16 ? 4 : 2, TILE_RANK = 4, TILE_VECTORS = W == 16 ? 4 : 2;

// An adapter's matrices for one layer: a [R][K] and b [R][N]. R is 0, where it has none, or a multiple of TILE_RANK.
struct Slot {
    const void *a, *b;
    i64 R;
    double scale;
};

// Rows that have an adapter, by adapter: those of slot s are rows[starts[s]], …, rows[starts[s + 1] - 1].
struct Rows {
    const i64 *rows, *starts;
    i64 slots;
};

struct Task {
    i64 slot, first, count;  // of rows
};

// Blocks of rows of one adapter each, of those that the layer has an adapter for.
std::vector<Task> blocks(const Rows& of, const Slot* slots) {
    std::vector<Task> tasks;
    for (i64 s = 0; s < of.slots; s++)
        for (i64 first = of.starts[s]; slots[s].R && first < of.starts[s + 1]; first += BLOCK_ROWS)
            tasks.push_back({s, first, std::min(BLOCK_ROWS, of.starts[s + 1] - first)});
    return tasks;
}

template <class T>
void widen(float* to, const T* from, i64 count) {
    for (i64 i = 0; i < count; i += W) store(to + i, load(from + i, count - i), count - i);
}

// h[r][j] = sum of x[rows[r]][k] · a[j][k] over a chunk, for ROWS rows and TILE_RANK rows of A, which are `length` apart.
template <int ROWS, class T>
inline void dots(float* h, i64 stride, const T* x, const i64* rows, i64 K, const T* a, i64 length, i64 count) {
    vf sums[ROWS][TILE_RANK] = {};
    const auto add = [&](i64 k, i64 n) {
        vf weights[TILE_RANK];
        for (int j = 0; j < TILE_RANK; j++) __builtin_prefetch(a + j * length + k + AHEAD);
        for (int j = 0; j < TILE_RANK; j++) weights[j] = load(a + j * length + k, n);
        for (int r = 0; r < ROWS; r++) {
            const vf factor = load(x + rows[r] * K + k, n);
            for (int j = 0; j < TILE_RANK; j++) sums[r][j] = mul_add(factor, weights[j], sums[r][j]);
        }
    };
    i64 k = 0;
    for (; k + W <= count; k += W) add(k, W);
    if (k < count) add(k, count - k);
    for (int r = 0; r < ROWS; r++) sum4(sums[r], h + r * stride);
}

template <int ROWS, class T>
inline void dots_of_rows(float* h, i64 stride, const T* x, const i64* rows, i64 num_rows, i64 K, const T* a, i64 length,
                         i64 count) {
    for (; num_rows >= ROWS; num_rows -= ROWS, rows += ROWS, h += ROWS * stride)
        dots<ROWS>(h, stride, x, rows, K, a, length, count);
    if constexpr (ROWS > 1)
        if (num_rows) dots_of_rows<ROWS - 1>(h, stride, x, rows, num_rows, K, a, length, count);
}

// A thread's part of h [row in order][chunk][max_rank]: of all pieces, which are tiles of A within a chunk, it has a run.
template <class T>
void shrink(float* h, const T* x, const Rows& of, const Slot* slots, const std::vector<Task>& tasks, i64 K, i64 max_rank,
            bool widens, i64 thread, i64 threads) {
    const i64 chunks = (K + CHUNK - 1) / CHUNK, stride = chunks * max_rank;
    const amx::Buffer<float> wide_x(widens ? BLOCK_ROWS * K : 1), wide_a(widens ? TILE_RANK * CHUNK : 1);
    i64 in_order[BLOCK_ROWS], pieces = 0, at = 0;
    for (i64 i = 0; i < BLOCK_ROWS; i++) in_order[i] = i;
    for (const Task& task : tasks) pieces += slots[task.slot].R / TILE_RANK * chunks;
    const i64 first = pieces * thread / threads, end = pieces * (thread + 1) / threads;
    for (const Task& task : tasks) {
        const i64 count = slots[task.slot].R / TILE_RANK * chunks;
        const i64 from = std::max((i64)0, first - at), to = std::min(count, end - at);
        const i64* const rows = of.rows + task.first;
        const bool is_wide = widens && task.count > TILE_ROWS;
        for (i64 i = 0; is_wide && from < to && i < task.count; i++) widen(wide_x + i * K, x + rows[i] * K, K);
        for (i64 i = from; i < to; i++) {
            const i64 tile = i / chunks, chunk = i % chunks, k = chunk * CHUNK, length = std::min(CHUNK, K - k);
            const T* const a = (const T*)slots[task.slot].a + tile * TILE_RANK * K + k;
            float* const sums = h + task.first * stride + chunk * max_rank + tile * TILE_RANK;
            if (is_wide) {
                for (i64 j = 0; j < TILE_RANK; j++) widen(wide_a + j * CHUNK, a + j * K, length);
                dots_of_rows<TILE_ROWS>(sums, stride, wide_x + k, in_order, task.count, K, (const float*)wide_a, CHUNK, length);
            } else {
                dots_of_rows<TILE_ROWS>(sums, stride, x + k, rows, task.count, K, a, K, length);
            }
        }
        at += count;
    }
}

// y[rows[r]][n] += sum of h[r][j] · b[j][n] for ROWS rows and VECTORS · W columns from n on; rows of b, which begin with column
// n, are `length` apart.
template <int ROWS, int VECTORS, class T, class B>
inline void add_columns(T* y, const float* h, i64 stride, const i64* rows, const B* b, i64 length, i64 R, i64 N, i64 n) {
    vf sums[ROWS][VECTORS] = {};
    for (i64 j = 0; j < R; j++) {
        vf weights[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            if (v * W * sizeof(B) % LINE == 0) __builtin_prefetch(b + j * length + v * W + PANEL);
        for (int v = 0; v < VECTORS; v++)
            weights[v] = n + v * W < N ? load(b + j * length + v * W, N - n - v * W) : vf{};
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) sums[r][v] = mul_add(splat(h[r * stride + j]), weights[v], sums[r][v]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
            if (const i64 first = n + v * W, left = N - first; left > 0) {
                T* const to = y + rows[r] * N + first;
                store(to, load(to, left) + sums[r][v], left);
            }
}

// The same for a panel.
template <int ROWS, class T, class B>
inline void add_rows(T* y, const float* h, i64 stride, const i64* rows, i64 num_rows, const B* b, i64 length, i64 R, i64 N,
                     i64 n) {
    constexpr int VECTORS = ROWS == 1 && W < 16 ? 2 * TILE_VECTORS : TILE_VECTORS;
    for (; num_rows >= ROWS; num_rows -= ROWS, rows += ROWS, h += ROWS * stride)
        for (i64 column = 0; column < std::min(PANEL, N - n); column += VECTORS * W)
            add_columns<ROWS, VECTORS>(y, h, stride, rows, b + column, length, R, N, n + column);
    if constexpr (ROWS > 1)
        if (num_rows) add_rows<ROWS - 1>(y, h, stride, rows, num_rows, b, length, R, N, n);
}

// A thread's part of y: it has the same columns of all rows.
template <class T>
void expand(T* y, const float* h, const Rows& of, const Slot* slots, const std::vector<Task>& tasks, i64 chunks, i64 N,
            i64 max_rank, bool widens, i64 thread, i64 threads) {
    const i64 panels = (N + PANEL - 1) / PANEL, first = panels * thread / threads, end = panels * (thread + 1) / threads;
    const amx::Buffer<float> sums(BLOCK_ROWS * max_rank), wide_b(widens ? max_rank * PANEL : 1);
    for (const Task& task : tasks) {
        const Slot& slot = slots[task.slot];
        for (i64 i = 0; i < task.count; i++)
            for (i64 j = 0; j < slot.R; j++) {
                const float* const row = h + (task.first + i) * chunks * max_rank + j;
                float sum = row[0];
                for (i64 chunk = 1; chunk < chunks; chunk++) sum += row[chunk * max_rank];
                sums[i * slot.R + j] = sum * (float)slot.scale;
            }
        for (i64 n = first * PANEL; n < std::min(N, end * PANEL); n += PANEL) {
            const T* const b = (const T*)slot.b + n;
            const i64* const rows = of.rows + task.first;
            if (widens && task.count > TILE_ROWS) {
                for (i64 j = 0; j < slot.R; j++) widen(wide_b + j * PANEL, b + j * N, std::min(PANEL, N - n));
                add_rows<TILE_ROWS>(y, (const float*)sums, slot.R, rows, task.count, (const float*)wide_b, PANEL, slot.R, N, n);
            } else {
                add_rows<TILE_ROWS>(y, (const float*)sums, slot.R, rows, task.count, b, N, slot.R, N, n);
            }
        }
    }
}

template <class T>
void add(T* y, float* h, const T* x, const Rows& of, const Slot* slots, i64 K, i64 N, i64 max_rank, int threads) {
    const std::vector<Task> tasks = blocks(of, slots);
    i64 work = 0;
    bool widens = false;
    for (const Task& task : tasks) {
        work += task.count * slots[task.slot].R * (K + N);
        widens |= sizeof(T) < sizeof(float) && task.count > TILE_ROWS;
    }
#pragma omp parallel num_threads(threads) if (work > SHARED_WORK)
    {
        const i64 thread = omp_get_thread_num(), count = omp_get_num_threads();
        shrink(h, x, of, slots, tasks, K, max_rank, widens, thread, count);
#pragma omp barrier
        expand(y, h, of, slots, tasks, (K + CHUNK - 1) / CHUNK, N, max_rank, widens, thread, count);
    }
}

}  // namespace

extern "C" {

// y[rows[i]] += scale · (x[rows[i]] · aᵀ) · b for each row in order, with the matrices of its slot. h has room for
// [rows][chunks of K][max_rank] sums. dtypes: 0 float32, 1 bfloat16, 2 float16.
void pdserve_add_low_rank(i64 dtype, void* y, float* h, const void* x, const i64* rows, const i64* starts, i64 num_slots,
                          const void* slots, i64 K, i64 N, i64 max_rank, i64 threads) {
    const Rows of{rows, starts, num_slots};
    const auto* const table = (const Slot*)slots;
    if (dtype == 0) add((float*)y, h, (const float*)x, of, table, K, N, max_rank, (int)threads);
    if (dtype == 1) add((bf16*)y, h, (const bf16*)x, of, table, K, N, max_rank, (int)threads);
    if (dtype == 2) add((fp16*)y, h, (const fp16*)x, of, table, K, N, max_rank, (int)threads);
}

int pdserve_shrink_chunk() { return CHUNK; }
}
