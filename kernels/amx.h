// Attention in bfloat16 on Intel AMX, after FlashAttention-2 (Dao 2023), for prefill and decode.
//
// A matrix tile is 16 rows of 16 words; a word is a float32 or a pair of bfloat16. The product instruction adds
// a (16 × 32, pairs along its rows) · b (32 × 16, pairs along its columns) to c (16 × 16, float32). A task is up to TILE_ROWS
// query rows (token × query head) of one sequence and key/value head. Per KV_TILE tokens of KV, K is copied from the pool and V
// transposed, once for all of those rows; then for each STRIP of rows:
//   scores^T [tokens × rows] = K · Q^T, the weights p = 2^(scores · factor - m), and
//   output^T [D × rows] += V^T · p^T.
// Everything is transposed, so that K is an operand in its own layout, vector lanes run along the query rows, and the softmax
// never sums across lanes. Matrices are stored tile by tile, the second index varying fastest. D is padded with zeros to Dp, a
// multiple of 32. Sums are float32; p is rounded to bfloat16 for the second product.
//
// The scores of the next strip are computed amid the exponentials of this one.
//
// As in paged.cpp, a row has the same result in both phases and in any batch: a decoding token's rows take the same steps as a
// tile of prefill, or amx_decode.h makes the same sums in place. KV_TILE and SPLIT are counted from token 0, and a row's maximum and rescaling depend on no other row.

#pragma once

#include "bfloat16.h"
#include "problem.h"
#include "tiles.h"

#ifdef PDSERVE_AMX

