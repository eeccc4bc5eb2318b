// From the results of splits in the workspace to the output, in a tree of four branches: the CTA
// that completes a node combines its children, in ascending order. For tiles whose results are so
// large that one CTA would take long for those of many splits. Items are single splits.
//
// `Tile` is described in combine.cuh; each thread has four columns of all rows.
#pragma once

#include "blockflash/decode/combine.cuh"

namespace blockflash {

// The node of a level that an item belongs to: 4^level splits, or the rest of them.
struct TreeNode {
  static constexpr int kBranches = 4;

  int level, first, step, count;  // its first split, the splits of a child, and its children
  bool is_root;

  __device__ __forceinline__ static TreeNode of(const DecodeItem& item, int level) {
    const int width = 1 << 2 * level, step = width / kBranches;
    const int first = item.split & ~(width - 1);
    const int count = ceil_div(min(item.splits - first, width), step);
    return {level, first, step, count, item.splits <= width};
  }
  // The lowest one from a level on that has several children. An only child is its node's result.
  __device__ __forceinline__ static TreeNode from(const DecodeItem& item, int level) {
    TreeNode node = of(item, level);
    while (node.count == 1 && !node.is_root) node = of(item, node.level + 1);
    return node;
  }

  // Arrives with one thread: the CTA stored a child and has met since. Nodes of all levels have
  // different words: one with several children has more splits than levels.
  __device__ __forceinline__ bool is_complete_with_this(const DecodeItem& item,
                                                        const Arrivals& arrivals) const {
    return arrivals.are_complete_with_this(item.slot_of(first + level - 1), count);
  }
};

// Combines the children of a node into its first one, or into the output, with all threads.
template <class Tile>
__device__ __forceinline__ void combine_children(const blockflash_attention_decode_params& p,
                                                 const DecodeItem& item, const TreeNode& node) {
  static_assert(Tile::columns == 4 * Tile::threads, "a thread has four columns");
  constexpr int kAtOnce = 4, kBranches = TreeNode::kBranches;  // rows, and children
  const Slot slot(p, item.slot_of(node.first));
  const int64_t rows_apart = static_cast<int64_t>(node.step) * item.slot_step * p.partial_rows;
  const int rows = rows_of<Tile>(p, item);
  const int piece = ptx::opaque(static_cast<int>(threadIdx.x));
#pragma unroll 1
  for (int row = 0; row < rows; row += kAtOnce) {
    Partial parts[kAtOnce][kBranches];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
      for (int s = 0; s < kBranches; ++s)
        parts[n][s] = row + n < rows && s < node.count
                          ? slot.load(p, row + n, piece, s * rows_apart)
                          : kNoPartial;
    __syncthreads();  // all have read the logarithms of the first child
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n) {
      if (row + n >= rows) break;
      Partial all = parts[n][0];
#pragma unroll
      for (int s = 1; s < kBranches; ++s)
        if (s < node.count) add(all, parts[n][s]);
      if (node.is_root)
        store_result<Tile>(p, item, row + n, piece, all);
      else
        slot.store(p, row + n, piece, all);
    }
  }
}

// Ends item n with all threads. Whether it completed its first node is asked for here and looked at
// when the next item ends, so that nobody waits for the answer. `Shared` is that of finish_item.
template <class Tile, class Shared>
__device__ __forceinline__ void finish_item_in_tree(const blockflash_attention_decode_params& p,
                                                    int n, Shared& shared) {
  const DecodeItem& item = shared.items[n & 3];
  const bool ends = shared.items[(n + 1) & 3].sequence < 0;
  if (ends) ptx::launch_dependents();
  // First the item before this one; then, if no other follows, this one.
  int ended = n - 1;
#pragma unroll 1
  while (true) {
    bool& last = shared.last[ended & 1];
    const DecodeItem& complete = shared.items[ended & 3];
    int level = 1;
#pragma unroll 1
    while (ended >= 0 && last) {
      const TreeNode node = TreeNode::from(complete, level);
      combine_children<Tile>(p, complete, node);
      if (node.is_root) break;
      level = node.level + 1;
      __syncthreads();  // all have stored, and have looked at `last`
      if (threadIdx.x == 0)
        last = TreeNode::from(complete, level).is_complete_with_this(complete, shared.arrivals);
      __syncthreads();
    }
    if (ended == n) return;
    __syncthreads();  // all have stored
    if (threadIdx.x == Tile::threads - 1)
      shared.last[n & 1] =
          item.splits > 1 && TreeNode::from(item, 1).is_complete_with_this(item, shared.arrivals);
    if (!ends) return;
    __syncthreads();
    ended = n;
  }
}

}  // namespace blockflash
