// The AMX instructions in software, so that tests run amx*.h and linear.cpp on processors that have AVX-512 with bfloat16 but no
// AMX. Compiled in with -DPDSERVE_EMULATE_AMX and this folder in the path only (PDSERVE_KERNEL_FLAGS in native.py).
//
// Rounding follows the description of TDPBF16PS in Intel's Software Developer's Manual: products of the even and of the odd
// elements are summed apart, and their sum is added to the result; subnormal numbers count as 0.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

struct EmulatedTiles {
    uint8_t config[64];
    alignas(64) uint8_t data[8][16][64];
    int rows(int tile) const { return config[48 + tile]; }
    int bytes(int tile) const { return config[16 + 2 * tile]; }
};
inline thread_local EmulatedTiles emulated;

inline float emulated_flush(float x) { return x < 1.17549435e-38f && x > -1.17549435e-38f ? 0 : x; }

inline void emulated_loadconfig(const void* config) { std::memcpy(emulated.config, config, 64); }
inline void emulated_release() { std::memset(emulated.config, 0, 64); }
inline void emulated_zero(int tile) { std::memset(emulated.data[tile], 0, sizeof emulated.data[tile]); }
inline void emulated_loadd(int tile, const void* base, int64_t stride) {
    emulated_zero(tile);
    for (int r = 0; r < emulated.rows(tile); r++)
        std::memcpy(emulated.data[tile][r], (const char*)base + r * stride, emulated.bytes(tile));
}
inline void emulated_stored(int tile, void* base, int64_t stride) {
    for (int r = 0; r < emulated.rows(tile); r++)
        std::memcpy((char*)base + r * stride, emulated.data[tile][r], emulated.bytes(tile));
}
inline void emulated_dpbf16ps(int c, int a, int b) {
    const auto widen = [](uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; };
    const bool fit = emulated.rows(c) == emulated.rows(a) && emulated.bytes(c) == emulated.bytes(b);
    if (!fit || emulated.bytes(a) != 4 * emulated.rows(b)) std::abort();  // the processor raises an exception
    for (int m = 0; m < emulated.rows(c); m++) {
        float even[16] = {}, odd[16] = {}, sums[16];
        uint32_t a_pairs[16], b_pairs[16];
        std::memcpy(a_pairs, emulated.data[a][m], 64);
        for (int k = 0; k < emulated.bytes(a) / 4; k++) {
            const float a_even = emulated_flush(widen(a_pairs[k] << 16)), a_odd = emulated_flush(widen(a_pairs[k] & 0xffff0000u));
            std::memcpy(b_pairs, emulated.data[b][k], 64);
            for (int n = 0; n < 16; n++) {
                even[n] = emulated_flush(even[n] + a_even * emulated_flush(widen(b_pairs[n] << 16)));
                odd[n] = emulated_flush(odd[n] + a_odd * emulated_flush(widen(b_pairs[n] & 0xffff0000u)));
            }
        }
        std::memcpy(sums, emulated.data[c][m], 64);
        for (int n = 0; n < 16; n++) sums[n] = emulated_flush(emulated_flush(sums[n]) + emulated_flush(even[n] + odd[n]));
        std::memcpy(emulated.data[c][m], sums, emulated.bytes(c));
    }
}

}  // namespace

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_loadconfig
#define _tile_release emulated_release
#define _tile_zero emulated_zero
#define _tile_loadd emulated_loadd
#define _tile_stored emulated_stored
#define _tile_dpbf16ps emulated_dpbf16ps
