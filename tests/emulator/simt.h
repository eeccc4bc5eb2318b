// A CTA on a CPU. Every thread is a fiber, and what it does between barriers and warp-wide
// instructions is plain C++, so the kernels' own sources run here, with other ptx:: functions
// (ptx.h). The order of the warps and the time of asynchronous copies are a schedule's choice: a
// kernel whose results depend on them has a race.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#undef __device__
#undef __forceinline__
#undef __global__
#undef __grid_constant__
#undef __launch_bounds__
#undef __noinline__
#undef __shared__
#undef __align__
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __noinline__
#define __shared__ static  // there is one CTA at a time
#define __align__(bytes) __attribute__((aligned(bytes)))

using std::isfinite;
using std::max;
using std::min;

namespace simt {

constexpr int kWarp = 32;
// Shared addresses start behind what the driver reserves of them on sm_90.
constexpr uint32_t kReserved = 1024;

struct Dimensions {
  unsigned x = 1, y = 1, z = 1;
};

// What a schedule chooses.
enum class Order { kForward, kBackward, kRandom };
struct Schedule {
  Order order;
  bool late;  // copies happen when somebody waits for them, and otherwise at once
};

// A copy from global to shared memory of `size` bytes, of which `bytes` exist.
struct Copy {
  uint32_t to;
  const void* from;
  int bytes, size;
};

struct Fiber {
  Dimensions thread;
  ucontext_t entry;
  jmp_buf state;
  bool started = false, done = false;
  std::function<bool()> ready;  // what it waits for; empty when it can go on
  std::vector<Copy> open;       // copies of no group yet
  std::deque<std::vector<Copy>> groups;
  std::vector<char> stack = std::vector<char>(128 << 10);
};

// Values that the lanes of a warp bring to an instruction, and what they get.
struct Warp {
  int arrived = 0;
  uint64_t generation = 0;
  alignas(16) unsigned char in[kWarp][64], out[kWarp][64];
};

struct Barrier {
  int arrived = 0;
  uint64_t generation = 0;
  bool any = false, result = false;
};

struct Cta {
  Dimensions block, grid, size;
  Schedule schedule;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  unsigned char* shared = nullptr;
  uint32_t shared_bytes = 0;
};

inline Cta cta;
inline Fiber* self;
inline jmp_buf scheduler;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "%s: CTA %u, thread %u\n", what, cta.block.x, self ? self->thread.x : 0);
  exit(1);
}

inline void wait(std::function<bool()> ready) {
  if (ready()) return;
  self->ready = std::move(ready);
  if (!_setjmp(self->state)) _longjmp(scheduler, 1);
}

// `bytes` at a shared address, which must be a multiple of them.
inline unsigned char* at(uint32_t address, int bytes) {
  if (address % bytes != 0) fail("misaligned shared address");
  if (address < kReserved || address - kReserved + bytes > cta.shared_bytes)
    fail("outside of shared memory");
  return cta.shared + (address - kReserved);
}

// A warp-wide instruction: the last lane computes the results of all.
template <class Out, class In, class Compute>
Out together(const In& mine, const Compute& compute) {
  static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
  Warp& warp = cta.warps[self->thread.x / kWarp];
  const int lane = self->thread.x % kWarp;
  memcpy(warp.in[lane], &mine, sizeof mine);
  if (++warp.arrived < kWarp) {
    const uint64_t generation = warp.generation;
    wait([&warp, generation] { return warp.generation != generation; });
  } else {
    In in[kWarp];
    Out out[kWarp];
    for (int l = 0; l < kWarp; ++l) memcpy(&in[l], warp.in[l], sizeof(In));
    compute(in, out);
    for (int l = 0; l < kWarp; ++l) memcpy(warp.out[l], &out[l], sizeof(Out));
    warp.arrived = 0;
    ++warp.generation;
  }
  Out out;
  memcpy(&out, warp.out[lane], sizeof out);
  return out;
}

// Returns whether `x` was true for any of the threads.
inline bool meet(int id, int threads, bool x, bool waits = true) {
  Barrier& barrier = cta.barriers[id];
  barrier.any |= x;
  if (++barrier.arrived == threads) {
    barrier.result = barrier.any;
    barrier.any = false, barrier.arrived = 0;
    ++barrier.generation;
  } else if (waits) {
    const uint64_t generation = barrier.generation;
    wait([&barrier, generation] { return barrier.generation != generation; });
  }
  return barrier.result;
}

