// Decode in bfloat16 on Intel AMX, without padding: the rows of one token that share a key/value head, up to 16 of them, attend
// to KV where it lies in the pool. The sums are those of amx.h, element by element and in the same order, so the bits are too.
//
// K is the first operand as it is, and V is interleaved by pairs of tokens, two instructions for two cache lines, instead of
// transposed:
//   scores [tokens × LANES] = K · Q^T, with the rows padded to LANES, a power of two: a vector has the scores of 16 / LANES
//   tokens, and the weights p[row][KV_TILE] are made of it; then
//   output [rows × D] += p · V, with D in the order that interleaving gives.
// Memory is read all the time, a few lines with every product: V of this tile during the scores, K of the next one (the next
// split's after the last) during the output.

#pragma once

#include "amx.h"

#ifdef PDSERVE_AMX

namespace amx {
namespace {

// Whether the pool has whole tiles of K, and the rows fit into one.
inline bool decodes_in_place(const Problem& a) { return a.D % PAIRS == 0 && a.B % SIDE == 0 && a.H / a.G <= SIDE; }

// Consecutive tokens of one sequence and key/value head.
struct Span {
    const PagedKV<bf16> kv;
    const i64 begin, end;
    Span(const Problem& a, const Split& split) : kv(a, split.s, split.g), begin(split.first), end(split.end) {}
    // Address of K of a token, or of the nearest one in the span.
    const bf16* k(i64 token) const { return kv.k(std::clamp(token, begin, end - 1)); }
    // Address of K of the 16 tokens, contiguous in a block, to which it belongs. Those outside of the span may be anything.
    const bf16* group(i64 token) const { return kv.k(std::clamp(token, begin, end - 1) / SIDE * SIDE); }
};

// Buffers of one thread: the query as [D / 32] tiles [16 pairs][LANES], interleaved V of 2 × 32 tokens, p[16][KV_TILE], scores
// [KV_TILE][LANES], and o[R × D] of a combination.
struct DecodeScratch {
    const Buffer<bf16> q, v, p;
    const Buffer<float> s, o;
    explicit DecodeScratch(const Problem& a)
        : q(a.D * SIDE), v(2 * PAIRS * 4 * SIDE), p(SIDE * KV_TILE), s(KV_TILE * SIDE), o(a.H / a.G * a.D) {}
};

inline void prefetch_lines(const bf16* p, i64 elements) {
    for (i64 i = 0; i < elements; i += PAIRS) _mm_prefetch(p + i, _MM_HINT_T1);
}

// Tile registers: 0 to 3 sums of the output, 4 p, 5 K or V, 6 scores, 7 query.
template <int LANES>
struct Decoder {
    static constexpr i64 TOKENS = SIDE / LANES;  // of a vector
    const Problem& a;
    DecodeScratch& x;
    float *const m, *const l, *const o;  // the result: m[16], l[16], o[R × D]

    static __m512i lane_numbers() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
    // Lane i: lane (i + n) mod 16.
    static __m512 rotate(__m512 v, int n) {
        return _mm512_permutexvar_ps(_mm512_add_epi32(lane_numbers(), _mm512_set1_epi32(n)), v);
    }

    void load_query(const Split& split) {
        const i64 R = a.H / a.G;
        const bf16* const query = (const bf16*)a.q + a.starts[split.s] * a.q_token + split.g * R * a.q_head;
        for (i64 r = 0; r < LANES; r++)  // rows beyond R repeat the last
            for (i64 d = 0; d < a.D; d += 2)
                std::memcpy(x.q + d * LANES + 2 * r, query + std::min(r, R - 1) * a.q_head + d, 4);
    }

