// Rows of a latent cache, of elements and of codes.
#pragma once

#include <cstring>

#include "codes.h"

namespace {

using blockflash::Config;
using blockflash::Element;

constexpr int kQk = Config::columns, kV = Config::values;

// A row of a cache, and what it stands for.
template <bool has_codes>
struct Rows {
  using Type = Element;
  static constexpr int kWidth = kQk;

  static void fill(Type* row, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int c = 0; c < kQk; ++c) row[c] = Type(normal(random));
  }
  static double at(const Type* row, int c) { return static_cast<float>(row[c]); }
  static void make_nan(Type* row, int c) { row[c] = Type(NAN); }
};
template <>
struct Rows<true> {
  using Type = uint8_t;
  static constexpr int kWidth = 656;

  static void fill(Type* row, std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (int c = 0; c < 512; ++c) {
      row[c] = random();
      if ((row[c] & 0x7f) == 0x7f) row[c] = 0;
    }
    // The root of the mean square of all codes is about 130.
    for (int i = 0; i < 4; ++i) write(row + 512 + 4 * i, exp2f(normal(random)) / 130);
    for (int c = 0; c < 64; ++c) write(row + 528 + 2 * c, Element(normal(random)));
  }
  static double at(const Type* row, int c) {
    if (c >= 512) return static_cast<float>(read<Element>(row + 528 + 2 * (c - 512)));
    return value_of(kE4m3, row[c]) * read<float>(row + 512 + c / 128 * 4);
  }
  // A code, or the scale of it and others.
  static void make_nan(Type* row, int c) {
    if (row[0] % 2)
      row[c] = 0xff;
    else
      write(row + 512 + c / 128 * 4, NAN);
  }

 private:
  template <class T>
  static T read(const Type* from) {
    T x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  template <class T>
  static void write(Type* to, T x) {
    memcpy(to, &x, sizeof x);
  }
};
using Row = Rows<blockflash::kHasCodes>;

}  // namespace
