// Low-rank products of adapters, y += scale · (x · Aᵀ) · B, over rows that are grouped by adapter.
//
// A row's result does not depend on the other rows, their adapters or the threads, by construction. `shrink` sums over K in
// chunks of CHUNK terms, each in the lanes of one vector in the order of K, and adds the chunks in their order. `expand` adds
// the R terms in their order, in float32, and rounds once. Chunks, like rows and parts of R and N, are tasks of their own.

#include <algorithm>
#include <vector>

#include "vectors.h"

namespace {

constexpr i64 CHUNK = 1024, BLOCK_ROWS = 16, BLOCK_RANK = 16, BLOCK_N = 512;
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

// h[r][j] = sum of x[rows[r]][k] · a[j][k] over a chunk, for ROWS rows and TILE_RANK rows of A.
template <int ROWS, class T>
inline void dots(float* h, i64 stride, const T* x, const i64* rows, const T* a, i64 K, i64 count) {
    vf sums[ROWS][TILE_RANK] = {};
    const auto add = [&](i64 k, i64 n) {
        vf weights[TILE_RANK];
        for (int j = 0; j < TILE_RANK; j++) weights[j] = load(a + j * K + k, n);
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
inline void dots_of_rows(float* h, i64 stride, const T* x, const i64* rows, i64 num_rows, const T* a, i64 K, i64 count) {
    for (; num_rows >= ROWS; num_rows -= ROWS, rows += ROWS, h += ROWS * stride) dots<ROWS>(h, stride, x, rows, a, K, count);
    if constexpr (ROWS > 1)
        if (num_rows) dots_of_rows<ROWS - 1>(h, stride, x, rows, num_rows, a, K, count);
}

// h [row in order][chunk][max_rank]
template <class T>
void shrink(float* h, const T* x, const Rows& of, const Slot* slots, i64 K, i64 max_rank, int threads) {
    const i64 chunks = (K + CHUNK - 1) / CHUNK, parts = (max_rank + BLOCK_RANK - 1) / BLOCK_RANK;
    const std::vector<Task> tasks = blocks(of, slots);
    const i64 per_task = chunks * parts, stride = chunks * max_rank;
#pragma omp parallel num_threads(threads) if (of.starts[of.slots] * K * max_rank > 1 << 16)
    {
#pragma omp for schedule(dynamic)
        for (i64 t = 0; t < (i64)tasks.size() * per_task; t++) {
            const Task& task = tasks[t / per_task];
            const Slot& slot = slots[task.slot];
            const i64 chunk = t % per_task / parts, part = t % parts, k = chunk * CHUNK;
            const i64 end = std::min((part + 1) * BLOCK_RANK, slot.R);
            for (i64 j = part * BLOCK_RANK; j < end; j += TILE_RANK)
                dots_of_rows<TILE_ROWS>(h + task.first * stride + chunk * max_rank + j, stride, x + k, of.rows + task.first,
                                        task.count, (const T*)slot.a + j * K + k, K, std::min(CHUNK, K - k));
        }
#pragma omp for schedule(static)
        for (i64 t = 0; t < (i64)tasks.size(); t++) {
            const Slot& slot = slots[tasks[t].slot];
            for (i64 i = tasks[t].first; i < tasks[t].first + tasks[t].count; i++)
                for (i64 j = 0; j < slot.R; j++) {
                    float* const row = h + i * stride + j;
                    for (i64 chunk = 1; chunk < chunks; chunk++) row[0] += row[chunk * max_rank];
                    row[0] *= (float)slot.scale;
                }
        }
    }
}

// Columns [n, n + VECTORS · W) of ROWS rows of y.
template <int ROWS, int VECTORS, class T>
inline void add_columns(T* y, const float* h, i64 stride, const i64* rows, const T* b, i64 R, i64 N, i64 n) {
    vf sums[ROWS][VECTORS] = {};
    for (i64 j = 0; j < R; j++) {
        vf weights[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            weights[v] = n + v * W < N ? load(b + j * N + n + v * W, N - n - v * W) : vf{};
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

template <int ROWS, class T>
inline void add_rows(T* y, const float* h, i64 stride, const i64* rows, i64 num_rows, const Slot& slot, i64 N, i64 n) {
    for (; num_rows >= ROWS; num_rows -= ROWS, rows += ROWS, h += ROWS * stride)
        for (i64 column = n; column < std::min(n + BLOCK_N, N); column += TILE_VECTORS * W)
            add_columns<ROWS, TILE_VECTORS>(y, h, stride, rows, (const T*)slot.b, slot.R, N, column);
    if constexpr (ROWS > 1)
        if (num_rows) add_rows<ROWS - 1>(y, h, stride, rows, num_rows, slot, N, n);
}

template <class T>
void expand(T* y, const float* h, i64 stride, const Rows& of, const Slot* slots, i64 N, int threads) {
    const i64 parts = (N + BLOCK_N - 1) / BLOCK_N;
    const std::vector<Task> tasks = blocks(of, slots);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (of.starts[of.slots] * N > 1 << 13)
    for (i64 t = 0; t < (i64)tasks.size() * parts; t++) {
        const Task& task = tasks[t / parts];
        add_rows<TILE_ROWS>(y, h + task.first * stride, stride, of.rows + task.first, task.count, slots[task.slot], N,
                            t % parts * BLOCK_N);
    }
}

}  // namespace

extern "C" {

// h[i][0][:R] = scale · x[rows[i]] · aᵀ for each row in order, with the matrix of its slot; h is [rows][chunks of K][max_rank].
// dtypes: 0 float32, 1 bfloat16, 2 float16.
void pdserve_shrink(i64 dtype, float* h, const void* x, const i64* rows, const i64* starts, i64 num_slots, const void* slots,
                    i64 K, i64 max_rank, i64 threads) {
    const Rows of{rows, starts, num_slots};
    const auto* const table = (const Slot*)slots;
    if (dtype == 0) shrink(h, (const float*)x, of, table, K, max_rank, (int)threads);
    if (dtype == 1) shrink(h, (const bf16*)x, of, table, K, max_rank, (int)threads);
    if (dtype == 2) shrink(h, (const fp16*)x, of, table, K, max_rank, (int)threads);
}

// y[rows[i]] += h[i][0][:R] · b, for rows of h that are `stride` numbers apart.
void pdserve_expand(i64 dtype, void* y, const float* h, i64 stride, const i64* rows, const i64* starts, i64 num_slots,
                    const void* slots, i64 N, i64 threads) {
    const Rows of{rows, starts, num_slots};
    const auto* const table = (const Slot*)slots;
    if (dtype == 0) expand((float*)y, h, stride, of, table, N, (int)threads);
    if (dtype == 1) expand((bf16*)y, h, stride, of, table, N, (int)threads);
    if (dtype == 2) expand((fp16*)y, h, stride, of, table, N, (int)threads);
}

int pdserve_shrink_chunk() { return CHUNK; }
}
