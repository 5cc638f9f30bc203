// What a decoder computes number by number, each in one pass over its input: norms, rotary embeddings, gates, and the largest
// of the logits; for CPUs. Numbers are rounded to their type where transformers' modules round them: after each operation.

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

template <typename T>
void rms_norm(T* y, const T* x, const T* w, i64 rows, i64 n, float eps, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * n > 1 << 16)
    for (i64 r = 0; r < rows; r++) {
        const T* from = x + r * n;
        T* to = y + r * n;
        vf squares{};
        for (i64 i = 0; i < n; i += W) {
            const vf v = load(from + i, n - i);
            squares += v * v;
        }
        const float factor = 1 / std::sqrt(sum(squares) / n + eps);
        for (i64 i = 0; i < n; i += W)
            store(to + i, load(w + i, n - i) * rounded<T>(load(from + i, n - i) * factor), n - i);
    }
}

// y = x · cos + (-x2, x1) · sin for the first R of one head's D numbers, whose halves are x1 and x2. Products are of type C.
template <typename T, typename C>
void rotate(T* y, const T* x, const C* cos, const C* sin, i64 D, i64 R) {
    const i64 half = R / 2;
    for (i64 i = 0; i < half; i += W) {
        const i64 j = half + i, n = half - i;
        const vf a = load(x + i, n), b = load(x + j, n);
        store(y + i, rounded<C>(a * load(cos + i, n)) - rounded<C>(b * load(sin + i, n)), n);
        store(y + j, rounded<C>(b * load(cos + j, n)) + rounded<C>(a * load(sin + j, n)), n);
    }
    std::memcpy(y + R, x + R, (D - R) * sizeof(T));
}

// The heads of q or k: x strided, y in one piece.
struct Heads {
    void* y;
    const void* x;
    i64 x_token, x_head, count;
};

template <typename T, typename C>
void rotary(const Heads (&both)[2], const C* cos, const C* sin, i64 tokens, i64 D, i64 R, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (tokens * both[0].count * D > 1 << 16)
    for (i64 t = 0; t < tokens; t++)
        for (const Heads& a : both)
            for (i64 h = 0; h < a.count; h++)
                rotate((T*)a.y + (t * a.count + h) * D, (const T*)a.x + t * a.x_token + h * a.x_head, cos + t * R,
                       sin + t * R, D, R);
}

template <typename T, vf activation(vf)>
void gate(T* x, const T* up, i64 n, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (n > 1 << 16)
    for (i64 i = 0; i < n; i += W)
        store(x + i, rounded<T>(activation(load(x + i, n - i))) * load(up + i, n - i), n - i);
}

// The first of a row's largest numbers: the block that has it is found by vectors, the place in the block by another look.
template <typename T>
i64 argmax(const T* x, i64 n) {
    constexpr i64 BLOCK = 64 * W;
    float most = -std::numeric_limits<float>::infinity();
    i64 found = 0;
    for (i64 first = 0; first < n; first += BLOCK) {
        const i64 whole = std::min(n - first, BLOCK) / W * W, end = std::min(n, first + BLOCK);
        vf largest = splat(most);
        for (i64 i = first; i < first + whole; i += W) largest = vmax(load(x + i), largest);
        float lanes[W];
        store(lanes, largest);
        const bool larger = *std::max_element(lanes, lanes + W) > most;
        for (i64 i = larger ? first : first + whole; i < end; i++)
            if (to_float(x[i]) > most) most = to_float(x[i]), found = i;
    }
    return found;
}

}  // namespace

// dtypes: 0 float32, 1 bfloat16, 2 float16.
extern "C" {

// y = w · x / √(mean(x²) + eps), all three of one dtype, to which the quotient is rounded before the product.
void pdserve_rms_norm(i64 dtype, void* y, const void* x, const void* w, i64 rows, i64 n, float eps, i64 threads) {
    if (dtype == 0) rms_norm((float*)y, (const float*)x, (const float*)w, rows, n, eps, threads);
    if (dtype == 1) rms_norm((bf16*)y, (const bf16*)x, (const bf16*)w, rows, n, eps, threads);
    if (dtype == 2) rms_norm((fp16*)y, (const fp16*)x, (const fp16*)w, rows, n, eps, threads);
}

// Rotary embedding of q [T, H, D] and k [T, G, D] by cos and sin [T, R], which are of the same dtype or float32.
void pdserve_rotary(i64 dtype, i64 table, void* q_out, const void* q, i64 q_token, i64 q_head, i64 H, void* k_out,
                    const void* k, i64 k_token, i64 k_head, i64 G, const void* cos, const void* sin, i64 T, i64 D, i64 R,
                    i64 threads) {
    const Heads both[2] = {{q_out, q, q_token, q_head, H}, {k_out, k, k_token, k_head, G}};
    const float *wide_cos = (const float*)cos, *wide_sin = (const float*)sin;
    if (dtype == 1 && table == 0) rotary<bf16>(both, wide_cos, wide_sin, T, D, R, threads);
    if (dtype == 1 && table == 1) rotary<bf16>(both, (const bf16*)cos, (const bf16*)sin, T, D, R, threads);
    if (dtype == 2 && table == 0) rotary<fp16>(both, wide_cos, wide_sin, T, D, R, threads);
    if (dtype == 2 && table == 2) rotary<fp16>(both, (const fp16*)cos, (const fp16*)sin, T, D, R, threads);
}

// x = activation(x) · up, n numbers; the activation is 0 silu, 1 gelu by its approximation with tanh.
void pdserve_gate(i64 dtype, i64 activation, void* x, const void* up, i64 n, i64 threads) {
    if (dtype == 1 && activation == 0) gate<bf16, silu>((bf16*)x, (const bf16*)up, n, threads);
    if (dtype == 1 && activation == 1) gate<bf16, gelu_tanh>((bf16*)x, (const bf16*)up, n, threads);
    if (dtype == 2 && activation == 0) gate<fp16, silu>((fp16*)x, (const fp16*)up, n, threads);
    if (dtype == 2 && activation == 1) gate<fp16, gelu_tanh>((fp16*)x, (const fp16*)up, n, threads);
}

// places[r] = the first of the largest of row r's n numbers.
void pdserve_argmax(i64 dtype, i64* places, const void* x, i64 rows, i64 n, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * n > 1 << 16)
    for (i64 r = 0; r < rows; r++) {
        if (dtype == 0) places[r] = argmax((const float*)x + r * n, n);
        if (dtype == 1) places[r] = argmax((const bf16*)x + r * n, n);
        if (dtype == 2) places[r] = argmax((const fp16*)x + r * n, n);
    }
}

}  // extern "C"
