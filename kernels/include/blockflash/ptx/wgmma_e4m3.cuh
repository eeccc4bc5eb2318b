// wgmma (sm_90a) of e4m3: products of a warpgroup that are summed in f32. Both operands are
// K-major. What orders and awaits them, and their descriptors, are in wgmma.cuh.
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// d[64, n] (+)= a·bᵀ over 32 columns, where d is in the layout of Wgmma. `ss` takes a from shared
// memory. `rs` takes it from registers: word 2 i + half has the elements 16 i + 4 t to 16 i + 4 t +
// 3 of row g + 8 half, with g = lane / 4 and t = lane % 4.
//
// Without `accumulate` d is written and not read. Its registers are operands that are read and
// written in any case, or the assembler would choose others for them.
template <int n>
struct WgmmaE4m3;

#define BLOCKFLASH_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLOCKFLASH_D16(i) \
  BLOCKFLASH_D4(i), BLOCKFLASH_D4(i + 4), BLOCKFLASH_D4(i + 8), BLOCKFLASH_D4(i + 12)
#define BLOCKFLASH_D32(i) BLOCKFLASH_D16(i), BLOCKFLASH_D16(i + 16)
#define BLOCKFLASH_R16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BLOCKFLASH_R32 \
  BLOCKFLASH_R16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BLOCKFLASH_R64                                                                           \
  BLOCKFLASH_R32                                                                                 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BLOCKFLASH_WGMMA_E4M3(n, registers, d_list, o0, o1, o2, o3, o4, o5)                        \
  template <>                                                                                      \
  struct WgmmaE4m3<n> {                                                                            \
    template <bool accumulate>                                                                     \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], uint64_t a, uint64_t b) {         \
      asm volatile("{.reg .pred p; setp.ne.u32 p, " o2 ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
                   "k32.f32.e4m3.e4m3 {" registers "}, " o0 ", " o1 ", p, 1, 1;}"                  \
                   : d_list                                                                        \
                   : "l"(a), "l"(b), "n"(static_cast<int>(accumulate)));                           \
    }                                                                                              \
    template <bool accumulate>                                                                     \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const uint32_t* a, uint64_t b) {  \
      asm volatile("{.reg .pred p; setp.ne.u32 p, " o5 ", 0; wgmma.mma_async.sync.aligned.m64n" #n \
                   "k32.f32.e4m3.e4m3 {" registers "}, {" o0 ", " o1 ", " o2 ", " o3 "}, " o4      \
                   ", p, 1, 1;}"                                                                   \
                   : d_list                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                           \
                     "n"(static_cast<int>(accumulate)));                                           \
    }                                                                                              \
  };

BLOCKFLASH_WGMMA_E4M3(32, BLOCKFLASH_R16, BLOCKFLASH_D16(0), "%16", "%17", "%18", "%19", "%20",
                      "%21")
BLOCKFLASH_WGMMA_E4M3(64, BLOCKFLASH_R32, BLOCKFLASH_D32(0), "%32", "%33", "%34", "%35", "%36",
                      "%37")
#define BLOCKFLASH_D64 BLOCKFLASH_D32(0), BLOCKFLASH_D32(32)
BLOCKFLASH_WGMMA_E4M3(128, BLOCKFLASH_R64, BLOCKFLASH_D64, "%64", "%65", "%66", "%67", "%68", "%69")

#undef BLOCKFLASH_D64
#undef BLOCKFLASH_WGMMA_E4M3
#undef BLOCKFLASH_R64
#undef BLOCKFLASH_R32
#undef BLOCKFLASH_R16
#undef BLOCKFLASH_D32
#undef BLOCKFLASH_D16
#undef BLOCKFLASH_D4

}  // namespace blockflash::ptx
