use super::*;
use crate::launch::{LaunchConfig, checked};
use crate::{Device, Tensor};
use blockflash_sys::manifest;

/// 2 sequences with 3 new tokens and 3 queries each, 4 and 2 heads of 24 elements, 5 pages of 16
/// slots, 4 for each sequence, and angles for 64 positions of which 18 elements are turned.
struct Tensors {
    cache: [Tensor; 2],
    new: [Tensor; 2],
    table: Tensor,
    lengths: Tensor,
    q: Tensor,
    turned: Tensor,
    angles: [Tensor; 2],
}

impl Tensors {
    fn new() -> Self {
        Self {
            cache: [(); 2].map(|()| zeros(DType::F16, &[5, 16, 2, 24])),
            new: [(); 2].map(|()| zeros(DType::F16, &[2, 3, 2, 24])),
            table: zeros(DType::I32, &[2, 4]),
            lengths: zeros(DType::I32, &[2]),
            q: zeros(DType::F16, &[2, 3, 4, 24]),
            turned: zeros(DType::F16, &[2, 3, 4, 24]),
            angles: [(); 2].map(|()| zeros(DType::F32, &[64, 9])),
        }
    }

    fn operands(&mut self) -> KvAppendOperands<'_> {
        let rotary = self.angles.each_ref().map(Tensor::view);
        let [cache_k, cache_v] = self.cache.each_mut().map(Tensor::view_mut);
        KvAppendOperands {
            seqused: Some(self.lengths.view()),
            new: Some(NewKeys {
                cache_k,
                cache_v,
                block_table: Some(self.table.view()),
                k: self.new[0].view(),
                v: self.new[1].view(),
                cu_seqlens: None,
                rotary: Some(rotary),
                scales: [None, None],
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
    KvAppendPlan { longest: [0; 2], pairs: [BLOCKFLASH_ROTARY_INTERLEAVED; 2], capacity: 0 };

fn zeros(dtype: DType, shape: &[usize]) -> Tensor {
    Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
}

/// 6 rows of new keys with 2 heads and 6 of queries with 4, in pieces of 8 elements.
const BLOCKS: u32 = (6 * (2 + 4) * 3u32).div_ceil(256);

fn row(is_sm90: bool) -> &'static Kernel {
    let f16 = |row: &&Kernel| {
        row.variant == Variant::KvAppend(KvAppend { dtype: DType::F16 })
            && (row.target == crate::Target::Sm90) == is_sm90
    };
    manifest::kernels().iter().find(f16).unwrap()
}

fn fit_on(
    row: &Kernel,
    operands: &KvAppendOperands<'_>,
    blocks: u32,
    early: bool,
) -> Fit<blockflash_kv_append_params> {
    // `fit` looks at sizes and strides only.
    checked::fitted::<KvAppend>(row, &LaunchConfig::of(row, blocks, early), &PLAN, operands)
}

#[test]
fn an_append_that_fits() {
    let mut tensors = Tensors::new();
    let operands = tensors.operands();
    fit_on(row(false), &operands, BLOCKS, false).unwrap();
    let p = fit_on(row(true), &operands, BLOCKS, true).unwrap();
    assert_eq!([p.batch, p.num_heads_q, p.num_heads_kv], [2, 4, 2]);
    assert_eq!([p.head_dim_qk, p.head_dim_v], [24; 2]);
    assert_eq!([p.seqlen_new, p.total_new, p.seqlen_q, p.total_q], [3, 0, 3, 0]);
    let c = p.cache;
    assert_eq!([c.pages, c.page_size, c.capacity], [5, 16, 64]);
    let of_k = [c.k_stride_page, c.k_stride_slot, c.k_stride_head, c.block_table_stride];
    assert_eq!(of_k, [16 * 48, 48, 24, 4]);
    let of_new = [p.k_new_stride_batch, p.k_new_stride_seq, p.k_new_stride_head];
    let of_turned = [p.q_turned_stride_batch, p.q_turned_stride_seq, p.q_turned_stride_head];
    assert_eq!([of_new, of_turned], [[3 * 48, 48, 24], [3 * 96, 96, 24]]);
    let r = p.rotary_q;
    assert_eq!([r.positions, r.dim, r.pairs, r.dtype], [64, 18, 1, DType::F32 as i32]);
    // Only machine code for Hopper waits for its predecessor.
    let error = fit_on(row(false), &operands, BLOCKS, true).unwrap_err();
    assert!(error.contains("predecessor"), "{error}");
    assert!(fit_on(row(true), &operands, BLOCKS + 1, false).is_err());
}

/// Queries alone are in no cache: their positions follow from lengths, or from the capacity.
#[test]
fn queries_alone() {
    let mut tensors = Tensors::new();
    let operands = KvAppendOperands { new: None, seqused: None, ..tensors.operands() };
    let plan = KvAppendPlan { capacity: 100, ..PLAN };
    let blocks = (6 * 4 * 3u32).div_ceil(256);
    let config = LaunchConfig::of(row(true), blocks, true);
    let p = checked::fitted::<KvAppend>(row(true), &config, &plan, &operands).unwrap();
    assert_eq!((p.cache.capacity, p.batch, p.num_heads_q, p.num_heads_kv), (100, 2, 4, 0));
    assert!(p.cache.k.is_null() && p.k_new.is_null() && p.cache.seqused.is_null());
}

#[test]
fn appends_that_do_not_fit() {
    type Spoil = fn(&mut Tensors);
    let cases: [(&str, Spoil); 15] = [
        ("not positive", |t| t.q = zeros(DType::F16, &[2, 3, 0, 24])),
        ("not positive", |t| t.new[0] = zeros(DType::F16, &[2, 0, 2, 24])),
        ("v starts at", |t| t.cache[1] = zeros(DType::F16, &[5, 16, 2, 20])),
        ("k_new is f16", |t| t.cache[0] = zeros(DType::F16, &[5, 16, 2, 16])),
        ("v_new is f16", |t| t.cache[1] = zeros(DType::F16, &[5, 16, 2, 16])),
        ("v is f16", |t| t.cache[1] = zeros(DType::F16, &[6, 16, 2, 24])),
        ("v is f16", |t| t.cache[1] = zeros(DType::F16, &[5, 16, 3, 24])),
        ("k_new has 4 heads, the cache has 2", |t| {
            t.new = [(); 2].map(|()| zeros(DType::F16, &[2, 3, 4, 24]));
        }),
        ("block_table is i32", |t| t.table = zeros(DType::I32, &[3, 4])),
        ("seqused is i32", |t| t.lengths = zeros(DType::I32, &[3])),
        ("v_new is f16", |t| t.new[1] = zeros(DType::F16, &[2, 4, 2, 24])),
        ("q_turned is f16", |t| t.turned = zeros(DType::F16, &[2, 3, 4, 32])),
        ("there are 2 sequences of tokens and 3 of queries", |t| {
            (t.q, t.turned) =
                (zeros(DType::F16, &[3, 3, 4, 24]), zeros(DType::F16, &[3, 3, 4, 24]));
        }),
        ("sin is f32", |t| t.angles[1] = zeros(DType::F32, &[65, 9])),
        ("the rotary dimension is 26, expected an even number up to 24", |t| {
            t.angles = [(); 2].map(|()| zeros(DType::F32, &[64, 13]));
        }),
    ];
    for (expected, change) in cases {
        let mut tensors = Tensors::new();
        change(&mut tensors);
        let error = fit_on(row(true), &tensors.operands(), BLOCKS, false).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    let mut tensors = Tensors::new();
    let mut operands = tensors.operands();
    operands.new = operands.new.map(|new| NewKeys {
        cache_v: new.cache_v.slice(3, 0..20).unwrap(),
        v: new.v.slice(3, 0..20).unwrap(),
        ..new
    });
    let error = fit_on(row(true), &operands, BLOCKS, false).unwrap_err();
    assert_eq!(error, "head_dim_v is 20, expected a positive multiple of 8");
    let mut tensors = Tensors::new();
    let mut operands = tensors.operands();
    operands.new = operands.new.map(|new| NewKeys {
        cache_k: new.cache_k.slice(3, 0..0).unwrap(),
        k: new.k.slice(3, 0..0).unwrap(),
        ..new
    });
    let error = fit_on(row(true), &operands, BLOCKS, false).unwrap_err();
    assert_eq!(error, "head_dim_qk is 0, expected a positive multiple of 8");
    let plan = KvAppendPlan { pairs: [2, 0], ..PLAN };
    let (row, mut tensors) = (row(true), Tensors::new());
    let config = LaunchConfig::of(row, BLOCKS, false);
    let error = checked::fitted::<KvAppend>(row, &config, &plan, &tensors.operands()).unwrap_err();
    assert!(error.contains("pairs is 2, expected one of"), "{error}");
}
