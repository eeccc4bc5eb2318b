// The gradients of keys and values.
#include "attention_bwd.h"

namespace {

blockflash::Params params;

void check(const Problem& problem, int number, std::mt19937& schedules) {
  Backward backward(problem, number);
  const int blocks = problem.block > 0 ? backward.data.blocks.cols * (problem.block / kKv)
                                       : (problem.seqlen_kv + kKv - 1) / kKv;
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> dk(backward.gradients.dk.size(), schedules, NAN);
    const Tensor<Element> dv(backward.gradients.dv.size(), schedules, NAN);
    backward.base.dk = dk.data, backward.base.dv = dv.data;
    backward.write(params);
    run.launch(problem.batch * blocks, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "dk", dk, backward.gradients.dk, tolerance_of(problem, kGradientTolerance));
    run.compare(number, "dv", dv, backward.gradients.dv, tolerance_of(problem, kGradientTolerance));
  });
}

}  // namespace

int main() { check_all(check); }
