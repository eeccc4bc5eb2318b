//! What attention at head dimensions beyond 256 asks of the driver of a Hopper GPU.
#![cfg(target_os = "linux")]

use blockflash_fake_driver::{FakeDriver, Launch};
use blockflash_ops::{Attention, DType, Device, Mask, Operation, Tensor};
use blockflash_sys::params::blockflash_attention_fwd_tma_params;
use std::mem::offset_of;

fn word(launch: &Launch, at: usize) -> u32 {
    u32::from_ne_bytes(launch.params[at..at + 4].try_into().unwrap())
}

#[test]
fn a_cta_has_each_tile() {
    let (driver, device) = (FakeDriver::load(), Device::cuda(0).unwrap());
    let stream = device.stream().unwrap();
    for (head_dim, seqlen_q, tiles, mask, heads) in [
        (512, 1024, 16, Mask::Full, 2),
        (264, 129, 3, Mask::Full, 2),
        // Heads whose keys fit into L2, as long as each CTA has at least two tiles.
        (512, 1024, 16, Mask::causal(), 16),
        (512, 130, 3, Mask::causal(), 16),
    ] {
        let tensor = |seqlen: usize, heads: usize| {
            Tensor::zeros(&stream, DType::BF16, &[2, seqlen, heads, head_dim]).unwrap()
        };
        let (q, k, mut o) = (tensor(seqlen_q, 8), tensor(1024, 4), tensor(seqlen_q, 8));
        let call =
            Attention { scores: mask.into(), ..Attention::new(q.view(), k.view(), k.view()) };
        let (result, calls) = driver.calls(|| call.run((o.view_mut(), None), &stream));
        result.unwrap();
        let launches: Vec<&Launch> = calls.iter().filter_map(|call| call.launch.as_ref()).collect();
        let [launch] = launches[..] else { panic!("{calls:?}") };
        assert_eq!(launch.symbol, "blockflash_attention_fwd_wide_sm90a_bf16_d512_q64_kv64");
        assert_eq!(launch.grid, [tiles * 8 * 2, 1, 1]);
        assert_eq!((launch.block, launch.cluster), ([384, 1, 1], None));
        assert!(launch.early);
        for at in [
            offset_of!(blockflash_attention_fwd_tma_params, q),
            offset_of!(blockflash_attention_fwd_tma_params, k),
            offset_of!(blockflash_attention_fwd_tma_params, v),
        ] {
            // Boxes of the fake driver's maps, behind an address, 4 sizes and 3 strides.
            assert_eq!([16, 17].map(|part| word(launch, at + 4 * part)), [64, 64]);
        }
        let section = offset_of!(blockflash_attention_fwd_tma_params, heads_per_section);
        assert_eq!(word(launch, section), heads, "{seqlen_q} {mask:?}");
    }
}