inline void perform(const Copy& copy) {
  unsigned char* const to = at(copy.to, copy.size);
  memset(to, 0, copy.size);
  memcpy(to, copy.from, copy.bytes);
}

inline void start(const Copy& copy) {
  at(copy.to, copy.size);
  cta.schedule.late ? self->open.push_back(copy) : perform(copy);
}

inline void commit() {
  self->groups.push_back(std::move(self->open));
  self->open.clear();
}

inline void wait_for_groups(size_t pending) {
  for (; self->groups.size() > pending; self->groups.pop_front())
    for (const Copy& copy : self->groups.front()) perform(copy);
}

inline void (*kernel)();

inline void enter() {
  kernel();
  self->done = true;
  _longjmp(scheduler, 1);
}

// Runs a fiber until it waits or ends.
__attribute__((noinline)) inline void resume(Fiber& fiber) {
  self = &fiber;
  fiber.ready = nullptr;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.state, 1);
  fiber.started = true;
  setcontext(&fiber.entry);
}

// Runs one CTA. Shared memory holds NaN before it.
inline void run(unsigned block, unsigned blocks, int threads, unsigned char* shared,
                uint32_t shared_bytes, Schedule schedule, void (*of)(), std::mt19937& random) {
  memset(shared, 0xFF, shared_bytes);
  cta = {};
  cta.block.x = block, cta.grid.x = blocks, cta.size.x = threads;
  cta.block.y = cta.block.z = 0;
  cta.schedule = schedule, cta.shared = shared, cta.shared_bytes = shared_bytes;
  cta.warps.resize(threads / kWarp);
  kernel = of;
  for (int thread = 0; thread < threads; ++thread) {
    auto& fiber = *cta.fibers.emplace_back(std::make_unique<Fiber>());
    fiber.thread = {static_cast<unsigned>(thread), 0, 0};
    getcontext(&fiber.entry);
    fiber.entry.uc_stack.ss_sp = fiber.stack.data();
    fiber.entry.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.entry, enter, 0);
  }
  std::vector<int> order(threads / kWarp);
  for (size_t i = 0; i < order.size(); ++i)
    order[i] = schedule.order == Order::kBackward ? order.size() - 1 - i : i;
  const auto can_run = [](const Fiber& fiber) {
    return !fiber.done && (!fiber.ready || fiber.ready());
  };
  for (bool done = false; !done;) {
    if (schedule.order == Order::kRandom) std::shuffle(order.begin(), order.end(), random);
    bool progress = false;
    done = true;
    for (int warp : order) {
      const auto lanes = cta.fibers.begin() + warp * kWarp;
      // A warp runs as far as it can without the others.
      for (bool moved = true; moved; progress |= moved) {
        moved = false;
        for (int lane = 0; lane < kWarp; ++lane)
          if (can_run(*lanes[lane])) resume(*lanes[lane]), moved = true;
      }
      for (int lane = 0; lane < kWarp; ++lane) done &= lanes[lane]->done;
    }
    if (!done && !progress) fail("every thread waits for another one");
  }
  self = nullptr;
}

}  // namespace simt

#define threadIdx (simt::self->thread)
#define blockIdx (simt::cta.block)
#define blockDim (simt::cta.size)
#define gridDim (simt::cta.grid)