namespace amx {
namespace {

constexpr i64 SIDE = 16, PAIRS = 2 * SIDE, FLOATS = SIDE * SIDE, HALVES = 2 * FLOATS;
constexpr i64 TILE_ROWS = 1024, STRIP = 32, KV_TILE = 256;
constexpr i64 SPLIT = 2048;  // KV tokens: combining is dearer than in paged.cpp, as the output of 1024 rows fills half an L2 cache

// Called between writes and the tile loads that read them, of which GCC does not know that they read memory.
inline void forget() { asm volatile("" ::: "memory"); }

// Query rows of a task, given the number that balances the load. The more rows, the more reuse of the loaded KV.
inline i64 tile_rows(i64 rows) { return std::clamp((rows + STRIP - 1) / STRIP * STRIP, STRIP, TILE_ROWS); }

// Configures the thread's tile registers, for the lifetime of this object: numbers 0 to 4 have `rows` rows, 6 and 7 `lanes`
// words in a row, and all else is 16 × 16 words.
struct TileConfig {
    i64 rows = 0, lanes = 0;
    void use(i64 rows, i64 lanes) {
        if (rows == this->rows && lanes == this->lanes) return;
        this->rows = rows, this->lanes = lanes;
        alignas(64) uint8_t config[64] = {1};
        for (int i = 0; i < 8; i++) {
            config[16 + 2 * i] = (uint8_t)(4 * (i < 6 ? SIDE : lanes));
            config[48 + i] = (uint8_t)(i < 5 ? rows : SIDE);
        }
        forget();
        _tile_loadconfig(config);
    }
    ~TileConfig() { if (rows) _tile_release(); }
};

// c[i][j] += Σ_k a[i][k] · b[j][k] for both j of a strip; I is even. Strides count tiles.
inline void multiply(float* c, i64 cj, const bf16* a, i64 ai, const bf16* b, i64 bj, i64 I, i64 K) {
    constexpr int BYTES = 4 * SIDE;
    forget();
    for (i64 i = 0; i < I; i += 2) {
        float *const c00 = c + i * FLOATS, *const c01 = c00 + cj * FLOATS;
        float *const c10 = c00 + FLOATS, *const c11 = c01 + FLOATS;
        _tile_loadd(0, c00, BYTES);
        _tile_loadd(1, c01, BYTES);
        _tile_loadd(2, c10, BYTES);
        _tile_loadd(3, c11, BYTES);
        for (i64 k = 0; k < K; k++) {
            _tile_loadd(4, a + (i * ai + k) * HALVES, BYTES);
            _tile_loadd(5, a + ((i + 1) * ai + k) * HALVES, BYTES);
            _tile_loadd(6, b + k * HALVES, BYTES);
            _tile_loadd(7, b + (bj + k) * HALVES, BYTES);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, c00, BYTES);
        _tile_stored(1, c01, BYTES);
        _tile_stored(2, c10, BYTES);
        _tile_stored(3, c11, BYTES);
    }
}

// Load K and V of tokens [first + skipped, first + count): K as k[token / 16][D / 32], and V^T as v[D / 16][token / 32], pairs
// along the tokens. Up to multiples of PAIRS, the first and the last token are repeated.
inline void load_kv(const PagedKV<bf16>& kv, i64 first, i64 skipped, i64 count, i64 Dp, bf16* k, bf16* v) {
    const i64 D = kv.a.D, begin = skipped / PAIRS * PAIRS, end = (count + PAIRS - 1) / PAIRS * PAIRS;
    const bf16* rows[KV_TILE];
    for (i64 t = begin; t < end; t++) {
        const bf16* const source = kv.k(first + std::clamp(t, skipped, count - 1));
        bf16* const target = k + t / SIDE * Dp * SIDE + t % SIDE * PAIRS;
        for (i64 d = 0; d < Dp; d += PAIRS)
            _mm512_store_si512(target + d * SIDE, _mm512_maskz_loadu_epi16(lane_mask(D - d), source + d));
        rows[t] = source + kv.a.half;
    }
    for (i64 t = begin; t < end; t += PAIRS)
        for (i64 d = 0; d < Dp; d += SIDE) {
            __m512 words[SIDE];
            const auto load = [&](i64 token) {
                return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16((__mmask16)lane_mask(D - d), rows[token] + d));
            };
            for (i64 i = 0; i < SIDE; i++) {
                const __m512i low = load(t + 2 * i), high = load(t + 2 * i + 1);
                words[i] = _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
            }
            transpose(words);
            float* const target = (float*)v + (d / SIDE * (KV_TILE / PAIRS) + t / PAIRS) * FLOATS;
            for (i64 i = 0; i < SIDE; i++) _mm512_store_ps(target + i * SIDE, words[i]);
        }
}

inline void prefetch(const PagedKV<bf16>& kv, i64 first, i64 end) {
    for (i64 t = first; t < end; t++)
        for (i64 d = 0; d < kv.a.D; d += PAIRS) _mm_prefetch(kv.k(t) + d, _MM_HINT_T1), _mm_prefetch(kv.v(t) + d, _MM_HINT_T1);
}

// Raise m, the running maxima (within MAX_LOG2_WEIGHT) of 16 query rows, to the scores of `count` tokens. Where m grows, l, the
// sums, and o[D × rows] are rescaled.
inline void raise_maxima(const float* s, i64 count, float factor, float* m, float* l, float* o, i64 Dp) {
    __m512 maxima[4];
    for (__m512& x : maxima) x = _mm512_load_ps(s);
    for (i64 t = 0; t < count; t += 4)
        for (i64 i = 0; i < 4; i++) maxima[i] = _mm512_max_ps(_mm512_load_ps(s + (t + i) * SIDE), maxima[i]);
    const __m512 max01 = _mm512_max_ps(maxima[0], maxima[1]), max23 = _mm512_max_ps(maxima[2], maxima[3]);
    const __m512 tile_max = _mm512_mul_ps(_mm512_set1_ps(factor), _mm512_max_ps(max01, max23));
    const __m512 m_old = _mm512_load_ps(m);
    const __mmask16 raised = is_raised(tile_max, m_old);
    if (!raised) return;
    const __m512 m_new = _mm512_mask_mov_ps(m_old, raised, tile_max), rescale = rescaling(m_old, m_new, raised);
    _mm512_store_ps(m, m_new);
    _mm512_store_ps(l, _mm512_mul_ps(_mm512_load_ps(l), rescale));
    // Where the factor is 0, o may be uninitialised.
    const __mmask16 nonzero = _mm512_cmp_ps_mask(rescale, _mm512_setzero_ps(), _CMP_GT_OQ);
    for (i64 d = 0; d < Dp; d++)
        _mm512_store_ps(o + d * SIDE, _mm512_maskz_mul_ps(nonzero, _mm512_load_ps(o + d * SIDE), rescale));
}

// The scores of a strip for `length` tokens, s[row / 16][token][16], computed step by step amid other work: matrix and vector
// instructions run at the same time.
struct Scores {
    float* s;
    const bf16 *k, *q;
    i64 length, K, token = 0, step = 0;
    bool done() const { return token >= length; }
    void finish() { while (!done()) advance(); }
    void advance() {
        constexpr int BYTES = 4 * SIDE;
        if (step == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const bf16* const rows = k + (token / SIDE * K + step) * HALVES;
        _tile_loadd(4, rows, BYTES);
        _tile_loadd(5, rows + K * HALVES, BYTES);
        _tile_loadd(6, q + step * HALVES, BYTES);
        _tile_loadd(7, q + (K + step) * HALVES, BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        if (++step < K) return;
        float *const low = s + token * SIDE, *const high = low + length * SIDE;
        _tile_stored(0, low, BYTES);
        _tile_stored(1, high, BYTES);
        _tile_stored(2, low + FLOATS, BYTES);
        _tile_stored(3, high + FLOATS, BYTES);
        step = 0;
        token += PAIRS;
    }
};

// Turn the scores of `count` tokens for a strip into weights p, pairs along the tokens, and add those to l. Meanwhile the next
// scores are computed.
inline void weigh(const float* s, i64 count, float factor, bf16* p, const float* m, float* l, Scores& next) {
    const __m512 factor16 = _mm512_set1_ps(factor), maxima[2] = {_mm512_load_ps(m), _mm512_load_ps(m + SIDE)};
    __m512 even_sums[2] = {_mm512_load_ps(l), _mm512_load_ps(l + SIDE)}, odd_sums[2] = {};
    for (i64 group = 0; group < count; group += 8) {
        for (i64 t = group; t < group + 8; t += 2)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                const i64 at = (half * count + t) * SIDE;
                const __m512 even = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + at), factor16, maxima[half]));
                const __m512 odd = exp2_(_mm512_fmsub_ps(_mm512_load_ps(s + at + SIDE), factor16, maxima[half]));
                even_sums[half] = _mm512_add_ps(even_sums[half], even);
                odd_sums[half] = _mm512_add_ps(odd_sums[half], odd);
                _mm512_store_si512(p + at, pairs_of(even, odd));
            }
        if (!next.done()) next.advance();
    }
    for (int half = 0; half < 2; half++) _mm512_store_ps(l + half * SIDE, _mm512_add_ps(even_sums[half], odd_sums[half]));
}

