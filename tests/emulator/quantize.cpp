// Rows as codes of 8 bits, held against the nearest of all codes.
#include "codes.h"

namespace {

blockflash_quantize_params params;
void launch() { VARIANT_SYMBOL(params); }

constexpr int kFloat = BLOCKFLASH_DTYPE_F32;
constexpr int kGiven = BLOCKFLASH_QUANTIZE_GIVEN, kTensor = BLOCKFLASH_QUANTIZE_TENSOR,
              kHead = BLOCKFLASH_QUANTIZE_HEAD, kToken = BLOCKFLASH_QUANTIZE_TOKEN;

enum Offsets { kDense, kPacked, kHostile };

struct Problem {
  int codes, of_x, batch, seqlen, heads, columns, scale_of;
  bool mean, rotates, heads_first;
  Offsets offsets;
  int rows;  // of a thread in a tile
};

const Problem kProblems[] = {
    {kE4m3, kBrain, 2, 5, 3, 128, kHead, false, false, false, kDense, 1},
    {kE4m3, kHalf, 2, 40, 2, 64, kToken, false, true, false, kPacked, 2},
    {kE5m2, kFloat, 1, 9, 5, 72, kTensor, true, false, true, kDense, 4},
    {kI8, kFloat, 3, 21, 1, 8, kGiven, false, true, false, kPacked, 1},
    {kI8, kBrain, 1, 300, 2, 24, kHead, true, false, false, kDense, 3},
    {kE4m3, kHalf, 3, 290, 1, 16, kToken, true, true, true, kPacked, 16},
    {kE5m2, kBrain, 2, 4, 9, 256, kTensor, false, true, false, kDense, 2},
    {kI8, kHalf, 2, 270, 3, 8, kTensor, true, false, false, kPacked, 1},
    {kE4m3, kFloat, 2, 3, 19, 248, kGiven, true, false, true, kDense, 2},
    {kE4m3, kBrain, 1, 0, 2, 64, kHead, true, false, false, kDense, 1},
    {kE5m2, kHalf, 4, 150, 2, 40, kHead, true, false, false, kHostile, 2},
    {kI8, kFloat, 5, 7, 2, 32, kToken, true, true, false, kHostile, 1},
};

float element(int dtype, uint32_t bits) {
  if (dtype == kFloat) return bits_of<float>(bits);
  return dtype == kHalf ? static_cast<float>(bits_of<__half>(static_cast<uint16_t>(bits)))
                        : static_cast<float>(bits_of<__nv_bfloat16>(static_cast<uint16_t>(bits)));
}

uint32_t rounded(int dtype, float x) {
  if (dtype == kFloat) return bits_of<uint32_t>(x);
  return dtype == kHalf ? bits_of<uint16_t>(__float2half_rn(x))
                        : bits_of<uint16_t>(__float2bfloat16_rn(x));
}

void rotate(std::vector<float>& row) {
  for (size_t half = 1; half < row.size(); half *= 2)
    for (size_t i = 0; i < row.size(); ++i) {
      if (i & half) continue;
      const float low = row[i], high = row[i + half];
      row[i] = low + high, row[i + half] = low - high;
    }
  for (float& x : row) x *= static_cast<float>(1 / sqrt(static_cast<double>(row.size())));
}

int ceil_div(int a, int b) { return (a + b - 1) / b; }

void check(const Problem& x, int number, std::mt19937& random) {
  const bool packed = x.offsets != kDense;
  const int total = x.batch * x.seqlen, groups = x.batch * x.heads;
  const Tensor<int32_t> offsets(x.batch + 1);
  for (int b = 0; b < x.batch; ++b) {
    // The last sequence may have all tokens that are left, and rows behind it are of none.
    const int left = total - offsets.data[b], length = random() % (2 * x.seqlen + 1);
    offsets.data[b + 1] = offsets.data[b] + min(left, length);
  }
  const int longest = packed ? total : x.seqlen;
  if (x.offsets == kHostile)
    for (int b = 0; b <= x.batch; ++b)
      offsets.data[b] = random() % 2 ? random() : random() % (total + 3);
  const int size = x.of_x == kFloat ? 4 : 2;
  const size_t elements = static_cast<size_t>(total) * x.heads * x.columns;
  const Tensor<uint8_t> numbers(elements * size);
  std::normal_distribution<float> normal(0.3f);
  for (size_t i = 0; i < elements; ++i) {
    const float odd[] = {NAN, INFINITY, -INFINITY, -0.f, 1e-7f, 3e4f};
    const size_t row = i / x.columns;
    const bool all_may = x.scale_of == kToken || x.scale_of == kGiven;
    const float y = row % 7 == 3                             ? 0.f
                    : row % 5 == 1 && i % 9 == 0 && all_may  ? odd[random() % 6]
                    : row % 11 == 5 && i % 9 == 0 && !x.mean ? odd[3 + random() % 2]
                                                             : normal(random);
    const uint32_t bits = rounded(x.of_x, y);
    memcpy(numbers.data + i * size, &bits, size);
  }
  // Strides of tokens and heads; sequences are apart.
  const int64_t of_token = x.heads_first ? x.columns : x.heads * x.columns;
  const int64_t of_head =
      x.heads_first ? int64_t{packed ? total : x.seqlen} * x.columns : int64_t{x.columns};
  const int64_t of_entry = packed ? 0 : int64_t{x.seqlen} * x.heads * x.columns;
  const size_t scales = x.scale_of == kTensor ? 1 : x.scale_of == kToken ? total * x.heads : groups;
  const Tensor<float> given(scales, random, 0.3f);
  for (size_t i = 0; i < scales; ++i) {
    const float odd[] = {0.f, INFINITY, 1e-25f, -0.5f, NAN};
    if (i % 3 == 2) given.data[i] = odd[i / 3 % 5];
  }

  in_every_schedule(random, [&](Run& run) {
    const Tensor<uint8_t> codes(elements);
    const Tensor<float> scale(scales), mean(x.mean ? groups * x.columns : 0);
    memset(codes.data, 0x5a, codes.size);
    std::copy_n(given.data, scales, scale.data);
    std::fill_n(mean.data, mean.size, NAN);
    blockflash_quantize_params& p = params;
    p = {};
    p.x = numbers.data, p.codes = codes.data, p.scale = scale.data;
    p.mean = x.mean ? mean.data : nullptr, p.cu_seqlens = packed ? offsets.data : nullptr;
    p.x_stride_batch = p.codes_stride_batch = of_entry;
    p.x_stride_seq = p.codes_stride_seq = of_token;
    p.x_stride_head = p.codes_stride_head = of_head;
    if (x.scale_of == kGiven || x.scale_of == kHead)
      p.scale_stride_batch = x.heads, p.scale_stride_head = 1;
    if (x.scale_of == kToken) {
      p.scale_stride_batch = packed ? 0 : x.seqlen * x.heads;
      p.scale_stride_seq = x.heads, p.scale_stride_head = 1;
    }
    p.mean_stride_batch = x.heads * x.columns, p.mean_stride_head = x.columns;
    p.batch = x.batch, p.num_heads = x.heads, p.head_dim = x.columns;
    p.seqlen = longest, p.total = packed ? total : 0;
    p.scale_of = x.scale_of, p.x_dtype = x.of_x, p.codes_dtype = x.codes;
    p.rotation = x.rotates ? static_cast<float>(1 / sqrt(static_cast<double>(x.columns))) : 0;
    int lanes = 1;
    while (lanes * 16 < x.columns) lanes *= 2;
    const int rows = 256 / lanes, blocks = ceil_div(x.heads, rows);
    const int heads = ceil_div(x.heads, blocks);
    p.tokens = rows / heads * x.rows;
    const auto slots = [&](int tokens) {
      return packed ? total / tokens + x.batch : x.batch * max(ceil_div(x.seqlen, tokens), 1);
    };
    const auto step = [&](int which, int ctas) {
      p.step = which;
      p.descending = which == BLOCKFLASH_QUANTIZE_GREATEST;
      run.launch(ctas, launch);
    };
    const int of_sums = max(rows / 16, 1);
    if (x.mean)
      step(BLOCKFLASH_QUANTIZE_SUMS, slots(BLOCKFLASH_QUANTIZE_CHUNK) * ceil_div(x.heads, of_sums));
    const bool shares = x.scale_of == kHead || x.scale_of == kTensor;
    if (x.mean || shares) step(BLOCKFLASH_QUANTIZE_MEANS, x.mean ? groups : ceil_div(groups, 256));
    if (shares) step(BLOCKFLASH_QUANTIZE_GREATEST, slots(p.tokens) * blocks);
    step(BLOCKFLASH_QUANTIZE_CODES, slots(p.tokens) * blocks);
    if (x.offsets == kHostile) return;

    const auto range = [&](int b) {
      const int first = packed ? offsets.data[b] : 0;
      return std::pair(first, packed ? offsets.data[b + 1] : x.seqlen);
    };
    const auto place = [&](int b, int token, int head) {
      return b * of_entry + token * of_token + head * of_head;
    };
    std::vector<double> want_mean(mean.size), sizes(mean.size);
    for (size_t at = 0; at < mean.size; ++at) {
      const int group = at / x.columns, b = group / x.heads, column = at % x.columns;
      double sum = 0, count = 0;
      for (auto [token, end] = range(b); token < end; ++token) {
        uint32_t bits = 0;
        memcpy(&bits, numbers.data + (place(b, token, group % x.heads) + column) * size, size);
        const float y = element(x.of_x, bits);
        if (isfinite(y)) sum += y, ++count, sizes[at] = max<double>(sizes[at], fabs(y));
      }
      want_mean[at] = sum / max(count, 1.0);
    }
    run.compare(number, "mean", mean, want_mean, 1e-6, sizes);

    const auto row_of = [&](int b, int token, int head) {
      std::vector<float> row(x.columns);
      for (int j = 0; j < x.columns; ++j) {
        uint32_t bits = 0;
        memcpy(&bits, numbers.data + (place(b, token, head) + j) * size, size);
        row[j] = element(x.of_x, bits);
        if (x.mean) row[j] -= mean.data[(b * x.heads + head) * x.columns + j];
      }
      if (x.rotates) rotate(row);
      return row;
    };
    std::vector<double> want(elements, 0x5a), want_scale(given.data, given.data + scales);
    if (shares) std::fill(want_scale.begin(), want_scale.end(), 0);
    const auto scale_of = [&](int b, int token, int head) -> double& {
      const size_t of_row = (packed ? token : b * x.seqlen + token) * x.heads + head;
      return want_scale[x.scale_of == kTensor  ? 0
                        : x.scale_of == kToken ? of_row
                                               : b * x.heads + head];
    };
    const auto each = [&](const auto& visit) {
      for (int group = 0; group < groups; ++group)
        for (auto [token, end] = range(group / x.heads); token < end; ++token)
          visit(group / x.heads, token, group % x.heads);
    };
    each([&](int b, int token, int head) {
      double& scale = scale_of(b, token, head);
      if (x.scale_of == kGiven) return;
      if (x.scale_of == kToken) scale = 0;
      for (float y : row_of(b, token, head))
        if (!std::isnan(y))
          scale = max<double>(scale, fabsf(y) / static_cast<float>(greatest(x.codes)));
      if (x.scale_of == kToken && scale == 0) scale = 1;
    });
    if (shares) std::replace(want_scale.begin(), want_scale.end(), 0.0, 1.0);
    each([&](int b, int token, int head) {
      const std::vector<float> row = row_of(b, token, head);
      const float by = scale_of(b, token, head);
      for (int j = 0; j < x.columns; ++j)
        want[place(b, token, head) + j] = nearest(x.codes, row[j] / by);
    });
    run.compare(number, "codes", codes, want, 0);
    run.compare(number, "scale", scale, want_scale, 0);
  });
}

// Quotients are those of IEEE arithmetic where codes tell them apart.
void check_division(std::mt19937& random) {
  using namespace blockflash;
  const auto any = [&](int exponents) {
    const uint32_t exponent = 127 - exponents + random() % (2 * exponents + 1);
    return bits_of<float>(static_cast<uint32_t>(random() & 0x807fffff) | exponent << 23);
  };
  for (int i = 0; i < 400000; ++i) {
    const float by = fabsf(any(i % 3 == 0 ? 120 : 12));
    float x[kOwn], exact[kOwn];
    for (int j = 0; j < kOwn; ++j) {
      // Numbers whose quotients are next to ties of codes, and some numbers.
      const float tie = j % 4 == 0 ? (random() % 16 + 16.5f) / 16 : random() % 254 - 126.5f;
      x[j] = j % 2 ? any(100) : tie * by;
      x[j] = bits_of<float>(bits_of<uint32_t>(x[j]) + static_cast<uint32_t>(random() % 5) - 2);
      if (j == 15) x[j] = i % 3 == 0 ? NAN : i % 3 == 1 ? -INFINITY : -0.f;
      exact[j] = x[j] / by;
    }
    Divisor::of(by).divide(x, false);
    for (int j = 0; j < kOwn; ++j) {
      const float size = fabsf(exact[j]);
      const bool is_same = bits_of<uint32_t>(x[j]) == bits_of<uint32_t>(exact[j]);
      if (size >= 0x1p-40f && size < 0x1p16f && !is_same) simt::fail("a quotient is wrong");
      for (int dtype : {kE4m3, kE5m2, kI8})
        if (code_of(x[j], dtype) != code_of(exact[j], dtype)) simt::fail("a code is wrong");
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
  check_division(random);
}