inline void __syncthreads() { simt::meet(0, simt::cta.size.x, false); }
inline int __syncthreads_or(int x) { return simt::meet(0, simt::cta.size.x, x != 0); }
inline int __syncthreads_and(int x) { return !simt::meet(0, simt::cta.size.x, x == 0); }
inline void __syncwarp(unsigned = ~0u) {
  simt::together<int>(0, [](const int*, int*) {});
}
inline int __any_sync(unsigned, int x) {
  return simt::together<int>(x, [](const int* in, int* out) {
    std::fill_n(out, simt::kWarp, std::any_of(in, in + simt::kWarp, [](int x) { return x != 0; }));
  });
}
inline int __all_sync(unsigned, int x) { return !__any_sync(~0u, x == 0); }
inline unsigned __ballot_sync(unsigned, int x) {
  return simt::together<unsigned>(x, [](const int* in, unsigned* out) {
    unsigned bits = 0;
    for (int lane = 0; lane < simt::kWarp; ++lane) bits |= (in[lane] != 0 ? 1u : 0u) << lane;
    std::fill_n(out, simt::kWarp, bits);
  });
}
template <class T>
T __reduce_min_sync(unsigned, T x) {
  return simt::together<T>(x, [](const T* in, T* out) {
    std::fill_n(out, simt::kWarp, *std::min_element(in, in + simt::kWarp));
  });
}
template <class T>
T __reduce_max_sync(unsigned, T x) {
  return simt::together<T>(x, [](const T* in, T* out) {
    std::fill_n(out, simt::kWarp, *std::max_element(in, in + simt::kWarp));
  });
}
template <class T>
T __reduce_add_sync(unsigned, T x) {
  return simt::together<T>(x, [](const T* in, T* out) {
    T sum = 0;
    for (int lane = 0; lane < simt::kWarp; ++lane) sum += in[lane];
    std::fill_n(out, simt::kWarp, sum);
  });
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return simt::together<T>(x, [mask](const T* in, T* out) {
    for (int lane = 0; lane < simt::kWarp; ++lane) out[lane] = in[lane ^ mask];
  });
}
template <class T>
T __shfl_sync(unsigned, T x, int from) {
  struct Request {
    T x;
    int from;
  };
  return simt::together<T>(Request{x, from}, [](const Request* in, T* out) {
    for (int lane = 0; lane < simt::kWarp; ++lane) out[lane] = in[in[lane].from].x;
  });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  return simt::together<T>(x, [distance](const T* in, T* out) {
    for (int lane = 0; lane < simt::kWarp; ++lane)
      out[lane] = in[lane < distance ? lane : lane - distance];
  });
}
inline unsigned __match_any_sync(unsigned, unsigned x) {
  return simt::together<unsigned>(x, [](const unsigned* in, unsigned* out) {
    for (int lane = 0; lane < simt::kWarp; ++lane) {
      out[lane] = 0;
      for (int other = 0; other < simt::kWarp; ++other)
        out[lane] |= (in[other] == in[lane] ? 1u : 0u) << other;
    }
  });
}
inline void __threadfence_block() {}
// Nothing else runs between two instructions of a thread.
inline unsigned atomicAdd(unsigned* at, unsigned x) { return std::exchange(*at, *at + x); }
inline int atomicAdd(int* at, int x) { return std::exchange(*at, *at + x); }
inline unsigned atomicOr(unsigned* at, unsigned x) { return std::exchange(*at, *at | x); }
inline int atomicMax(int* at, int x) { return std::exchange(*at, max(*at, x)); }
inline int atomicMin(int* at, int x) { return std::exchange(*at, min(*at, x)); }
inline unsigned atomicAnd(unsigned* at, unsigned x) { return std::exchange(*at, *at & x); }
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int byte = 0; byte < 32; byte += 8) sum += (a >> byte & 0xFF) * (b >> byte & 0xFF);
  return sum;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  unsigned result = 0;
  for (int byte = 0; byte < 4; ++byte) {
    const unsigned from = selector >> 4 * byte & 7;
    result |= ((from < 4 ? x : y) >> 8 * (from % 4) & 0xFF) << 8 * byte;
  }
  return result;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T __ldg(const T* at) {
  return *at;
}
template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
T __ldcs(const T* at) {
  return *at;
}
template <class T>
void __stcg(T* at, const T& x) {
  *at = x;
}
inline size_t __cvta_generic_to_shared(const void* at) {
  return static_cast<const unsigned char*>(at) - simt::cta.shared + simt::kReserved;
}

template <class To, class From>
To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __fdividef(float x, float y) { return x / y; }
// Nothing is fused here: the compiler targets x86-64 without such instructions.
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline int __float2int_rn(float x) { return static_cast<int>(nearbyintf(x)); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline float exp_of(float x) { return expf(x); }
#define __expf exp_of  // which is a name of the C library
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline double __longlong_as_double(long long x) { return bits_of<double>(x); }