// Buffers of one thread for up to `rows` query rows. m, l and o are of the current split, the totals of those before it.
struct Scratch {
    const i64 Dp;
    const Buffer<float> o, s, m, l, total_o, total_m, total_l;
    const Buffer<bf16> q, k, v, p;
    const Buffer<int32_t> positions;  // of each row's token in its sequence
    Scratch(i64 D, i64 rows)
        : Dp((D + PAIRS - 1) / PAIRS * PAIRS), o(rows * Dp), s(2 * KV_TILE * STRIP), m(rows), l(rows), total_o(rows * Dp),
          total_m(rows), total_l(rows), q(rows * Dp), k(KV_TILE * Dp), v(KV_TILE * Dp), p(KV_TILE * STRIP), positions(rows) {}
};

// Load the query rows as q[row / 16][D / 32], pairs along the head. Rows beyond the tile repeat its last.
inline void load_queries(const Problem& a, const Tile& tile, i64 rows, Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s], query_len = a.starts[tile.s + 1] - start;
    const bf16* query = (const bf16*)a.q + start * a.q_token + tile.g * R * a.q_head;
    for (i64 i = 0; i < rows; i += SIDE) {
        const bf16* source[SIDE];
        for (i64 j = 0; j < SIDE; j++) {
            const i64 row = std::min(tile.first + i + j, tile.end - 1);
            source[j] = query + row / R * a.q_token + row % R * a.q_head;
            x.positions[i + j] = (int32_t)(a.kv_lens[tile.s] - query_len + row / R);
            begin_row(a, tile.g * R + row % R, LOG2_E, x.total_m[i + j], x.total_l[i + j]);
        }
        for (i64 d = 0; d < x.Dp; d += PAIRS) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++)
                words[j] = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(lane_mask(a.D - d), source[j] + d));
            transpose(words);
            for (i64 j = 0; j < SIDE; j++) _mm512_store_ps((float*)(x.q + i * x.Dp + d * SIDE + j * PAIRS), words[j]);
        }
    }
}

