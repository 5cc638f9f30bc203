// Intel's matrix instructions (AMX): detection, permission, aligned buffers. Operands are tiles of 16 rows × 64 bytes.

#pragma once

#include <cstdlib>

#include "vectors.h"

#if defined(PDSERVE_EMULATE_AMX) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define PDSERVE_AMX
#include <immintrin.h>
#include "amx_emulation.h"  // of tests/kernels/
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__linux__)
#define PDSERVE_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace amx {
namespace {

// Whether this build has AMX and the system lets the process use it.
inline bool is_permitted() {
#if defined(PDSERVE_EMULATE_AMX)
    return true;
#elif defined(PDSERVE_AMX)
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA; applies to the process
    static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
    return granted;
#else
    return false;
#endif
}

// Uninitialised memory, aligned to a cache line.
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
