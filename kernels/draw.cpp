// Draws tokens from logits with the Gumbel-max trick: the largest of logit / temperature + noise, among those that top-k, min-p
// and top-p keep. Exactly the token of the torch reference (engine/sampler.py), or none: a row is left to the reference where
// rounding could decide. What is slow there is spared here: two logarithms are taken only of tokens whose noise, rounded up by
// a look at its bits, would make them the largest so far; and nothing is sorted.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

using u64 = uint64_t;
typedef u64 vq __attribute__((vector_size(4 * W)));
typedef double vd __attribute__((vector_size(4 * W)));
typedef float hf __attribute__((vector_size(2 * W)));  // as many numbers as those have

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double MOST_NOISE = 37;    // noise is between -3.63 and 36.75, so nothing further below the largest than
constexpr double NEVER = -42;        // this can be drawn
constexpr double CLOSE = 1e-9;       // sums, and logits over the temperature: many times what rounding comes to
constexpr double CLOSE_SHARE = 1e-10;  // the same for a sum of probabilities
constexpr i64 LEAST_ROOM = 4096;

struct Settings {
    double temperature, top_k, top_p, min_p;  // as in SamplingParams
};

// SplitMix64's output for a state.
template <typename V>
inline V mix(V z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

inline double noise(u64 counter, i64 token) {
    const u64 bits = mix(counter + (u64)(token + 1) * GOLDEN) >> 11;
    const double uniform = std::min(((double)(i64)bits + 0.5) * 0x1p-53, 1 - 0x1p-53);
    return -std::log(-std::log(uniform));
}

inline bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#endif
    u64 parts[W / 2], all = 0;
    std::memcpy(parts, &mask, sizeof parts);
    for (u64 part : parts) all |= part;
    return all;
}