inline void write_out(const Problem& a, const Tile& tile, const Scratch& x) {
    const i64 R = a.H / a.G, start = a.starts[tile.s];
    for (i64 i = 0; i < tile.end - tile.first; i += SIDE) {
        const i64 rows = std::min(SIDE, tile.end - tile.first - i);
        const __m512 inverse_l = _mm512_div_ps(_mm512_set1_ps(1), _mm512_load_ps(x.total_l + i));
        bf16* target[SIDE];
        for (i64 j = 0, row = tile.first + i; j < rows; j++, row++)
            target[j] = (bf16*)a.out + (start + row / R) * a.out_token + (tile.g * R + row % R) * a.out_head;
        for (i64 d = 0; d < a.D; d += SIDE) {
            __m512 words[SIDE];
            for (i64 j = 0; j < SIDE; j++) words[j] = _mm512_mul_ps(inverse_l, _mm512_load_ps(x.total_o + i * x.Dp + (d + j) * SIDE));
            transpose(words);
            for (i64 j = 0; j < rows; j++)
                _mm256_mask_storeu_epi16(target[j] + d, (__mmask16)lane_mask(a.D - d), (__m256i)_mm512_cvtneps_pbh(words[j]));
        }
    }
}

// Mask the scores of tokens [first, first + count) outside of the causal mask and window of 16 rows at `positions`.
inline void mask_scores(float* s, i64 first, i64 count, const int32_t* positions, i64 window) {
    const __m512i position = _mm512_load_si512(positions), window16 = _mm512_set1_epi32(window ? (int)window : INT32_MAX);
    for (i64 t = 0; t < count; t++) {
        const __m512i distance = _mm512_sub_epi32(position, _mm512_set1_epi32((int)(first + t)));
        const __mmask16 visible = _mm512_cmplt_epi32_mask(distance, window16) & ~_mm512_movepi32_mask(distance);
        _mm512_store_ps(s + t * SIDE, _mm512_mask_mov_ps(_mm512_set1_ps(MASKED), visible, _mm512_load_ps(s + t * SIDE)));
    }
}

// The tokens [begin, begin + length) of a tile that some row of a strip sees, of which all rows see the leading `unmasked` ones.
struct Strip {
    i64 row, begin, length, unmasked;
    Strip(const Problem& a, i64 row, i64 first, i64 count, const Scratch& x) : row(row) {
        const i64 first_position = x.positions[row] - first, last_position = x.positions[row + STRIP - 1] - first;
        begin = a.window ? std::max<i64>(0, first_position + 1 - a.window) / PAIRS * PAIRS : 0;
        length = std::max<i64>(0, (std::min(count, last_position + 1) - begin + PAIRS - 1) / PAIRS * PAIRS);
        unmasked = a.window ? 0 : std::clamp<i64>(first_position + 1, 0, length);
    }
    // Its scores, which go to one of two buffers in turns.
    Scores scores(const Scratch& x) const {
        return {x.s + row / STRIP % 2 * KV_TILE * STRIP, x.k + begin * x.Dp, x.q + row * x.Dp, length, x.Dp / PAIRS};
    }
};