    // Scores of the tokens [begin, begin + count), multiples of 16.
    void score(const Span& span, i64 begin, i64 count) {
        for (i64 t = 0; t < count; t += SIDE) {
            const bf16* const k = span.group(begin + t);
            _tile_zero(6);
            for (i64 d = 0; d < a.D; d += PAIRS) {
                _tile_loadd(5, k + d, 2 * a.D);
                _tile_loadd(7, x.q + d * LANES, 4 * LANES);
                _tile_dpbf16ps(6, 5, 7);
                prefetch_lines(k + a.half + d * SIDE, PAIRS * SIDE);
            }
            _tile_stored(6, x.s + t * LANES, 4 * LANES);
        }
    }

    // Apply the softcap, and mask the tokens outside of [first, end), of which `count` were scored.
    void mask(i64 count, i64 first, i64 end) {
        for (i64 i = 0; a.softcap > 0 && i < count * LANES; i += SIDE)
            store(x.s + i, apply_softcap(load(x.s + i) * a.scale, a));
        if (first == 0 && end == count) return;
        const __m512i low = _mm512_set1_epi32((int)first), high = _mm512_set1_epi32((int)end);
        for (i64 t = 0; t < count; t += TOKENS) {
            float* const s = x.s + t * LANES;
            const __m512i in_vector = _mm512_srli_epi32(lane_numbers(), __builtin_ctz(LANES));
            const __m512i token = _mm512_add_epi32(in_vector, _mm512_set1_epi32((int)t));
            const __mmask16 visible = _mm512_cmplt_epi32_mask(token, high) & _mm512_cmpge_epi32_mask(token, low);
            _mm512_store_ps(s, _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), visible, _mm512_load_ps(s)));
        }
    }

    // Raise m to the scores of `count` tokens, and rescale l and o where it grows.
    void raise_maxima(i64 count) {
        __m512 maxima[2] = {_mm512_load_ps(x.s), _mm512_load_ps(x.s)};
        for (i64 i = 0; i < count * LANES; i += 2 * SIDE)
            for (int j = 0; j < 2; j++) maxima[j] = _mm512_max_ps(_mm512_load_ps(x.s + i + j * SIDE), maxima[j]);
        __m512 largest = _mm512_max_ps(maxima[0], maxima[1]);
        for (int n = LANES; n < SIDE; n *= 2) largest = _mm512_max_ps(rotate(largest, n), largest);
        const __m512 tile_max = _mm512_mul_ps(_mm512_set1_ps(exponent_factor(a)), largest), m_old = _mm512_load_ps(m);
        const __mmask16 raised = is_raised(tile_max, m_old);
        if (!raised) return;
        const __m512 m_new = _mm512_mask_mov_ps(m_old, raised, tile_max), rescale = rescaling(m_old, m_new, raised);
        _mm512_store_ps(m, m_new);
        _mm512_store_ps(l, _mm512_mul_ps(_mm512_load_ps(l), rescale));
        alignas(64) float factors[SIDE];
        _mm512_store_ps(factors, rescale);
        for (i64 r = 0; r < a.H / a.G; r++) {
            const __mmask16 nonzero = factors[r] > 0 ? 0xffff : 0;  // else o may be uninitialised
            for (float* to = o + r * a.D; factors[r] != 1 && to < o + (r + 1) * a.D; to += SIDE)
                _mm512_store_ps(to, _mm512_maskz_mul_ps(nonzero, _mm512_load_ps(to), _mm512_set1_ps(factors[r])));
        }
    }

