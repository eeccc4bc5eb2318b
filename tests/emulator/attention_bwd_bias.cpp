// The gradient of the bias, in the shape of the bias or, where there is none, in that of all
// scores.
#include "attention_bwd.h"

namespace {

blockflash_attention_bwd_bias_params params;

template <class T>
void check_as(int dtype, double tolerance, const Problem& problem, int number,
              std::mt19937& schedules) {
  Backward backward(problem, number);
  params = {};
  backward.write(params.base);
  const Data& data = backward.data;
  int sizes[4] = {problem.batch, kHeads, problem.seqlen_q, problem.seqlen_kv};
  if (problem.bias >= 0) std::copy_n(data.bias_sizes, 4, sizes);
  params.batch = sizes[0], params.heads = sizes[1], params.rows = sizes[2], params.cols = sizes[3];
  params.d_bias_type = dtype;
  params.d_bias_stride_kv = 1, params.d_bias_stride_q = sizes[3];
  params.d_bias_stride_head = int64_t{sizes[3]} * sizes[2];
  params.d_bias_stride_batch = params.d_bias_stride_head * sizes[1];
  std::vector<double> expected(params.d_bias_stride_batch * sizes[0]);
  for (int b = 0, at = 0; b < problem.batch; ++b)
    for (int h = 0; h < kHeads; ++h)
      for (int i = 0; i < problem.seqlen_q; ++i)
        for (int j = 0; j < problem.seqlen_kv; ++j)
          expected[(sizes[0] > 1 ? b : 0) * params.d_bias_stride_batch +
                   (sizes[1] > 1 ? h : 0) * params.d_bias_stride_head +
                   (sizes[2] > 1 ? i : 0) * params.d_bias_stride_q + (sizes[3] > 1 ? j : 0)] +=
              backward.gradients.d_bias[at++];
  const unsigned ctas =
      sizes[0] * sizes[1] * ((sizes[2] + kQ - 1) / kQ) * ((sizes[3] + kKv - 1) / kKv);
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<T> d_bias(expected.size(), schedules, NAN);
    params.d_bias = d_bias.data;
    run.launch(ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "d_bias", d_bias, expected, tolerance_of(problem, tolerance));
  });
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  if (number % 3 == 0) check_as<float>(BLOCKFLASH_DTYPE_F32, .003, problem, number, schedules);
  if (number % 3 == 1) check_as<__half>(BLOCKFLASH_DTYPE_F16, .003, problem, number, schedules);
  if (number % 3 == 2)
    check_as<__nv_bfloat16>(BLOCKFLASH_DTYPE_BF16, .01, problem, number, schedules);
}

}  // namespace

int main() { check_all(check); }
