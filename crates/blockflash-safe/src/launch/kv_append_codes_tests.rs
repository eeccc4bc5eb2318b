use super::*;
use crate::launch::kv_append::{NewKeys, TurnedQueries};
use crate::launch::{LaunchConfig, checked};
use crate::{Device, Tensor};
use blockflash_sys::manifest;
use blockflash_sys::params::BLOCKFLASH_ROTARY_HALVES;

/// 2 sequences with 3 new tokens and 3 queries each, 4 and 2 heads of 48 elements, 5 pages of 16
/// slots, and scales that are chosen for keys and given for values.
struct Tensors {
    cache: [Tensor; 2],
    scales: [Tensor; 2],
    new: [Tensor; 2],
    table: Tensor,
    q: Tensor,
    turned: Tensor,
    angles: [Tensor; 2],
}

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

impl Tensors {
    fn new() -> Self {
        Self {
            cache: [(); 2].map(|()| zeros(DType::I8, &[5, 16, 2, 48])),
            scales: [zeros(DType::F32, &[5, 16, 2]), zeros(DType::F32, &[2, 2])],
            new: [(); 2].map(|()| zeros(DType::F16, &[2, 3, 2, 48])),
            table: zeros(DType::I32, &[2, 4]),
            q: zeros(DType::BF16, &[2, 3, 4, 48]),
            turned: zeros(DType::BF16, &[2, 3, 4, 48]),
            angles: [(); 2].map(|()| zeros(DType::F32, &[64, 9])),
        }
    }

    fn operands(&mut self) -> KvAppendOperands<'_> {
        let rotary = self.angles.each_ref().map(Tensor::view);
        let [cache_k, cache_v] = self.cache.each_mut().map(Tensor::view_mut);
        let [k_scale, v_scale] = &mut self.scales;
        KvAppendOperands {
            seqused: None,
            new: Some(NewKeys {
                cache_k,
                cache_v,
                block_table: Some(self.table.view()),
                k: self.new[0].view(),
                v: self.new[1].view(),
                cu_seqlens: None,
                rotary: Some(rotary),
                scales: [
                    Some(NewScales::Chosen(k_scale.view_mut())),
                    Some(NewScales::Given(v_scale.view())),
                ],
            }),
            queries: Some(TurnedQueries {
                q: self.q.view(),
                turned: self.turned.view_mut(),
                cu_seqlens: None,
                rotary,
            }),
        }
    }
}

const PLAN: KvAppendPlan =
    KvAppendPlan { longest: [0; 2], pairs: [BLOCKFLASH_ROTARY_HALVES; 2], capacity: 0 };

/// 12 rows of new keys and 24 of queries, with 8 lanes each.
const BLOCKS: u32 = (36 * 8u32).div_ceil(256);

fn fit(operands: &KvAppendOperands<'_>) -> Fit<blockflash_kv_append_codes_params> {
    let found = |row: &&Kernel| matches!(row.variant, Variant::KvAppendCodes(_));
    let row = manifest::kernels().iter().find(found).unwrap();
    let config = LaunchConfig::of(row, BLOCKS, false);
    checked::fitted::<KvAppendCodes>(row, &config, &PLAN, operands)
}

#[test]
fn an_append_that_fits() {
    let p = fit(&Tensors::new().operands()).unwrap();
    assert_eq!([p.chooses_k, p.chooses_v], [1, 0]);
    let types = [DType::I8, DType::F16, DType::BF16].map(|dtype| dtype as i32);
    assert_eq!([p.cache_dtype, p.new_dtype, p.q_dtype], types);
    let s = p.scales;
    let of_k = [s.k_stride_sequence, s.k_stride_page, s.k_stride_slot, s.k_stride_head];
    let of_v = [s.v_stride_sequence, s.v_stride_page, s.v_stride_slot, s.v_stride_head];
    assert_eq!([of_k, of_v], [[0, 32, 2, 1], [2, 0, 0, 1]]);
    let c = p.append.cache;
    assert_eq!([c.k_stride_page, c.k_stride_slot, c.k_stride_head], [16 * 96, 96, 48]);
}

#[test]
fn appends_that_do_not_fit() {
    type Spoil = fn(&mut Tensors);
    let cases: [(&str, Spoil); 6] = [
        ("the cache is f16", |t| t.cache = [(); 2].map(|()| zeros(DType::F16, &[5, 16, 2, 48]))),
        ("v is e4m3", |t| t.cache[1] = zeros(DType::E4M3, &[5, 16, 2, 48])),
        ("k_new is f32", |t| t.new = [(); 2].map(|()| zeros(DType::F32, &[2, 3, 2, 48]))),
        ("k_scale is f32 [5, 16, 1]", |t| t.scales[0] = zeros(DType::F32, &[5, 16, 1])),
        ("v_scale is f32 [3, 2]", |t| t.scales[1] = zeros(DType::F32, &[3, 2])),
        ("v_scale is i32", |t| t.scales[1] = zeros(DType::I32, &[2, 2])),
    ];
    for (expected, change) in cases {
        let mut tensors = Tensors::new();
        change(&mut tensors);
        let error = fit(&tensors.operands()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    let mut tensors = Tensors::new();
    let error = fit(&KvAppendOperands { new: None, ..tensors.operands() }).unwrap_err();
    assert!(error.contains("nothing is appended"), "{error}");
}
