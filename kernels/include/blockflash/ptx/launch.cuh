// Launch-related instructions of Hopper kernels: registers per role (setmaxnreg) and programmatic
// dependent launch (griddepcontrol).
#pragma once

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

// Lets dependent kernels start their preamble once all CTAs have called this.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace blockflash::ptx