    // Turn the scores of `count` tokens into weights p, and add those to l: of the even and of the odd tokens, each in their
    // order, in lanes [0, LANES) and [LANES, 2 · LANES), or in two vectors.
    void weigh(i64 count) {
        constexpr __mmask16 ROWS = (__mmask16)((1u << LANES) - 1);
        constexpr int PER_ROW = 2 * SIDE / LANES;
        const __m512 factor = _mm512_set1_ps(exponent_factor(a)), maxima = _mm512_load_ps(m);
        __m512 sums[2] = {_mm512_maskz_load_ps(ROWS, l), _mm512_setzero_ps()};
        alignas(64) uint16_t order[2 * SIDE];
        for (int i = 0; i < 2 * SIDE; i++) order[i] = (uint16_t)(i % PER_ROW * LANES + i / PER_ROW);
        for (i64 t = 0; t < count; t += 2 * TOKENS) {
            __m512 weights[2];
            for (int j = 0; j < 2; j++) {
                const __m512 s = _mm512_load_ps(x.s + t * LANES + j * SIDE);
                weights[j] = exp2_(_mm512_fmsub_ps(s, factor, maxima));
                __m512& sum = sums[LANES == SIDE ? j : 0];
                sum = _mm512_add_ps(sum, weights[j]);
#pragma GCC unroll 8
                for (int n = 2 * LANES; n < SIDE; n += 2 * LANES) sum = _mm512_add_ps(sum, rotate(weights[j], n));
            }
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]);
            alignas(64) bf16 by_row[2 * SIDE];
            _mm512_store_si512(by_row, _mm512_permutexvar_epi16(_mm512_load_si512(order), both));
            for (int r = 0; r < LANES; r++) std::memcpy(x.p + r * KV_TILE + t, by_row + r * PER_ROW, 2 * PER_ROW);
        }
        alignas(64) float total[2 * SIDE];
        _mm512_store_ps(total, sums[0]);
        _mm512_store_ps(total + SIDE, sums[1]);
        for (int r = 0; r < LANES; r++) l[r] = total[r] + total[LANES + r];
    }

    // Interleave elements [d, d + columns) of V of 32 tokens by pairs of tokens: a tile for each 16 elements. Those outside of
    // the span have p = 0, and repeat others.
    void interleave(const Span& span, i64 token, i64 d, i64 columns, bf16* v) {
        for (i64 i = 0; i < PAIRS; i += 2) {
            const bf16 *const even = span.k(token + i) + a.half + d, *const odd = span.k(token + i + 1) + a.half + d;
            for (i64 e = 0; e < columns; e += PAIRS) {
                const __m512i low = _mm512_loadu_si512(even + e), high = _mm512_loadu_si512(odd + e);
                bf16* const target = v + e * PAIRS + i * SIDE;
                _mm512_store_si512(target, _mm512_unpacklo_epi16(low, high));
                _mm512_store_si512(target + HALVES, _mm512_unpackhi_epi16(low, high));
            }
        }
    }

    // Add p · V of the tokens [begin, begin + count), multiples of 32. Prefetches K of `next_count` tokens of `next`.
    void add_values(const Span& span, i64 begin, i64 count, const Span& next, i64 next_begin, i64 next_count) {
        for (i64 d = 0, columns; d < a.D; d += columns) {
            columns = std::min(4 * SIDE, a.D - d);
            float* const out = o + d;
            const i64 stride = 4 * a.D;
            _tile_loadd(0, out, stride);
            _tile_loadd(1, out + SIDE, stride);
            if (columns > PAIRS) {
                _tile_loadd(2, out + 2 * SIDE, stride);
                _tile_loadd(3, out + 3 * SIDE, stride);
            }
            for (i64 t = 0; t < count; t += PAIRS) {
                bf16* const v = x.v + t / PAIRS % 2 * PAIRS * 4 * SIDE;
                interleave(span, begin + t, d, columns, v);
                for (i64 i = t; i < t + PAIRS && i < next_count; i += SIDE)
                    prefetch_lines(next.group(next_begin + i) + SIDE * d, SIDE * columns);
                forget();
                _tile_loadd(4, x.p + t, 2 * KV_TILE);
                _tile_loadd(5, v, 64);
                _tile_dpbf16ps(0, 4, 5);
                _tile_loadd(5, v + HALVES, 64);
                _tile_dpbf16ps(1, 4, 5);
                if (columns > PAIRS) {
                    _tile_loadd(5, v + 2 * HALVES, 64);
                    _tile_dpbf16ps(2, 4, 5);
                    _tile_loadd(5, v + 3 * HALVES, 64);
                    _tile_dpbf16ps(3, 4, 5);
                }
            }
            _tile_stored(0, out, stride);
            _tile_stored(1, out + SIDE, stride);
            if (columns > PAIRS) {
                _tile_stored(2, out + 2 * SIDE, stride);
                _tile_stored(3, out + 3 * SIDE, stride);
            }
        }
    }

    // Attend to one split. `next` is the thread's next one, if known.
    void attend(const Split& split, const Split* next) {
        load_query(split);
        std::fill_n(m, SIDE, MIN_SCORE);
        std::fill_n(l, SIDE, 0.f);
        const Span here(a, split), then(a, next ? *next : split);
        for (i64 first = split.first / KV_TILE * KV_TILE, end; first < split.end; first = end) {
            end = std::min(first + KV_TILE, split.end);
            const i64 begin = std::max(first, split.first) / PAIRS * PAIRS, count = (end - begin + PAIRS - 1) / PAIRS * PAIRS;
            forget();
            score(here, begin, count);
            mask(count, std::max<i64>(0, split.first - begin), end - begin);
            raise_maxima(count);
            weigh(count);
            forget();
            if (end < split.end) add_values(here, begin, count, here, end, std::min(KV_TILE, split.end - end));
            else add_values(here, begin, count, then, then.begin, next ? std::min(KV_TILE, then.end - then.begin) : 0);
        }
    }
};

