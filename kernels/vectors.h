// Float vectors of the processor's width for all kernels: widening loads, rounding stores, exp, tanh, activations.
// Written with the compilers' vector types, so that one source serves AVX-512, AVX2 and NEON.

#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace {

using i64 = int64_t;

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;  // NEON, SSE
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));

struct bf16 { uint16_t bits; };
typedef _Float16 fp16;

inline vf splat(float x) { return x - vf{}; }
// The same value, in a register: compilers would rather load it for each of its uses, and AVX2 loads no more than it multiplies.
inline vf in_register(vf x) {
#if defined(__AVX__) && !defined(__AVX512F__)
    asm("" : "+x"(x));
#endif
    return x;
}
inline vf load(const float* p) { vf v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
inline vf load(const bf16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)  // compilers before 2024 widen halves one by one
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#endif
    typedef uint16_t half __attribute__((vector_size(2 * W)));
    half h;
    std::memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
inline vf load(const fp16* p) {
#if defined(__AVX512F__)  // compilers before 2024 convert element by element
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
    typedef fp16 half __attribute__((vector_size(2 * W)));
    half h;
    std::memcpy(&h, p, sizeof h);
    return __builtin_convertvector(h, vf);
}
inline float to_float(float x) { return x; }
inline float to_float(fp16 x) { return (float)x; }
inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
inline void from_float(float& to, float x) { to = x; }
inline void from_float(fp16& to, float x) { to = (fp16)x; }
inline void from_float(bf16& to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    to.bits = (uint16_t)(x == x ? rounded : 0x7fc0);
}
inline void store(bf16* p, vf v) {
#if defined(__AVX512BF16__)
    const __m256bh h = _mm512_cvtneps_pbh((__m512)v);  // values below 1e-38 become 0
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const vu bits = (vu)v, upper = v == v ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : vu{} + 0x7fc0;
    const __m128i h = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)upper), _mm256_extracti128_si256((__m256i)upper, 1));
#else
    typedef uint16_t half __attribute__((vector_size(2 * W)));
    const vu bits = (vu)v;
    const half h = __builtin_convertvector(v == v ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : vu{} + 0x7fc0, half);
#endif
    std::memcpy(p, &h, sizeof h);
}
inline void store(fp16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    typedef fp16 half __attribute__((vector_size(2 * W)));
    const half h = __builtin_convertvector(v, half);
    std::memcpy(p, &h, sizeof h);
#endif
}

// Load or store of the first n elements only, if n < W, for the end of a row. The other lanes are 0.
template <class T>
inline vf load(const T* p, i64 n) {
    if (n >= W) return load(p);
    T part[W] = {};
    std::memcpy(part, p, n * sizeof(T));
    return load(part);
}
template <class T>
inline void store(T* p, vf v, i64 n) {
    if (n >= W) return store(p, v);
    T part[W];
    store(part, v);
    std::memcpy(p, part, n * sizeof(T));
}

// Round to the precision of T.
template <class T>
inline vf round_to(vf x) {
    T y[W];
    store(y, x);
    return load(y);
}
template <>
inline vf round_to<bf16>(vf x) {
    const vu bits = (vu)x;
    return x == x ? (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u) : x;
}

inline vf vmax(vf a, vf b) { return a > b ? a : b; }

