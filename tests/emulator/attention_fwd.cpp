// Attention forward: a few problems beside a reference in f64.
#include "attention.h"

namespace {

blockflash::Params params;

// Values that are not finite have keys of some weight: 0·infinity would be NaN.
const Problem kProblems[] = {
    {kQ + 6, 2 * kKv + 2, kD, kD, kAll, 0, 1, 0, false, false},
    {kQ, 3 * kKv + 9, kD, kD, kAll, 0, 30, 0, true, false},
    {9, 3 * kKv - 9, kD - 8, kD - 8, kAll, kAll, 8, 0, false, false},
    {9, 3 * kKv - 9, kD - 8, kD - 8, kAll, kAll, 1, 0, false, true},
    {40, 2 * kKv + 30, kD, kD, kKv + 3, 5, 3, 20, true, true},
    {40, 2 * kKv + 30, kD, kD - 24, kKv + 3, 5, 3, 20, true, true},
    {kQ + 6, kKv + 9, kD - 24, kD, kAll, 0, 1, 0, false, false},
};
const Problem kNonfinite = {
    kQ + 9, 190, kD, kD, kAll, kAll, 1, 0, false, true, BLOCKFLASH_DTYPE_F16, 0b1111, true, 64};

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Data data(problem, number);
  const int rows = problem.batch * problem.seqlen_q * kHeads;
  params = {};
  auto* const p = reinterpret_cast<blockflash_attention_fwd_params*>(&params);  // the first member
  data.write(*p);
  blockflash::with_terms(
      params, [&](const auto& all) { data.write(const_cast<blockflash_score_terms&>(all.terms)); });
  const Expected expected = forward(data);
  const unsigned ctas = problem.batch * kHeads * data.query_tiles();
  in_every_schedule(schedules, [&](Run& run) {
    const Tensor<Element> o(rows * problem.dv, schedules, NAN);
    const Tensor<float> lse(rows, schedules, NAN);
    p->o = o.data, p->lse = lse.data;
    run.launch(ctas, [] { VARIANT_SYMBOL(params); });
    run.compare(number, "o", o, expected.o, tolerance_of(problem, 0.02));
    run.compare(number, "lse", lse, expected.lse, tolerance_of(problem, 0.01));
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  if constexpr (kHasTerms) {
    for (const Problem& problem : kTermProblems) check(problem, number++, random);
    check(kNonfinite, number, random);
  } else {
    for (const Problem& problem : kProblems) check(problem, number++, random);
  }
}
