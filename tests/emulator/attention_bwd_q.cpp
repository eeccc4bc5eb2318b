// The gradient of the queries.
#include "attention_bwd.h"

namespace {

blockflash::Params params;

void check(const Problem& problem, int number, std::mt19937& schedules) {
  Backward backward(problem, number);
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> dq(backward.gradients.dq.size(), schedules, NAN);
    backward.base.dq = dq.data;
    backward.write(params);
    run.launch(problem.batch * kHeads * backward.data.query_tiles(),
               [] { VARIANT_SYMBOL(params); });
    run.compare(number, "dq", dq, backward.gradients.dq, tolerance_of(problem, kGradientTolerance));
  });
}

}  // namespace

int main() { check_all(check); }
