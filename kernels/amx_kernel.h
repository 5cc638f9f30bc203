// The attention kernel of one thread on Intel AMX: prefill, and decode in place where the pool allows it, else padded to a strip.

#pragma once

#include "amx.h"
#include "amx_decode.h"

#ifdef PDSERVE_AMX

namespace amx {
namespace {

struct Kernel {
    static constexpr i64 SPLIT = amx::SPLIT;
    const Problem& a;
    const bool in_place;
    TileConfig tiles;
    Scratch x;
    DecodeScratch y;
    Kernel(const Problem& a, bool prefills)
        : a(a), in_place(decodes_in_place(a)), x(a.D, prefills ? TILE_ROWS : in_place ? 0 : decode_rows(a)), y(a) {}
    static i64 decode_rows(const Problem& a) { return (a.H / a.G + STRIP - 1) / STRIP * STRIP; }
    static i64 tile_rows(i64 rows) { return amx::tile_rows(rows); }
    static i64 partial_size(const Problem& a) {
        if (decodes_in_place(a)) return 2 * SIDE + a.H / a.G * a.D;
        return decode_rows(a) * (2 + (a.D + PAIRS - 1) / PAIRS * PAIRS);
    }

    void prefill(const Tile& tile) {
        tiles.use(SIDE, SIDE);
        const PagedKV<bf16> kv(a, tile.s, tile.g);
        const i64 rows = (tile.end - tile.first + STRIP - 1) / STRIP * STRIP;
        load_queries(a, tile, rows, x);
        const i64 begin = a.window ? std::max<i64>(0, x.positions[0] + 1 - a.window) : 0, stop = x.positions[rows - 1] + 1;
        for (i64 split = begin / SPLIT * SPLIT; split < stop; split += SPLIT) {
            attend_split(a, kv, rows, std::max(begin, split), std::min(split + SPLIT, stop), x);
            add_split(x.m, x.l, x.o, rows, split <= begin, x);
        }
        write_out(a, tile, x);
    }

    // Attention of one decoding token's rows over one split. The partial result is m[rows], l[rows], o[rows × Dp].
    void decode(const Split& split, const Split* next, float* partial) {
        const i64 R = a.H / a.G;
        if (!in_place) decode_strip(split, partial);
        else if (R == 1) decode_rows<1>(split, next, partial);
        else if (R == 2) decode_rows<2>(split, next, partial);
        else if (R <= 4) decode_rows<4>(split, next, partial);
        else if (R <= 8) decode_rows<8>(split, next, partial);
        else decode_rows<16>(split, next, partial);
    }

    template <int LANES>
    void decode_rows(const Split& split, const Split* next, float* partial) {
        tiles.use(a.H / a.G, LANES);
        Decoder<LANES>{a, y, partial, partial + SIDE, partial + 2 * SIDE}.attend(split, next);
    }

    void decode_strip(const Split& split, float* partial) {
        tiles.use(SIDE, SIDE);
        const i64 rows = decode_rows(a);
        load_queries(a, {split.s, split.g, 0, a.H / a.G}, rows, x);
        attend_split(a, PagedKV<bf16>(a, split.s, split.g), rows, split.first, split.end, x);
        std::copy_n((const float*)x.m, rows, partial);
        std::copy_n((const float*)x.l, rows, partial + rows);
        std::copy_n((const float*)x.o, rows * x.Dp, partial + 2 * rows);
    }

    void combine(const Split& split, const float* partials) {
        const i64 rows = decode_rows(a), size = partial_size(a);
        if (in_place) return combine_rows(a, split, partials, size, y.o);
        for (i64 r = 0; r < rows; r++)
            begin_row(a, split.g * (a.H / a.G) + std::min(r, a.H / a.G - 1), LOG2_E, x.total_m[r], x.total_l[r]);
        for (i64 i = 0; i < split.count; i++) {
            const float* const m = partials + i * size;
            add_split(m, m + rows, m + 2 * rows, rows, i == 0, x);
        }
        write_out(a, {split.s, split.g, 0, a.H / a.G}, x);
    }
};

}  // namespace
}  // namespace amx

#endif
