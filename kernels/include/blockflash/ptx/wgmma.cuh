// wgmma (sm_90a): matrix products of a warpgroup, operands in shared memory. PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// Orders accesses to accumulators and shared memory before the products that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the youngest groups are still under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Describes a K-major tile whose rows are 128 bytes with 128-byte swizzle, eight rows to 1024 bytes; its address is a multiple of 1024.
// Adding 2 moves 32 bytes along K.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t tile_smem) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = static_cast<uint64_t>(1024 >> 4) << 32;
  return kSwizzle128 | kEightRows | ((tile_smem & 0x3FFFF) >> 4);
}

// d[64, 256] += a·bᵀ, a and b K-major. With g = lane / 4 and t = lane % 4, warp w of the warpgroup holds rows 16 w + g (d[4 j], d[4 j + 1])
// and 16 w + g + 8 (d[4 j + 2], d[4 j + 3]), columns 8 j + 2 t and 8 j + 2 t + 1.
#define BLOCKFLASH_ACCUMULATORS_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define BLOCKFLASH_ACCUMULATORS_16(i) \
  BLOCKFLASH_ACCUMULATORS_4(i), BLOCKFLASH_ACCUMULATORS_4(i + 4), BLOCKFLASH_ACCUMULATORS_4(i + 8), BLOCKFLASH_ACCUMULATORS_4(i + 12)
#define BLOCKFLASH_ACCUMULATORS_64(i) \
  BLOCKFLASH_ACCUMULATORS_16(i), BLOCKFLASH_ACCUMULATORS_16(i + 16), BLOCKFLASH_ACCUMULATORS_16(i + 32), BLOCKFLASH_ACCUMULATORS_16(i + 48)
#define BLOCKFLASH_WGMMA_M64N256(name, shape_and_types, transposition)                                                                     \
  __device__ __forceinline__ void name(float (&d)[128], uint64_t a, uint64_t b) {                                                          \
    asm volatile("{.reg .pred accumulate; setp.eq.u32 accumulate, 0, 0; wgmma.mma_async.sync.aligned." shape_and_types " {"                \
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "          \
                 "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "          \
                 "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "          \
                 "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "          \
                 "%90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "          \
                 "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"              \
                 "}, %128, %129, accumulate, 1, 1" transposition ";}"                                                                      \
                 : BLOCKFLASH_ACCUMULATORS_64(0), BLOCKFLASH_ACCUMULATORS_64(64)                                                           \
                 : "l"(a), "l"(b));                                                                                                        \
  }

BLOCKFLASH_WGMMA_M64N256(wgmma_m64n256k16_f16, "m64n256k16.f32.f16.f16", ", 0, 0")
BLOCKFLASH_WGMMA_M64N256(wgmma_m64n256k16_bf16, "m64n256k16.f32.bf16.bf16", ", 0, 0")
BLOCKFLASH_WGMMA_M64N256(wgmma_m64n256k32_e4m3, "m64n256k32.f32.e4m3.e4m3", "")

#undef BLOCKFLASH_WGMMA_M64N256
#undef BLOCKFLASH_ACCUMULATORS_64
#undef BLOCKFLASH_ACCUMULATORS_16
#undef BLOCKFLASH_ACCUMULATORS_4

}  // namespace blockflash::ptx
