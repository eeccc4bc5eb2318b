// The instructions of kernels/include/blockflash/ptx that portable kernels use, as a CPU computes
// them.
#pragma once

#include "simt.h"

namespace blockflash::ptx {

struct Words4 {
  uint32_t word[4];
};

inline Words4 matrices(uint32_t row, bool transposed) {
  return simt::together<Words4>(row, [transposed](const uint32_t* rows, Words4* out) {
    for (int i = 0; i < 4; ++i) {
      uint16_t matrix[8][8];
      for (int r = 0; r < 8; ++r) memcpy(matrix[r], simt::at(rows[i * 8 + r], 16), 16);
      for (int lane = 0; lane < simt::kWarp; ++lane) {
        const int a = lane / 4, b = lane % 4 * 2;
        const uint32_t low = transposed ? matrix[b][a] : matrix[a][b];
        const uint32_t high = transposed ? matrix[b + 1][a] : matrix[a][b + 1];
        out[lane].word[i] = low | high << 16;
      }
    }
  });
}
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  const Words4 words = matrices(row, false);
  std::copy_n(words.word, 4, r);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  const Words4 words = matrices(row, true);
  std::copy_n(words.word, 4, r);
}

template <class Element>
float element_of(uint32_t word, int half) {
  return static_cast<float>(bits_of<Element>(static_cast<uint16_t>(word >> (16 * half))));
}

inline uint32_t movmatrix_trans(uint32_t x) {
  return simt::together<uint32_t>(x, [](const uint32_t* in, uint32_t* out) {
    const auto element = [in](int row, int column) {
      return in[row * 4 + column / 2] >> (column % 2 * 16) & 0xFFFF;
    };
    for (int lane = 0; lane < simt::kWarp; ++lane)
      out[lane] = element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  });
}

// The fragments are those of mma.cuh.
template <class Element>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct In {
    uint32_t a[4], b[2];
    float d[4];
  };
  struct Out {
    float d[4];
  };
  const In mine = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  const Out out = simt::together<Out>(mine, [](const In* in, Out* out) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < simt::kWarp; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i)
          left[g + i % 2 * 8][t * 2 + half + i / 2 * 8] = element_of<Element>(in[lane].a[i], half);
        for (int i = 0; i < 2; ++i)
          right[t * 2 + half + i * 8][g] = element_of<Element>(in[lane].b[i], half);
      }
    }
    for (int lane = 0; lane < simt::kWarp; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = in[lane].d[i];
        for (int k = 0; k < 16; ++k) sum += left[row][k] * right[k][column];
        out[lane].d[i] = sum;
      }
  });
  std::copy_n(out.d, 4, d);
}

inline void cp_async_cg_16(uint32_t to, const void* from, int bytes) {
  simt::start({to, from, bytes, 16});
}
inline void cp_async_ca_4_or_zero(uint32_t to, const void* from, bool exists) {
  simt::start({to, from, exists ? 4 : 0, 4});
}
inline uint32_t permute_bytes(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t x = 0;
  for (int i = 0; i < 4; ++i) x |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return x;
}
inline void f16x4_of_e4m3x4(uint32_t, uint32_t&, uint32_t&) { simt::fail("cvt.e4m3x2"); }
inline void cp_async_ca_4(uint32_t to, const void* from) { simt::start({to, from, 4, 4}); }
inline void cp_async_cg_16_if(bool active, uint32_t to, const void* from, int bytes) {
  if (active) cp_async_cg_16(to, from, bytes);
}
inline void cp_async_cg_16_hinted(uint32_t to, const void* from, uint64_t) {
  cp_async_cg_16(to, from, 16);
}
inline void cp_async_commit_group() { simt::commit(); }
template <int pending>
void cp_async_wait_group() {
  simt::wait_for_groups(pending);
}

inline void cp_async_wait_all() {
  cp_async_commit_group();
  simt::wait_for_groups(0);
}
inline uint64_t evict_normal() { return 0; }
inline uint64_t evict_first() { return 0; }

inline void named_barrier_sync(int id, int threads) { simt::meet(id, threads, false); }
inline bool named_barrier_or(int id, int threads, bool x) { return simt::meet(id, threads, x); }

template <int index>
uint32_t load_4_or_2_bytes_if(const void* at, int wide, int narrow) {
  uint32_t x = 0;
  if (index < wide || index < narrow) memcpy(&x, at, index < wide ? 4 : 2);
  return x;
}

inline uint32_t load_early_4_or_2_bytes_if(const void* at, bool four, bool two) {
  uint32_t x = 0;
  if (four || two) memcpy(&x, at, four ? 4 : 2);
  return x;
}
inline uint32_t load_byte_if(const uint8_t* at, bool loads) { return loads ? *at : 255; }

template <class T>
T load(uint32_t address) {
  T x;
  memcpy(&x, simt::at(address, sizeof x), sizeof x);
  return x;
}
template <class T>
void store(uint32_t address, const T& x) {
  memcpy(simt::at(address, sizeof x), &x, sizeof x);
}
inline uint32_t load_shared(uint32_t at) { return load<uint32_t>(at); }
inline void store_shared(uint32_t at, uint32_t x) { store(at, x); }
inline void load_shared_float2(float (&x)[2], uint32_t at) {
  x[0] = load<float>(at), x[1] = load<float>(at + 4);
}
inline int4 load_shared_int4(uint32_t at) { return load<int4>(at); }
inline void store_shared_int4(uint32_t at, int4 x) { store(at, x); }

inline float max_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : max(a, b); }

inline float ex2_approx(float x) { return exp2f(x); }
inline float lg2_approx(float x) { return log2f(x); }
inline float rcp_approx(float x) { return 1 / x; }
template <class Element>
uint32_t fma_x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t x = 0;
  for (int half = 0; half < 2; ++half) {
    const float sum = fmaf(element_of<Element>(a, half), element_of<Element>(b, half),
                           element_of<Element>(c, half));
    x |= static_cast<uint32_t>(bits_of<uint16_t>(Element(sum))) << 16 * half;
  }
  return x;
}
inline uint32_t fma_f16x2(uint32_t a, uint32_t b, uint32_t c) { return fma_x2<__half>(a, b, c); }
inline uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  return fma_x2<__nv_bfloat16>(a, b, c);
}

inline void store_16_bytes(void* to, const uint32_t (&words)[4]) { memcpy(to, words, 16); }

inline void mbarrier_init(uint32_t, uint32_t) { simt::fail("mbarrier.init"); }
inline void mbarrier_wait(uint32_t, uint32_t) { simt::fail("mbarrier.try_wait"); }

// CTAs and launches follow one another.
inline uint64_t load_acquire(const uint64_t* at) { return *at; }
inline uint64_t atomic_exchange(uint64_t* at, uint64_t x) { return std::exchange(*at, x); }
inline void add_relaxed(uint64_t* at, uint64_t x) { *at += x; }
inline void max_relaxed(uint64_t* at, uint64_t x) { *at = max(*at, x); }
inline uint64_t atomic_add_acq_rel(uint64_t* at, uint64_t x) { return std::exchange(*at, *at + x); }
inline uint32_t atomic_inc_acq_rel(uint32_t* at, uint32_t last) {
  return std::exchange(*at, *at >= last ? 0 : *at + 1);
}
inline void wait_for_predecessors() {}
inline void wait_for_predecessors_behind(uint64_t) {}
inline void launch_dependents() {}

template <class T>
T opaque(T x) {
  return x;
}

}  // namespace blockflash::ptx
