// Arguments of the attention kernels, and access to the paged KV.
//
// Shape legend: S sequences, H query heads, G key/value heads, R = H/G, D head size, B tokens in a block, M blocks of the
// longest sequence. Strides count elements.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace {

constexpr float MIN_SCORE = -1e30f;  // initial running maximum: finite, since -inf - -inf is NaN
constexpr float MASKED = -std::numeric_limits<float>::infinity();

// One call of the attention kernel. `AttentionArguments` in native.py has the same fields in the same order.
struct Problem {
    void* out;
    const void* q;
    const void* cache;
    const i64* tables;
    const i64* starts;   // [S + 1] first new token of each sequence in the flattened batch
    const i64* kv_lens;  // [S]
    const float* sinks;  // [H] attention sinks: logits that weigh like those of a token whose value is 0; null: none
    i64 out_token, out_head, q_token, q_head, block, half, head;  // strides
    i64 S, H, G, D, B, M;
    float scale, softcap;  // softcap 0: none
    i64 window;            // 0: none
    i64 threads;
    i64 dtype;    // of query, cache and output: 0 float32, 1 bfloat16, 2 float16
    i64 use_amx;  // bfloat16 uses AMX, if pdserve_amx()
    i64 byte_kv;  // the cache is in 8 bits, see byte_kv.h
};

// Query rows [first, end) of one sequence and key/value head; row = new token × R + query head within the group.
struct Tile { i64 s, g, first, end; };

// KV tokens [first, end) of one sequence and key/value head: split number `index` of `count`.
struct Split { i64 s, g, first, end, index, count; };

// Addresses of the K and V rows of one sequence and head. The tokens of a block are contiguous.
template <class T>
struct PagedKV {
    const Problem& a;
    const T* base;
    const i64* table;
    PagedKV(const Problem& a, i64 s, i64 g) : a(a), base((const T*)a.cache + g * a.head), table(a.tables + s * a.M) {}
    const T* k(i64 token) const { return base + table[token / a.B] * a.block + token % a.B * a.D; }
    const T* v(i64 token) const { return k(token) + a.half; }
    // Number of tokens from `token` on, before `end`, that are contiguous in memory.
    i64 contiguous(i64 token, i64 end) const { return std::min(end - token, a.B - token % a.B); }
};

// Begin the m and l of a row of a query head, whose o is 0 yet, with its attention sink, if any. m counts in `unit` logits.
inline void begin_row(const Problem& a, i64 head, float unit, float& m, float& l) {
    m = a.sinks ? a.sinks[head] * unit : MIN_SCORE;
    l = a.sinks ? 1 : 0;
}

inline vf apply_softcap(vf s, const Problem& a) { return a.softcap > 0 ? a.softcap * tanh_(s / a.softcap) : s; }

}  // namespace
