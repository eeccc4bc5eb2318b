//! Random garbage in everything on the GPU that decides about addresses or loops, for every kernel:
//! nothing outside of the tensors is touched, and nothing hangs. Also under a memory checker, where
//! `BLOCKFLASH_FUZZ_CASES` takes a sample.
#![forbid(unsafe_code)]

use blockflash_tests::garbage::{Place, fuzz};
use blockflash_tests::gpu::gpu;

#[test]
fn nothing_outside_and_no_hang() {
    let Some(gpu) = gpu("garbage_gpu::nothing_outside_and_no_hang") else { return };
    fuzz("garbage_gpu", 12_500, &Place::on(&gpu));
}