// a · b + c, rounded once where the processor can. Nothing else is: the compiler would choose by context (-ffp-contract=off).
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
inline float mul_add(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
inline float mul_add(float a, float b, float c) { return a * b + c; }
#endif
inline vf mul_add(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX__) && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// Sum of the lanes, by halves: lane i + lane (i + W/2), and so on.
inline float sum(vf v) {
    float x[W];
    store(x, v);
    for (int n = W / 2; n; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}

// to[i] = sum(v[i]), for four vectors at once, with a quarter of the shuffles.
inline void sum4(const vf* v, float* to) {
#if defined(__AVX512F__)
    const __m512 a = (__m512)v[0], b = (__m512)v[1], c = (__m512)v[2], d = (__m512)v[3];
    const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xee);
    const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44) + _mm512_shuffle_f32x4(c, d, 0xee);
    __m512 s = _mm512_shuffle_f32x4(ab, cd, 0x88) + _mm512_shuffle_f32x4(ab, cd, 0xdd);
    s += _mm512_permute_ps(s, 0x4e);
    s += _mm512_permute_ps(s, 0xb1);
    const __m512i lanes = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(to, _mm512_castps512_ps128(_mm512_permutexvar_ps(lanes, s)));
#elif defined(__AVX__)
    const auto halves = [](vf x) { return _mm256_castps256_ps128((__m256)x) + _mm256_extractf128_ps((__m256)x, 1); };
    const __m128 a = halves(v[0]), b = halves(v[1]), c = halves(v[2]), d = halves(v[3]);
    const __m128 ab = _mm_movelh_ps(a, b) + _mm_movehl_ps(b, a), cd = _mm_movelh_ps(c, d) + _mm_movehl_ps(d, c);
    _mm_storeu_ps(to, _mm_shuffle_ps(ab, cd, 0x88) + _mm_shuffle_ps(ab, cd, 0xdd));
#elif defined(__ARM_NEON) && defined(__aarch64__)
    const auto halves = [](vf x) { return vget_low_f32((float32x4_t)x) + vget_high_f32((float32x4_t)x); };
    const float32x2_t ab = vpadd_f32(halves(v[0]), halves(v[1])), cd = vpadd_f32(halves(v[2]), halves(v[3]));
    vst1q_f32(to, vcombine_f32(ab, cd));
#else
    for (int i = 0; i < 4; i++) to[i] = sum(v[i]);
#endif
}

// Transpose W × W floats in place.
inline void transpose_lanes(vf* x) {
#if defined(__AVX__) && !defined(__AVX512F__)
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps((__m256)x[i], (__m256)x[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps((__m256)x[i], (__m256)x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
            u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        x[i] = (vf)_mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        x[i + 4] = (vf)_mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
#else
    float y[W][W];
    for (int i = 0; i < W; i++) store(y[i], x[i]);
    for (int i = 0; i < W; i++)
        for (int j = 0; j < W; j++) x[i][j] = y[j][i];
#endif
}

// The order of lanes in which `sum` adds them if they are computed one after the other, and the fewest sums wait for others.
constexpr int bit_reversed(int n) {  // of a number below W
    int reversed = 0;
    for (int bit = 1; bit < W; bit *= 2) reversed = 2 * reversed + (n & bit ? 1 : 0);
    return reversed;
}

// e^x for x <= 0 to 2 ulp (Cephes); exactly 1 for 0, and 0 below -87.
inline vf exp_(vf x) {
    const vf y = vmax(x, splat(-87.f));
    const vf magic = splat(12582912.f);  // 1.5 × 2^23: adding it rounds to an integer
    const vf n = mul_add(y, splat(1.44269504f), magic) - magic;
    const vf r = mul_add(n, splat(2.12194440e-4f), mul_add(n, splat(-0.693359375f), y));
    vf p = splat(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = mul_add(p, r, splat(c));
    p = mul_add(p * r, r, r) + 1.f;
    const vf scale = (vf)((__builtin_convertvector(n, vi) + 127) << 23);
    return x > splat(-87.f) ? p * scale : vf{};
}

// tanh (Cephes): a polynomial near 0, where the quotient would suffer cancellation.
inline vf tanh_(vf x) {
    const vf a = vmax(x, -x), z = x * x;
    vf p = splat(-5.70498872745e-3f);
    for (const float c : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        p = mul_add(p, z, splat(c));
    const vf small = mul_add(p * z, x, x);
    const vf e = exp_(-2.f * a), t = (1.f - e) / (1.f + e);
    return a < splat(0.625f) ? small : (x < vf{} ? -t : t);
}

// Activations of gated MLPs.
inline vf sigmoid(vf x) {
    const vf e = exp_(-vmax(x, -x));
    return (x < vf{} ? e : splat(1.f)) / (1.f + e);
}
inline vf silu(vf x) { return x * sigmoid(x); }
inline vf gelu_tanh(vf x) { return x * sigmoid(1.595769122f * (x + 0.044715f * x * x * x)); }  // (1 + tanh u) / 2 = sigmoid 2u

}  // namespace
