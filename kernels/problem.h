// What every attention kernel is asked, and where KV lies.
//
// Names: S sequences, H query heads, G key/value heads, R = H/G, D head size, B tokens in a block. Strides count elements.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "vectors.h"

namespace {

constexpr float NEVER = -1e30f;  // the maximum before any score: finite, so that no -inf is subtracted from -inf
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

struct Problem {
    void* out;
    const void* q;
    const void* cache;
    const i64* tables;
    const i64* starts;   // [S + 1] first new token of each sequence in the flattened batch
    const i64* kv_lens;  // [S]
    i64 out_token, out_head, q_token, q_head, block, half, head;  // strides
    i64 S, H, G, D, B, M;
    float scale, softcap;  // softcap 0: none
    i64 window;            // 0: none
    i64 threads;
};

// Query rows [first, end) of one sequence and key/value head; row = new token × R + query head within the group.
struct Tile { i64 s, g, first, end; };

// Where the K and V rows of one sequence and head lie: tokens of one block follow each other.
template <class T>
struct Rows {
    const Problem& a;
    const T* base;
    const i64* table;
    Rows(const Problem& a, i64 s, i64 g) : a(a), base((const T*)a.cache + g * a.head), table(a.tables + s * a.M) {}
    const T* k(i64 token) const { return base + table[token / a.B] * a.block + token % a.B * a.D; }
    const T* v(i64 token) const { return k(token) + a.half; }
    i64 run(i64 token, i64 end) const { return std::min(end - token, a.B - token % a.B); }
};

inline vf capped(vf s, const Problem& a) { return a.softcap > 0 ? a.softcap * tanh_(s / a.softcap) : s; }

}  // namespace
