// What the programs of all kernels share: tensors, and runs in every schedule. A tensor ends where
// a page ends that nobody may touch.
#pragma once

#include <sys/mman.h>

#include "kernel.cu"

alignas(1024) unsigned char smem[blockflash::Config::smem_bytes];  // which the kernel declares

namespace {

template <class T>
struct Tensor {
  T* data;
  size_t size;

  explicit Tensor(size_t size) : size(size) {
    const size_t page = 4096, bytes = size * sizeof(T), pages = (bytes + page - 1) / page;
    void* const all = mmap(nullptr, (pages + 1) * page, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* const end = static_cast<char*>(all) + pages * page;
    if (all == MAP_FAILED || mprotect(end, page, PROT_NONE) != 0) simt::fail("no memory");
    data = reinterpret_cast<T*>(end - bytes);
  }
  // N(0, 1) times a factor.
  Tensor(size_t size, std::mt19937& random, float factor) : Tensor(size) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < size; ++i) data[i] = T(normal(random) * factor);
  }
  double at(size_t i) const { return static_cast<float>(data[i]); }
};

// A launch in one schedule, and what the first schedule gave.
struct Run {
  simt::Schedule schedule;
  std::mt19937& random;
  std::vector<std::vector<double>>& first;
  size_t outputs = 0;

  void launch(unsigned ctas, void (*kernel)()) const {
    for (unsigned cta = 0; cta < ctas; ++cta)
      simt::run(cta, ctas, blockflash::Config::threads, smem, sizeof smem, schedule, kernel,
                random);
  }

  // Ends the program if the output differs from what is expected by more than the tolerance, which
  // is relative above 1, or to the sizes of what was summed, or at all from that of the first
  // schedule.
  template <class T>
  void compare(int problem, const char* name, const Tensor<T>& output,
               const std::vector<double>& expected, double tolerance,
               const std::vector<double>& sizes = {}) {
    const bool is_first = outputs == first.size();
    if (is_first) first.emplace_back();
    std::vector<double>& seen = first[outputs++];
    for (size_t i = 0; i < output.size; ++i) {
      const double x = output.at(i);
      if (is_first) seen.push_back(x);
      const double size = sizes.empty() ? 1 : max(1.0, sizes[i]);
      const auto are = [x, size](double y, double tolerance) {
        if (std::isnan(y)) return std::isnan(x);
        return std::isinf(y) ? x == y : fabs(x - y) <= tolerance * max(size, fabs(y));
      };
      if (are(expected[i], tolerance) && are(seen[i], 0)) continue;
      printf("problem %d, order %d, %s copies: %s[%zu] is %g in place of %g, at first %g\n",
             problem, static_cast<int>(schedule.order), schedule.late ? "late" : "early", name, i,
             x, expected[i], seen[i]);
      exit(1);
    }
  }
};

template <class Body>
void in_every_schedule(std::mt19937& random, const Body& body) {
  std::vector<std::vector<double>> first;
  for (simt::Order order : {simt::Order::kForward, simt::Order::kBackward, simt::Order::kRandom})
    for (bool late : {false, true}) {
      Run run{{order, late}, random, first};
      body(run);
    }
}

}  // namespace
