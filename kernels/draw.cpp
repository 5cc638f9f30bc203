// Token sampling with the Gumbel-max trick: the argmax of logit / temperature + noise over the tokens that top-k, min-p and
// top-p keep. The result is exactly the token of the torch reference (engine/sampler.py), or none where rounding could decide;
// the reference then samples that row. Faster than the reference, because nothing is sorted, and because the two logarithms of
// the noise are computed only for tokens that would become the maximum with an upper bound of their noise, read off its bits.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

using u64 = uint64_t;
typedef u64 vq __attribute__((vector_size(4 * W)));
typedef double vd __attribute__((vector_size(4 * W)));
typedef float hf __attribute__((vector_size(2 * W)));  // as many lanes as vd

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15;
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr double MAX_NOISE = 37;    // noise is between -3.63 and 36.75, so a token further below
constexpr double MIN_SCALED = -42;      // the maximum than this cannot be sampled
constexpr double TIE_TOLERANCE = 1e-9;       // of sums and scaled logits: many times the rounding error
constexpr double MASS_TOLERANCE = 1e-10;  // of a sum of probabilities, relative
constexpr i64 CANDIDATE_SLACK = 4096;

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

// e^x for x <= 0 to 1e-12; 0 below -700.
inline vd exp_(vd x) {
    const vd magic = 0x1.8p52 - vd{};  // adding it rounds to an integer, held in the lowest bits
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
    double mass;  // unnormalised probability
};
// The order in which the filters keep tokens: by logit, then by id.
inline bool precedes(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// One row of logits with its sampling parameters.
template <typename T>
struct Row {
    const T* x;
    i64 n;
    float max_logit;  // maximum of x
    Settings s;

    double scaled(float logit) const { return ((double)logit - max_logit) / s.temperature; }
    float logit(double scaled) const { return (float)(max_logit + scaled * s.temperature); }

    double total_mass() const {
        vd total{};
        for (i64 i = 0; i < n; i += W) {
            float part[W];
            store(part, load(x + i, n - i));
            for (i64 j = n - i; j < W; j++) part[j] = -INF;
            for (int first = 0; first < W; first += W / 2) {
                hf half;
                std::memcpy(&half, part + first, sizeof half);
                total += exp_((__builtin_convertvector(half, vd) - (double)max_logit) / s.temperature);
            }
        }
        double sum = 0;
        for (int j = 0; j < W / 2; j++) sum += total[j];
        return sum;
    }

    // Tokens whose scaled logit is at least `low` (<= 0, relative to the maximum). If k is not 0 and there are more than k of
    // them, at least the first k in filter order.
    std::vector<Token> candidates_above(double low, i64 k) const {
        std::vector<Token> candidates;
        float threshold = logit(low);
        for (i64 i = 0; i < n; i += W) {
            const vf v = load(x + i, n - i);
            if (!any(v >= threshold)) continue;
            for (i64 j = 0; j < std::min<i64>(W, n - i); j++)
                if (v[j] >= threshold) candidates.push_back({v[j], (int32_t)(i + j), 0});
            if (k && (i64)candidates.size() > 2 * k + CANDIDATE_SLACK) {
                keep_best(candidates, k);
                threshold = candidates.back().logit;
            }
        }
        return candidates;
    }

    static void keep_best(std::vector<Token>& tokens, i64 k) {
        std::nth_element(tokens.begin(), tokens.begin() + (k - 1), tokens.end(), precedes);
        tokens.resize(k);
    }

    // Find the last token, in filter order, that the filters keep. Return false if rounding could decide which it is.
    bool find_cutoff(Token& last) const {
        const i64 k = s.top_k < n ? (i64)s.top_k : 0;
        const bool all_tokens = !k && s.min_p == 0;  // top-p applies to the whole vocabulary
        const double log_min = s.min_p > 0 ? std::log(s.min_p) : -INF;
        double total = 0, low = std::max(MIN_SCALED, log_min - TIE_TOLERANCE);
        if (all_tokens) {
            total = total_mass();
            // All tokens below it together have half of the mass that top-p drops.
            low = std::max(low, -std::log(2 * n / ((1 - s.top_p) * total)));
        }
        std::vector<Token> kept = candidates_above(low, k);
        if (k && (i64)kept.size() > k) keep_best(kept, k);
        i64 count = 0;
        for (const Token& token : kept) {
            const double log_p = scaled(token.logit);
            if (log_p < 0 && std::abs(log_p - log_min) < TIE_TOLERANCE) return false;
            if (log_p == 0 || log_p > log_min) kept[count++] = {token.logit, token.id, std::exp(log_p)};
        }
        kept.resize(count);
        if (!count) return false;
        last = *std::max_element(kept.begin(), kept.end(), precedes);
        if (s.top_p == 1) return true;
        if (!all_tokens)
            for (const Token& token : kept) total += token.mass;
        // The last token preceded by less mass than top-p: quickselect on the mass of the upper half.
        const double top_p_mass = s.top_p * total;
        double before = 0;
        auto first = kept.begin(), end = kept.end();
        while (end - first > 1) {
            const auto middle = first + (end - first) / 2;
            std::nth_element(first, middle, end, precedes);
            double upper = before;
            for (auto token = first; token != middle; ++token) upper += token->mass;
            if (upper < top_p_mass) before = upper, first = middle;
            else end = middle;
        }
        last = *first;
        return std::min(top_p_mass - before, std::abs(before + last.mass - top_p_mass)) > MASS_TOLERANCE * total;
    }

    // Sample a token with noise from `counter`, or return -1. `argmax` is the first index of the maximum.
    i64 draw(u64 counter, i64 argmax) const {
        if (!(std::abs(max_logit) < INF)) return -1;
        Token last{-INF, 0, 0};
        if ((s.top_k > 0 || s.top_p < 1 || s.min_p > 0) && !find_cutoff(last)) return -1;
        const float tie_low = (float)(last.logit - TIE_TOLERANCE * s.temperature);
        const float tie_high = (float)(last.logit + TIE_TOLERANCE * s.temperature);
        // Rounded towards 0, so that the (negative) scaled logits are rounded up.
        const float rate = (float)std::min((1 - 1e-6) / s.temperature, (double)std::numeric_limits<float>::max());
        double best = noise(counter, argmax), second = -INF;
        i64 token = argmax;
        const float threshold = std::max(last.logit, logit(best - MAX_NOISE));
        vi undecided{};
        vq state;
        for (int j = 0; j < W / 2; j++) state[j] = counter + (u64)(2 * j + 1) * GOLDEN;
        for (i64 i = 0; i < n; i += W, state += W * GOLDEN) {
            const vf v = load(x + i, n - i);
            undecided |= (v != v) | ((v >= tie_low) & (v <= tie_high) & (v != last.logit));
            if (!any(v >= threshold)) continue;
            // 31 bits of 1 - uniform, even tokens from one hash and odd tokens from the other. Noise is at most
            // -ln(1 - uniform), and log2(z) at least its exponent plus mantissa, which are the bits of z read as an integer.
            const vq even = mix(state), odd = mix(state + GOLDEN);
            const vu bits = ~(vu)((even >> 32) | (odd >> 32 << 32)) >> 1;
            const vi exponent = (vi)__builtin_convertvector((vi)bits, vf);
            const vf noise_bound = (158 * 0.6931472f + 1e-3f) - __builtin_convertvector(exponent, vf) * (0.6931472f * 0x1p-23f);
            const vi feasible = (v >= threshold) & ((v - max_logit) * rate + noise_bound >= (float)best);
            if (!any(feasible)) continue;
            for (i64 j = 0; j < std::min<i64>(W, n - i); j++) {
                const Token one{v[j], (int32_t)(i + j), 0};
                if (!feasible[j] || i + j == argmax || precedes(last, one)) continue;
                const double sum = scaled(v[j]) + noise(counter, i + j);
                if (sum > best) second = best, best = sum, token = i + j;
                else second = std::max(second, sum);
            }
        }
        return any(undecided) || best - second < TIE_TOLERANCE ? -1 : token;
    }
};

}  // namespace

extern "C" {

// drawn[r] = a token sampled from row rows[r] of x, or -1 where the reference must decide. argmax[row] is the first index of
// the row's maximum; counters[r] is the state of its noise generator and settings[r] its Settings.
void pdserve_draw(i64 dtype, i64* drawn, const void* x, i64 n, const i64* rows, const i64* argmax, const u64* counters,
                  const void* settings, i64 count, i64 threads) {
    const auto draw = [&](auto* all, i64 r) {
        const auto* x = all + rows[r] * n;
        const i64 first = argmax[rows[r]];
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
