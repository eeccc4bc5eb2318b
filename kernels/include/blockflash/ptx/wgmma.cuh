// wgmma (sm_90a): asynchronous matrix products of a warpgroup with operands in shared memory. PTX
// ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace blockflash::ptx {

// Orders accesses to accumulators and shared memory before the WGMMAs that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most `pending` of the youngest groups are in flight.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keep the compiler from moving accesses to registers on which WGMMA works.
template <int n>
__device__ __forceinline__ void wgmma_pin(float (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int n>
__device__ __forceinline__ void wgmma_pin(uint32_t (&registers)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Descriptor of a K-major tile with rows of 128 or 64 bytes and a swizzle of the same width, in
// groups of eight rows. Its address is a multiple of eight rows. Adding 2 moves 32 bytes along K.
template <int row_bytes = 128>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t tile_smem) {
  static_assert(row_bytes == 128 || row_bytes == 64, "rows are as wide as a swizzle");
  constexpr uint64_t kSwizzle = row_bytes == 128 ? 1 : 2;
  constexpr uint64_t kEightRows = 8 * row_bytes >> 4;
  return kSwizzle << 62 | kEightRows << 32 | (tile_smem & 0x3FFFF) >> 4;
}

// Descriptor of an MN-major tile in panels of 64 columns: a panel has rows of 128 bytes, one row
// per k, with the 128-byte swizzle and eight rows to 1024 bytes. `panel_bytes` separates panels,
// `group_bytes` groups of eight rows (1024). Adding 128 moves 16 along K.
__device__ __forceinline__ uint64_t wgmma_descriptor_mn(uint32_t tile_smem, uint32_t panel_bytes,
                                                        uint32_t group_bytes) {
  return 1ull << 62 | static_cast<uint64_t>(group_bytes >> 4) << 32 |
         static_cast<uint64_t>(panel_bytes >> 4) << 16 | ((tile_smem & 0x3FFFF) >> 4);
}

// The same descriptors of tiles with rows of 128 bytes and eight rows to 1024 bytes, from their low
// words. The word is opaque, so that descriptors are made where they are used: 64-bit descriptors
// that do not change are otherwise hoisted out of the loop and spilled.
__device__ __forceinline__ uint32_t wgmma_low(uint32_t tile_smem, uint32_t panel_bytes = 0) {
  return tile_smem >> 4 | panel_bytes >> 4 << 16;
}
__device__ __forceinline__ uint64_t wgmma_descriptor_of(uint32_t low) {
  asm volatile("" : "+r"(low));
  return 0x4000004000000000ull | low;
}

// Accumulators of m64nNk16 and their operand numbers. With g = lane / 4 and t = lane % 4, warp w of
// the warpgroup holds rows 16 w + g (d[4 j], d[4 j + 1]) and 16 w + g + 8 (d[4 j + 2], d[4 j + 3]),
// columns 8 j + 2 t and 8 j + 2 t + 1.
#define BLOCKFLASH_D4(f, i) f(d[i]), f(d[i + 1]), f(d[i + 2]), f(d[i + 3])
#define BLOCKFLASH_D16(f, i) \
  BLOCKFLASH_D4(f, i), BLOCKFLASH_D4(f, i + 4), BLOCKFLASH_D4(f, i + 8), BLOCKFLASH_D4(f, i + 12)
#define BLOCKFLASH_D32(f, i) BLOCKFLASH_D16(f, i), BLOCKFLASH_D16(f, i + 16)
#define BLOCKFLASH_D64(f, i) BLOCKFLASH_D32(f, i), BLOCKFLASH_D32(f, i + 32)
#define BLOCKFLASH_R0_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BLOCKFLASH_R0_32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, "                                                                       \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define BLOCKFLASH_R32_36 ", %32, %33, %34, %35"
#define BLOCKFLASH_R32_40 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BLOCKFLASH_R32_48 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define BLOCKFLASH_R32_64                                                                        \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, "                                                               \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define BLOCKFLASH_R64_68 ", %64, %65, %66, %67"
#define BLOCKFLASH_R64_96                                                                        \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, "                                                               \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define BLOCKFLASH_R96_100 ", %96, %97, %98, %99"
#define BLOCKFLASH_R96_128                                                                         \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, "                                               \
  "%120, %121, %122, %123, %124, %125, %126, %127"

// d[64, n] (+)= a·b in f32. `ss` takes a and b from shared memory. `rs` takes a from registers, in
// the layout of two neighbouring accumulator tiles rounded to 16 bits. a is K-major, or MN-major
// with `a_transposed`; b is K-major, or MN-major with `transposed`.
template <int n, class Element>
struct Wgmma;

#define BLOCKFLASH_SS(n, type, registers, o0, o1, o2, o3, scale)                                  \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " o0 ", " o1 \
  ", " scale ", 1, 1, " o3 ", " o2 ";"
#define BLOCKFLASH_RS(n, type, registers, o0, o1, o2, o3, o4, o5, scale)                           \
  "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, {" o0 ", " o1 \
  ", " o2 ", " o3 "}, " o4 ", " scale ", 1, 1, " o5 ";"
// Products that do not accumulate write d without reading it. `ss_over` does so, too, but takes the
// registers in which d was before, where the compiler would otherwise choose others. `rs_if`
// decides at run time, uniformly for all warps.
#define BLOCKFLASH_WGMMA(n, element, type, registers, d_list, o0, o1, o2, o3, o4, o5, o6)         \
  template <>                                                                                     \
  struct Wgmma<n, element> {                                                                      \
    template <bool accumulate, bool transposed = false, bool a_transposed = false>                \
    static __device__ __forceinline__ void ss(float (&d)[n / 2], uint64_t a, uint64_t b) {        \
      if constexpr (accumulate)                                                                   \
        asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; " BLOCKFLASH_SS(n, type, registers, o0, \
                                                                          o1, o2, o3, "p") "}"    \
                     : d_list("+f")                                                               \
                     : "l"(a), "l"(b), "n"(transposed), "n"(a_transposed));                       \
      else                                                                                        \
        asm volatile("{.reg .pred p; setp.ne.u32 p, 0, 0; " BLOCKFLASH_SS(n, type, registers, o0, \
                                                                          o1, o2, o3, "p") "}"    \
                     : d_list("=f")                                                               \
                     : "l"(a), "l"(b), "n"(transposed), "n"(a_transposed));                       \
    }                                                                                             \
    static __device__ __forceinline__ void ss_over(float (&d)[n / 2], uint64_t a, uint64_t b) {   \
      asm volatile("{.reg .pred p; setp.ne.u32 p, 0, 0; " BLOCKFLASH_SS(n, type, registers, o0,   \
                                                                        o1, o2, o3, "p") "}"      \
                   : d_list("+f")                                                                 \
                   : "l"(a), "l"(b), "n"(false), "n"(false));                                     \
    }                                                                                             \
    template <bool accumulate, bool transposed>                                                   \
    static __device__ __forceinline__ void rs(float (&d)[n / 2], const uint32_t* a, uint64_t b) { \
      if constexpr (accumulate)                                                                   \
        asm volatile("{.reg .pred p; setp.eq.u32 p, 0, 0; " BLOCKFLASH_RS(                        \
                         n, type, registers, o0, o1, o2, o3, o4, o5, "p") "}"                     \
                     : d_list("+f")                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed));      \
      else                                                                                        \
        asm volatile("{.reg .pred p; setp.ne.u32 p, 0, 0; " BLOCKFLASH_RS(                        \
                         n, type, registers, o0, o1, o2, o3, o4, o5, "p") "}"                     \
                     : d_list("=f")                                                               \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed));      \
    }                                                                                             \
    template <bool transposed>                                                                    \
    static __device__ __forceinline__ void rs_if(uint32_t accumulate, float (&d)[n / 2],          \
                                                 const uint32_t* a, uint64_t b) {                 \
      asm volatile("{.reg .pred p; setp.ne.u32 p, " o6                                            \
                   ", 0; " BLOCKFLASH_RS(n, type, registers, o0, o1, o2, o3, o4, o5, "p") "}"     \
                   : d_list("+f")                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(transposed),         \
                     "r"(accumulate));                                                            \
    }                                                                                             \
  };
#define BLOCKFLASH_WGMMA_TYPES(n, registers, d_list, ...)            \
  BLOCKFLASH_WGMMA(n, __half, "f16", registers, d_list, __VA_ARGS__) \
  BLOCKFLASH_WGMMA(n, __nv_bfloat16, "bf16", registers, d_list, __VA_ARGS__)

#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D16(f, 0)
BLOCKFLASH_WGMMA_TYPES(32, BLOCKFLASH_R0_16, BLOCKFLASH_D_LIST, "%16", "%17", "%18", "%19", "%20",
                       "%21", "%22")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D32(f, 0)
BLOCKFLASH_WGMMA_TYPES(64, BLOCKFLASH_R0_32, BLOCKFLASH_D_LIST, "%32", "%33", "%34", "%35", "%36",
                       "%37", "%38")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D32(f, 0), BLOCKFLASH_D4(f, 32)
BLOCKFLASH_WGMMA_TYPES(72, BLOCKFLASH_R0_32 BLOCKFLASH_R32_36, BLOCKFLASH_D_LIST, "%36", "%37",
                       "%38", "%39", "%40", "%41", "%42")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D32(f, 0), BLOCKFLASH_D4(f, 32), BLOCKFLASH_D4(f, 36)
BLOCKFLASH_WGMMA_TYPES(80, BLOCKFLASH_R0_32 BLOCKFLASH_R32_40, BLOCKFLASH_D_LIST, "%40", "%41",
                       "%42", "%43", "%44", "%45", "%46")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D32(f, 0), BLOCKFLASH_D16(f, 32)
BLOCKFLASH_WGMMA_TYPES(96, BLOCKFLASH_R0_32 BLOCKFLASH_R32_48, BLOCKFLASH_D_LIST, "%48", "%49",
                       "%50", "%51", "%52", "%53", "%54")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D64(f, 0)
BLOCKFLASH_WGMMA_TYPES(128, BLOCKFLASH_R0_32 BLOCKFLASH_R32_64, BLOCKFLASH_D_LIST, "%64", "%65",
                       "%66", "%67", "%68", "%69", "%70")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D64(f, 0), BLOCKFLASH_D4(f, 64)
BLOCKFLASH_WGMMA_TYPES(136, BLOCKFLASH_R0_32 BLOCKFLASH_R32_64 BLOCKFLASH_R64_68, BLOCKFLASH_D_LIST,
                       "%68", "%69", "%70", "%71", "%72", "%73", "%74")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D64(f, 0), BLOCKFLASH_D32(f, 64)
BLOCKFLASH_WGMMA_TYPES(192, BLOCKFLASH_R0_32 BLOCKFLASH_R32_64 BLOCKFLASH_R64_96, BLOCKFLASH_D_LIST,
                       "%96", "%97", "%98", "%99", "%100", "%101", "%102")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D64(f, 0), BLOCKFLASH_D32(f, 64), BLOCKFLASH_D4(f, 96)
BLOCKFLASH_WGMMA_TYPES(200, BLOCKFLASH_R0_32 BLOCKFLASH_R32_64 BLOCKFLASH_R64_96 BLOCKFLASH_R96_100,
                       BLOCKFLASH_D_LIST, "%100", "%101", "%102", "%103", "%104", "%105", "%106")
#undef BLOCKFLASH_D_LIST
#define BLOCKFLASH_D_LIST(f) BLOCKFLASH_D64(f, 0), BLOCKFLASH_D64(f, 64)
BLOCKFLASH_WGMMA_TYPES(256, BLOCKFLASH_R0_32 BLOCKFLASH_R32_64 BLOCKFLASH_R64_96 BLOCKFLASH_R96_128,
                       BLOCKFLASH_D_LIST, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef BLOCKFLASH_D_LIST

// d[64, 256] += a·bᵀ of e4m3, a and b K-major.
__device__ __forceinline__ void wgmma_m64n256k32_e4m3(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" BLOCKFLASH_R0_32 BLOCKFLASH_R32_64
          BLOCKFLASH_R64_96 BLOCKFLASH_R96_128 "}, %128, %129, accumulate, 1, 1;}"
      : BLOCKFLASH_D64("+f", 0), BLOCKFLASH_D64("+f", 64)
      : "l"(a), "l"(b));
}

#undef BLOCKFLASH_WGMMA_TYPES
#undef BLOCKFLASH_WGMMA
#undef BLOCKFLASH_RS
#undef BLOCKFLASH_SS
#undef BLOCKFLASH_R0_16
#undef BLOCKFLASH_R0_32
#undef BLOCKFLASH_R32_36
#undef BLOCKFLASH_R32_40
#undef BLOCKFLASH_R32_48
#undef BLOCKFLASH_R32_64
#undef BLOCKFLASH_R64_68
#undef BLOCKFLASH_R64_96
#undef BLOCKFLASH_R96_100
#undef BLOCKFLASH_R96_128
#undef BLOCKFLASH_D64
#undef BLOCKFLASH_D32
#undef BLOCKFLASH_D16
#undef BLOCKFLASH_D4

}  // namespace blockflash::ptx
