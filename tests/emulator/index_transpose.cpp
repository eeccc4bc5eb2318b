// The transpose of lists of keys, in its four steps.
#include "index_lists.h"

namespace {

using Config = blockflash::IndexTransposeConfig;
blockflash_attention_index_bwd_params params;

template <class T, class Value>
std::vector<double> doubles(const std::vector<T>& values, Value value_of) {
  std::vector<double> result;
  for (const T& x : values) result.push_back(static_cast<double>(value_of(x)));
  return result;
}

void check(const Problem& problem, int number, std::mt19937& schedules) {
  const Lists lists(problem, number);
  in_every_schedule(schedules, [&](Run& run) {
    lists.write(params);
    const Tensor<int32_t> counts(lists.sets * params.slabs * lists.bins);
    const Tensor<int32_t> lengths(lists.sets * lists.bins), begins(lists.sets * lists.bins);
    const Tensor<int32_t> first_part(lists.sets * lists.bins);
    const Tensor<int32_t> places(lists.sets * lists.entries);
    const Tensor<uint32_t> visits(lists.sets * lists.entries);
    const Tensor<blockflash_index_item> items(lists.sets * params.max_items);
    params.counts = counts.data, params.lengths = lengths.data, params.begins = begins.data;
    params.first_part = first_part.data, params.places = places.data;
    params.visits = visits.data, params.items = items.data;
    const auto chunks = [&](int of) { return (lists.bins + of - 1) / of; };
    const auto step = [&](int step, int ctas) {
      params.step = step;
      run.launch(ctas, [] { VARIANT_SYMBOL(params); });
    };
    step(BLOCKFLASH_INDEX_COUNT, lists.sets * params.slabs * chunks(BLOCKFLASH_INDEX_COUNT_BINS));
    step(BLOCKFLASH_INDEX_SUM, lists.sets * chunks(BLOCKFLASH_INDEX_SLAB));
    step(BLOCKFLASH_INDEX_DIVIDE, lists.sets);
    step(BLOCKFLASH_INDEX_LIST, lists.sets * params.slabs * chunks(BLOCKFLASH_INDEX_LIST_BINS));
    if (problem.hostile) return;
    for (int set = 0; set < lists.sets; ++set) {
      const Transpose expected(lists, set);
      const auto compare = [&](const char* name, const auto& got, int stride, const auto& values) {
        const Tensor<double> shown(values.size());
        for (size_t i = 0; i < values.size(); ++i)
          shown.data[i] = static_cast<double>(got.data[set * stride + i]);
        run.compare(number, name, shown, doubles(values, [](auto x) { return x; }), 0);
      };
      compare("lengths", lengths, lists.bins, expected.lengths);
      compare("begins", begins, lists.bins, expected.begins);
      compare("first_part", first_part, lists.bins, expected.first_part);
      compare("places", places, lists.entries, expected.places);
      compare("visits", visits, lists.entries, expected.visits);
      const auto item = [&](const char* name, auto value_of) {
        const Tensor<double> shown(params.max_items);
        std::vector<double> values = doubles(expected.items, value_of);
        for (int i = 0; i < params.max_items; ++i) {
          shown.data[i] = value_of(items.data[set * params.max_items + i]);
          if (i >= static_cast<int>(values.size())) values.push_back(value_of({-1, 0, 0, -1}));
        }
        run.compare(number, name, shown, values, 0);
      };
      using Item = blockflash_index_item;
      item("bin", [](const Item& item) { return double(item.bin); });
      item("begin", [](const Item& item) { return double(item.begin); });
      item("visits of items", [](const Item& item) { return double(item.visits); });
      item("part", [](const Item& item) { return double(item.part); });
    }
  });
}

}  // namespace

int main() {
  std::mt19937 random(7);
  int number = 0;
  for (const Problem& problem : kProblems) check(problem, number++, random);
}
