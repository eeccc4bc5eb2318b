// The shape of the tiles.
#pragma once

#include "blockflash/config/index_choice.cuh"
#include "blockflash/mma/swizzle.cuh"

namespace blockflash {
namespace {

using Config = IndexScoresConfig;
using Element = Config::Element;

constexpr int kSteps = Config::head_dim / 16;  // of products, 16 columns each
constexpr int kChunks = Config::head_dim / 8;  // of 16 bytes of a row
using Layout = Swizzle<kChunks>;

// Keys stay in registers, 128 of them per lane at the most, as the rows of products.
constexpr int kMTiles = Config::head_dim <= 128 ? 4 : 2;  // of 16 keys, of a warp
constexpr int kWarpKeys = 16 * kMTiles;
constexpr int kTileKeys = Config::warps * kWarpKeys;
constexpr int kTilePieces = kTileKeys / 16;  // of 16 keys, which are in one page
constexpr int kWarpBytes = kWarpKeys * Layout::row_bytes;

// Queries times heads pass by as the columns of products.
constexpr int kNTiles = 2;             // of 8 columns, of a product
constexpr int kColumns = 8 * kNTiles;  // of a product,
constexpr int kStageProducts = 2;      // of which a stage has these
constexpr int kStageColumns = kStageProducts * kColumns;
constexpr int kStageBytes = kStageColumns * Layout::row_bytes;

}  // namespace
}  // namespace blockflash