// Attend from one strip, given its scores, to the visible ones of the tokens from `first` on.
inline void attend_strip(const Problem& a, const Strip& strip, i64 first, float* scores, Scores& next, Scratch& x) {
    const i64 Dp = x.Dp, row = strip.row, length = strip.length;
    for (i64 i = 0; length && i < STRIP; i += SIDE) {
        float* const s = scores + i * length;
        if (a.softcap > 0)
            for (i64 t = 0; t < length; t++) store(s + t * SIDE, apply_softcap(load(s + t * SIDE) * a.scale, a));
        mask_scores(s + strip.unmasked * SIDE, first + strip.begin + strip.unmasked, length - strip.unmasked,
                    x.positions + row + i, a.window);
        raise_maxima(s, length, exponent_factor(a), x.m + row + i, x.l + row + i, x.o + (row + i) * Dp, Dp);
    }
    weigh(scores, length, exponent_factor(a), x.p, x.m + row, x.l + row, next);
    next.finish();
    multiply(x.o + row * Dp, Dp / SIDE, x.v + strip.begin / PAIRS * HALVES, KV_TILE / PAIRS, x.p, length / PAIRS,
             length ? Dp / SIDE : 0, length / PAIRS);
}

// Attend from `rows` loaded query rows to their visible ones of the tokens [begin, stop), which lie in one split.
inline void attend_split(const Problem& a, const PagedKV<bf16>& kv, i64 rows, i64 begin, i64 stop, Scratch& x) {
    std::fill_n((float*)x.m, rows, MIN_SCORE);
    std::fill_n((float*)x.l, rows, 0.f);
    for (i64 first = begin / KV_TILE * KV_TILE, next; first < stop; first = next) {
        next = std::min(first + KV_TILE, stop);
        const i64 count = next - first, next_count = std::min(KV_TILE, stop - next);
        load_kv(kv, first, std::max<i64>(0, begin - first), count, x.Dp, x.k, x.v);
        forget();
        Strip strip(a, 0, first, count, x);
        Scores scores = strip.scores(x);
        scores.finish();
        for (i64 row = 0; row < rows; row += STRIP) {
            prefetch(kv, next + row * next_count / rows, next + (row + STRIP) * next_count / rows);
            const Strip following(a, std::min(row + STRIP, rows - STRIP), first, count, x);
            Scores ahead = following.scores(x);
            if (row + STRIP >= rows) ahead.length = 0;  // there is none
            attend_strip(a, strip, first, scores.s, ahead, x);
            strip = following;
            scores = ahead;
        }
    }
}

// Add a split's m, l and o of `rows` query rows to those of the splits before it.
inline void add_split(const float* m, const float* l, const float* o, i64 rows, bool is_first, Scratch& x) {
    for (i64 i = 0; i < rows; i += SIDE) {
        const __m512 m_old = _mm512_load_ps(x.total_m + i), m_split = _mm512_load_ps(m + i);
        const __m512 m_new = _mm512_max_ps(m_old, m_split);
        const __m512 old_weight = split_weight(m_old, m_new), weight = split_weight(m_split, m_new);
        const __m512 split_l = _mm512_mul_ps(_mm512_load_ps(l + i), weight);
        // Rows that have seen no token yet: their o is uninitialised.
        const __mmask16 old = is_first ? 0 : _mm512_cmp_ps_mask(m_old, _mm512_set1_ps(MIN_SCORE), _CMP_GT_OQ);
        const __mmask16 seen = _mm512_cmp_ps_mask(m_split, _mm512_set1_ps(MIN_SCORE), _CMP_GT_OQ);
        _mm512_store_ps(x.total_m + i, m_new);
        _mm512_store_ps(x.total_l + i, _mm512_fmadd_ps(_mm512_load_ps(x.total_l + i), old_weight, split_l));
        for (i64 d = 0; d < x.Dp; d++) {
            float* const total = x.total_o + i * x.Dp + d * SIDE;
            const __m512 split_o = _mm512_maskz_mul_ps(seen, _mm512_load_ps(o + i * x.Dp + d * SIDE), weight);
            _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_maskz_loadu_ps(old, total), old_weight, split_o));
        }
    }
}

}  // namespace
}  // namespace amx

#endif
