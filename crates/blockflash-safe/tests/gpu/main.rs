//! What only a GPU can show. Without one each test prints `SKIPPED (no GPU)` and passes, unless
//! `BLOCKFLASH_REQUIRE_GPU=1`.

mod common;
mod foreign;
mod graphs;
mod kernels;
mod memory;
mod single;
mod streams;
