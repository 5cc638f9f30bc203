// Intel's matrix instructions (AMX): whether there are any. Their operands are tiles, of 16 rows of 64 bytes.

#pragma once

#include <cstdlib>

#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)
#define PDSERVE_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {
namespace {

inline bool permitted() {
#ifdef PDSERVE_AMX
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: for the whole process
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return granted;
#else
    return false;
#endif
}

// Uninitialised memory that begins with a cache line.
template <class T>
struct Buffer {
    T* const data;
    explicit Buffer(i64 count) : data((T*)std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)) {}
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(data); }
    operator T*() const { return data; }
};

}  // namespace
}  // namespace amx
