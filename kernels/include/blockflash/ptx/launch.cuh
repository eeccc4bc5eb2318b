// Launch-related instructions of Hopper kernels: registers per role (setmaxnreg) and programmatic
// dependent launch (griddepcontrol).
#pragma once

#include <stdint.h>

namespace blockflash::ptx {

// All warps of a warpgroup must execute these together.
template <int registers>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// Waits until the kernels that this one depends on are complete and their writes are visible.
// Returns at once in a launch without such a dependency; GPUs before Hopper have none.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same behind the computation of a value, which the assembler would otherwise move behind the
// wait: it does not know that the time before is free.
__device__ __forceinline__ void wait_for_predecessors_behind(uint64_t value) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n\t.reg .pred zero;\n\tsetp.eq.u64 zero, %0, 0;\n\t"
      "@zero griddepcontrol.wait;\n\t@!zero griddepcontrol.wait;\n\t}" ::"l"(value)
      : "memory");
#endif
}

// Lets dependent kernels start their preamble once all CTAs have called this.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace blockflash::ptx