// Combine the splits of one token's rows, of which each has m[16], l[16] and o[R × D], as `add_split` and `write_out` do.
inline void combine_rows(const Problem& a, const Split& split, const float* partials, i64 size, float* total) {
    const i64 R = a.H / a.G, D = a.D;
    alignas(64) float old_weights[SIDE], weights[SIDE], inverse_l[SIDE], first_m[SIDE] = {}, first_l[SIDE] = {};
    for (i64 r = 0; r < R; r++) begin_row(a, split.g * R + r, LOG2_E, first_m[r], first_l[r]);
    __m512 total_m = _mm512_load_ps(first_m), total_l = _mm512_load_ps(first_l);
    for (i64 i = 0; i < split.count; i++) {
        const float *const p = partials + i * size, *const o = p + 2 * SIDE;
        const __m512 m = _mm512_load_ps(p), m_new = _mm512_max_ps(total_m, m);
        const __m512 old_weight = split_weight(total_m, m_new), weight = split_weight(m, m_new);
        total_l = _mm512_fmadd_ps(total_l, old_weight, _mm512_mul_ps(_mm512_load_ps(p + SIDE), weight));
        total_m = m_new;
        _mm512_store_ps(old_weights, old_weight);
        _mm512_store_ps(weights, weight);
        const __mmask16 old = i ? 0xffff : 0;  // before the first split, the total is uninitialised
        for (i64 r = 0; r < R; r++)
            for (i64 d = r * D; d < (r + 1) * D; d += SIDE) {
                const __m512 split_o = _mm512_mul_ps(_mm512_load_ps(o + d), _mm512_set1_ps(weights[r]));
                const __m512 before = _mm512_maskz_loadu_ps(old, total + d);
                _mm512_store_ps(total + d, _mm512_fmadd_ps(before, _mm512_set1_ps(old_weights[r]), split_o));
            }
    }
    _mm512_store_ps(inverse_l, _mm512_div_ps(_mm512_set1_ps(1), total_l));
    for (i64 r = 0; r < R; r++) {
        bf16* const target = (bf16*)a.out + a.starts[split.s] * a.out_token + (split.g * R + r) * a.out_head;
        const __m512 factor = _mm512_set1_ps(inverse_l[r]);
        for (i64 d = 0; d < D; d += PAIRS) {
            const float* const x = total + r * D + d;
            store_in_order(target + d, _mm512_mul_ps(factor, _mm512_load_ps(x)), _mm512_mul_ps(factor, _mm512_load_ps(x + SIDE)));
        }
    }
}

}  // namespace
}  // namespace amx

#endif