// e^x for x <= 0, to 1e-12; 0 below -700.
inline vd exp_(vd x) {
    const vd magic = 0x1.8p52 - vd{};  // adding it rounds to an integer, which the lowest bits then hold
    const vd y = x > -700. ? x : -700. - vd{}, shifted = y * 1.4426950408889634 + magic, n = shifted - magic;
    const vd r = (y - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33;
    vd p = 1. - vd{};
    for (int k = 11; k; k--) p = 1. + p * r * (1. / k);
    const vd scale = (vd)(((vq)shifted - (vq)magic + 1023) << 52);
    return x > -700. ? p * scale : vd{};
}

struct Token {
    float logit;
    int32_t id;
    double mass;  // its probability, times the sum over all tokens
};
// The order in which filters keep tokens.
inline bool goes_before(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

template <typename T>
struct Row {
    const T* x;
    i64 n;
    float most;  // the largest of x
    Settings s;

    double scaled(float logit) const { return ((double)logit - most) / s.temperature; }
    float logit(double scaled) const { return (float)(most + scaled * s.temperature); }

    double mass() const {
        vd total{};
        for (i64 i = 0; i < n; i += W) {
            float part[W];
            store(part, load(x + i, n - i));
            for (i64 j = n - i; j < W; j++) part[j] = -INF;
            for (int first = 0; first < W; first += W / 2) {
                hf half;
                std::memcpy(&half, part + first, sizeof half);
                total += exp_((__builtin_convertvector(half, vd) - (double)most) / s.temperature);
            }
        }
        double sum = 0;
        for (int j = 0; j < W / 2; j++) sum += total[j];
        return sum;
    }

    // The tokens whose logit over the temperature is no further below the largest than `low`; if there are more than `k`,
    // which is not 0, at least the first k of them.
    std::vector<Token> above(double low, i64 k) const {
        std::vector<Token> found;
        float least = logit(low);
        for (i64 i = 0; i < n; i += W) {
            const vf v = load(x + i, n - i);
            if (!any(v >= least)) continue;
            for (i64 j = 0; j < std::min<i64>(W, n - i); j++)
                if (v[j] >= least) found.push_back({v[j], (int32_t)(i + j), 0});
            if (k && (i64)found.size() > 2 * k + LEAST_ROOM) {
                shorten(found, k);
                least = found.back().logit;
            }
        }
        return found;
    }

    static void shorten(std::vector<Token>& tokens, i64 k) {
        std::nth_element(tokens.begin(), tokens.begin() + (k - 1), tokens.end(), goes_before);
        tokens.resize(k);
    }

    // The last token that the filters keep, in their order. False if rounding could decide which it is.
    bool last_kept(Token& last) const {
        const i64 k = s.top_k < n ? (i64)s.top_k : 0;
        const bool whole = !k && s.min_p == 0;  // of what top-p takes its share
        const double log_min = s.min_p > 0 ? std::log(s.min_p) : -INF;
        double total = 0, low = std::max(NEVER, log_min - CLOSE);
        if (whole) {
            total = mass();
            low = std::max(low, -std::log(2 * n / ((1 - s.top_p) * total)));  // what is below is half of what top-p drops
        }
        std::vector<Token> kept = above(low, k);
        if (k && (i64)kept.size() > k) shorten(kept, k);
        i64 count = 0;
        for (const Token& token : kept) {
            const double below = scaled(token.logit);
            if (below < 0 && std::abs(below - log_min) < CLOSE) return false;
            if (below == 0 || below > log_min) kept[count++] = {token.logit, token.id, std::exp(below)};
        }
        kept.resize(count);
        if (!count) return false;
        last = *std::max_element(kept.begin(), kept.end(), goes_before);
        if (s.top_p == 1) return true;
        if (!whole)
            for (const Token& token : kept) total += token.mass;
        // The last one before which there is less than top-p: quickselect by what lies in the upper half.
        const double wanted = s.top_p * total;
        double before = 0;
        auto first = kept.begin(), end = kept.end();
        while (end - first > 1) {
            const auto middle = first + (end - first) / 2;
            std::nth_element(first, middle, end, goes_before);
            double upper = before;
            for (auto token = first; token != middle; ++token) upper += token->mass;
            if (upper < wanted) before = upper, first = middle;
            else end = middle;
        }
        last = *first;
        return std::min(wanted - before, std::abs(before + last.mass - wanted)) > CLOSE_SHARE * total;
    }

    i64 draw(u64 counter, i64 largest) const {
        if (!(std::abs(most) < INF)) return -1;
        Token last{-INF, 0, 0};
        if ((s.top_k > 0 || s.top_p < 1 || s.min_p > 0) && !last_kept(last)) return -1;
        const float near_low = (float)(last.logit - CLOSE * s.temperature);
        const float near_high = (float)(last.logit + CLOSE * s.temperature);
        // Rounded towards 0, so that sums are rounded up.
        const float rate = (float)std::min((1 - 1e-6) / s.temperature, (double)std::numeric_limits<float>::max());
        double best = noise(counter, largest), second = -INF;
        i64 token = largest;
        const float least = std::max(last.logit, logit(best - MOST_NOISE));
        vi odd{};
        vq state;
        for (int j = 0; j < W / 2; j++) state[j] = counter + (u64)(2 * j + 1) * GOLDEN;
        for (i64 i = 0; i < n; i += W, state += W * GOLDEN) {
            const vf v = load(x + i, n - i);
            odd |= (v != v) | ((v >= near_low) & (v <= near_high) & (v != last.logit));
            if (!any(v >= least)) continue;
            // 31 bits of 1 - uniform, for even tokens from one hash and for odd ones from the other. Noise is at most
            // -ln(1 - uniform), and log2(z) at least its exponent and mantissa, which are z's bits read as an integer.
            const vq even = mix(state), uneven = mix(state + GOLDEN);
            const vu bits = ~(vu)((even >> 32) | (uneven >> 32 << 32)) >> 1;
            const vi exponent = (vi)__builtin_convertvector((vi)bits, vf);
            const vf most_noise = (158 * 0.6931472f + 1e-3f) - __builtin_convertvector(exponent, vf) * (0.6931472f * 0x1p-23f);
            const vi able = (v >= least) & ((v - most) * rate + most_noise >= (float)best);
            if (!any(able)) continue;
            for (i64 j = 0; j < std::min<i64>(W, n - i); j++) {
                const Token one{v[j], (int32_t)(i + j), 0};
                if (!able[j] || i + j == largest || goes_before(last, one)) continue;
                const double sum = scaled(v[j]) + noise(counter, i + j);
                if (sum > best) second = best, best = sum, token = i + j;
                else second = std::max(second, sum);
            }
        }
        return any(odd) || best - second < CLOSE ? -1 : token;
    }
};

}  // namespace

extern "C" {

// drawn[r] = a token from row rows[r] of x, whose largest number has its first place at largest[rows[r]]; -1 where it is left
// to others. settings has one for each r, as has counters, where a row's noise begins.
void pdserve_draw(i64 dtype, i64* drawn, const void* x, i64 n, const i64* rows, const i64* largest, const u64* counters,
                  const void* settings, i64 count, i64 threads) {
    const auto draw = [&](auto* all, i64 r) {
        const auto* x = all + rows[r] * n;
        const i64 first = largest[rows[r]];
        const Row<std::decay_t<decltype(*x)>> row{x, n, to_float(x[first]), ((const Settings*)settings)[r]};
        drawn[r] = row.draw(counters[r], first);
    };
#pragma omp parallel for num_threads((int)threads) schedule(dynamic) if (count > 1)
    for (i64 r = 0; r < count; r++) {
        if (dtype == 0) draw((const float*)x, r);
        if (dtype == 1) draw((const bf16*)x, r);
        if (dtype == 2) draw((const fp16*)x, r);
    }
}

}  // extern "C"
