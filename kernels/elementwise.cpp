// Element-wise operations of a decoder on CPUs, each in one pass over its input: norms, rotary embeddings, gates, and the
// argmax of the logits. Values are rounded to their type wherever transformers' modules round them: after each operation.

#include <algorithm>
#include <cmath>
#include <limits>

#include "vectors.h"

namespace {

template <typename T>
void rms_norm(T* y, const T* x, const T* w, i64 rows, i64 n, float eps, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * n > 1 << 16)
    for (i64 r = 0; r < rows; r++) {
        const T* source = x + r * n;
        T* target = y + r * n;
        vf squares{};
        for (i64 i = 0; i < n; i += W) {
            const vf v = load(source + i, n - i);
            squares = mul_add(v, v, squares);
        }
        const float factor = 1 / std::sqrt(sum(squares) / n + eps);
        for (i64 i = 0; i < n; i += W)
            store(target + i, load(w + i, n - i) * round_to<T>(load(source + i, n - i) * factor), n - i);
    }
}

// y = x · cos + (-x2, x1) · sin for the first R of one head's D elements, with x1 and x2 their halves. Products have type C.
template <typename T, typename C>
void rotate(T* y, const T* x, const C* cos, const C* sin, i64 D, i64 R) {
    const i64 half = R / 2;
    for (i64 i = 0; i < half; i += W) {
        const i64 j = half + i, n = half - i;
        const vf a = load(x + i, n), b = load(x + j, n);
        store(y + i, round_to<C>(a * load(cos + i, n)) - round_to<C>(b * load(sin + i, n)), n);
        store(y + j, round_to<C>(b * load(cos + j, n)) + round_to<C>(a * load(sin + j, n)), n);
    }
    std::memcpy(y + R, x + R, (D - R) * sizeof(T));
}

// Heads of q or k: input x is strided, output y contiguous.
struct Heads {
    void* y;
    const void* x;
    i64 x_token, x_head, count;
};

template <typename T, typename C>
void rotary(const Heads (&q_and_k)[2], const C* cos, const C* sin, i64 tokens, i64 D, i64 R, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (tokens * q_and_k[0].count * D > 1 << 16)
    for (i64 t = 0; t < tokens; t++)
        for (const Heads& a : q_and_k)
            for (i64 h = 0; h < a.count; h++)
                rotate((T*)a.y + (t * a.count + h) * D, (const T*)a.x + t * a.x_token + h * a.x_head, cos + t * R,
                       sin + t * R, D, R);
}

template <typename T, vf activation(vf)>
void gate(T* x, const T* up, i64 n, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (n > 1 << 16)
    for (i64 i = 0; i < n; i += W)
        store(x + i, round_to<T>(activation(load(x + i, n - i))) * load(up + i, n - i), n - i);
}

// Index of the first maximum of a row. Vectors find the block that contains it, a second scan the index in the block.
template <typename T>
i64 argmax(const T* x, i64 n) {
    constexpr i64 BLOCK = 64 * W;
    float best = -std::numeric_limits<float>::infinity();
    i64 index = 0;
    for (i64 first = 0; first < n; first += BLOCK) {
        const i64 full = std::min(n - first, BLOCK) / W * W, end = std::min(n, first + BLOCK);
        vf largest = splat(best);
        for (i64 i = first; i < first + full; i += W) largest = vmax(load(x + i), largest);
        float lanes[W];
        store(lanes, largest);
        const bool larger = *std::max_element(lanes, lanes + W) > best;
        for (i64 i = larger ? first : first + full; i < end; i++)
            if (to_float(x[i]) > best) best = to_float(x[i]), index = i;
    }
    return index;
}

}  // namespace

// dtypes: 0 float32, 1 bfloat16, 2 float16.
extern "C" {

// y = w · x / √(mean(x²) + eps), all of one dtype, to which the quotient is rounded before the product.
void pdserve_rms_norm(i64 dtype, void* y, const void* x, const void* w, i64 rows, i64 n, float eps, i64 threads) {
    if (dtype == 0) rms_norm((float*)y, (const float*)x, (const float*)w, rows, n, eps, threads);
    if (dtype == 1) rms_norm((bf16*)y, (const bf16*)x, (const bf16*)w, rows, n, eps, threads);
    if (dtype == 2) rms_norm((fp16*)y, (const fp16*)x, (const fp16*)w, rows, n, eps, threads);
}

// Rotary embedding of q [T, H, D] and k [T, G, D] by cos and sin [T, R], which have the same dtype or float32.
void pdserve_rotary(i64 dtype, i64 table, void* q_out, const void* q, i64 q_token, i64 q_head, i64 H, void* k_out,
                    const void* k, i64 k_token, i64 k_head, i64 G, const void* cos, const void* sin, i64 T, i64 D, i64 R,
                    i64 threads) {
    const Heads q_and_k[2] = {{q_out, q, q_token, q_head, H}, {k_out, k, k_token, k_head, G}};
    const float *cos_f32 = (const float*)cos, *sin_f32 = (const float*)sin;
    if (dtype == 1 && table == 0) rotary<bf16>(q_and_k, cos_f32, sin_f32, T, D, R, threads);
    if (dtype == 1 && table == 1) rotary<bf16>(q_and_k, (const bf16*)cos, (const bf16*)sin, T, D, R, threads);
    if (dtype == 2 && table == 0) rotary<fp16>(q_and_k, cos_f32, sin_f32, T, D, R, threads);
    if (dtype == 2 && table == 2) rotary<fp16>(q_and_k, (const fp16*)cos, (const fp16*)sin, T, D, R, threads);
}

// x = activation(x) · up for n elements; activation: 0 silu, 1 gelu (tanh approximation).
void pdserve_gate(i64 dtype, i64 activation, void* x, const void* up, i64 n, i64 threads) {
    if (dtype == 1 && activation == 0) gate<bf16, silu>((bf16*)x, (const bf16*)up, n, threads);
    if (dtype == 1 && activation == 1) gate<bf16, gelu_tanh>((bf16*)x, (const bf16*)up, n, threads);
    if (dtype == 2 && activation == 0) gate<fp16, silu>((fp16*)x, (const fp16*)up, n, threads);
    if (dtype == 2 && activation == 1) gate<fp16, gelu_tanh>((fp16*)x, (const fp16*)up, n, threads);
}

// indices[r] = first index of the maximum of row r, which has n elements.
void pdserve_argmax(i64 dtype, i64* indices, const void* x, i64 rows, i64 n, i64 threads) {
#pragma omp parallel for num_threads((int)threads) if (rows * n > 1 << 16)
    for (i64 r = 0; r < rows; r++) {
        if (dtype == 0) indices[r] = argmax((const float*)x + r * n, n);
        if (dtype == 1) indices[r] = argmax((const bf16*)x + r * n, n);
        if (dtype == 2) indices[r] = argmax((const fp16*)x + r * n, n);
    }
}

}  // extern "C"
