use super::super::attention_bwd_workspace::{attention_bwd_part_values, attention_bwd_workspace};
use super::super::attention_fixtures::scalars;
use super::super::checked::zeros;
use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::{ElementTypes, HeadDims};

fn tile(step: Step) -> AttentionBwdTile {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(64));
    let (block_q, block_kv, tensor_maps, splits_heads) = (64, 128, true, true);
    AttentionBwdTile {
        step,
        types,
        head_dims,
        block_q,
        block_kv,
        tensor_maps,
        splits_heads,
        terms: false,
    }
}

/// Of batch 3, 150 queries, 300 keys, 4 and 2 heads of 8 elements, and of a packed batch of 3
/// sequences, none longer than that: 170 queries and 310 keys.
fn plan() -> AttentionBwdPlan {
    let mut scalars = scalars([150, 300], [64, 256]);
    scalars.scores.window.right = 0;
    AttentionBwdPlan { scalars, sums_head_dim: None, heads_per_section: 2, parts: None }
}

/// CTAs of a launch, and its argument.
fn fitted(
    operands: &AttentionBwdOperands<'_>,
    tile: &AttentionBwdTile,
    plan: &AttentionBwdPlan,
) -> Fit<(i128, blockflash_attention_bwd_params)> {
    let mut params = zeros::<AttentionBwd>().base.bwd;
    Ok((operands.fit(tile, plan, &mut params)?.0, params))
}

fn fit(
    operands: &AttentionBwdOperands<'_>,
    tile: &AttentionBwdTile,
    plan: &AttentionBwdPlan,
) -> Fit<i128> {
    fitted(operands, tile, plan).map(|(blocks, _)| blocks)
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
pub(in super::super) struct Tensors {
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    sink: Tensor,
    written: [Tensor; 5],
    offsets: Option<Tensor>,
    lists: Option<[BlockLists; 2]>,
}

impl Tensors {
    pub(in super::super) fn of(
        q: &[usize],
        k: &[usize],
        lse: &[usize],
        bytes: usize,
        packed: bool,
    ) -> Self {
        let stream = Device::cpu().stream().unwrap();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
        let written = [
            zeros(DType::F16, q),
            zeros(DType::F16, k),
            zeros(DType::F16, k),
            zeros(DType::F32, &[4]),
            zeros(DType::U8, &[bytes]),
        ];
        Self {
            q: zeros(DType::F16, q),
            k: zeros(DType::F16, k),
            lse: zeros(DType::F32, lse),
            sink: zeros(DType::F32, &[4]),
            written,
            offsets: packed.then(|| zeros(DType::I32, &[4])),
            lists: None,
        }
    }

    fn dense(bytes: usize) -> Self {
        Self::of(&[3, 150, 4, 8], &[3, 300, 2, 8], &[3, 4, 150], bytes, false)
    }

    /// The dense ones with another tensor that is written.
    fn with(at: usize, tensor: Tensor) -> Self {
        let mut tensors = Self::dense(ROWS * 8);
        tensors.written[at] = tensor;
        tensors
    }

    fn packed(bytes: usize) -> Self {
        Self::of(&[170, 4, 8], &[310, 2, 8], &[4, 170], bytes, true)
    }

    pub(in super::super) fn operands(&mut self) -> AttentionBwdOperands<'_> {
        let (q, k) = (self.q.view(), self.k.view());
        let [dq, dk, dv, d_sink, workspace] = self.written.each_mut().map(Tensor::view_mut);
        AttentionBwdOperands {
            q,
            k,
            v: k,
            o: q,
            lse: self.lse.view(),
            d_o: q,
            dq,
            dk,
            dv,
            sink: Some(self.sink.view()),
            d_sink: Some(d_sink),
            workspace: Some(workspace),
            cu_seqlens: self.offsets.as_ref().map(|offsets| [offsets.view(), offsets.view()]),
            block_mask: self.lists.as_ref().map(|lists| lists.each_ref()),
            terms: ScoreTerms::default(),
            dbias: None,
        }
    }
}

const ROWS: usize = 3 * 4 * 192;

#[test]
fn bytes_of_a_workspace() {
    assert_eq!(attention_bwd_workspace(ROWS, None, 0), Some(ROWS * 8));
    let semaphores = ROWS / 64 * 4;
    assert_eq!(
        attention_bwd_workspace(ROWS, Some(64), 0),
        Some(ROWS * 8 + semaphores + ROWS * 64 * 4)
    );
    assert_eq!(attention_bwd_workspace(64, Some(64), 0), Some(64 * 8 + 16 + 64 * 64 * 4));
    assert_eq!(attention_bwd_workspace(0, Some(128), 0), Some(0));
    assert_eq!(attention_bwd_workspace(usize::MAX / 8, None, 0), None);
}

#[test]
fn numbers_of_blocks() {
    let of = |step| fit(&Tensors::dense(ROWS * 8).operands(), &tile(step), &plan());
    assert_eq!(of(Step::Statistics), Ok(3 * 12));
    assert_eq!(of(Step::Sinks), Ok(4));
    assert_eq!(of(Step::Keys), Ok(3 * 6));
    assert_eq!(of(Step::Queries), Ok(3 * 12));
    assert_eq!(of(Step::Zeros), Ok(22), "3 · 450 rows");
    assert!(of(Step::Sums).unwrap_err().contains("sums"));
    let sums = AttentionBwdPlan { sums_head_dim: Some(64), ..plan() };
    let bytes = attention_bwd_workspace(ROWS, Some(64), 0).unwrap();
    let of = |step, bytes| fit(&Tensors::dense(bytes).operands(), &tile(step), &sums);
    assert_eq!((of(Step::KeysAndSums, bytes), of(Step::Sums, bytes)), (Ok(18), Ok(36)));
    assert!(of(Step::KeysAndSums, bytes - 1).unwrap_err().contains("bytes of"));
    let packed = |step| fit(&Tensors::packed(4 * 320 * 8).operands(), &tile(step), &plan());
    assert_eq!((packed(Step::Statistics), packed(Step::Zeros)), (Ok(36), Ok(8)));
}

/// Two CTAs for each block of keys, with one query head each, and dk and dv of 6 heads with 384
/// keys twice.
#[test]
fn parts_of_heads() {
    const VALUES: usize = 2 * 6 * 2 * 384 * 64;
    let parts = AttentionBwdParts { count: 2, head_dim: 64 };
    let [split, both] = [None, Some(64)].map(|sums_head_dim| AttentionBwdPlan {
        sums_head_dim,
        parts: Some(parts),
        heads_per_section: 12,
        ..plan()
    });
    assert_eq!(attention_bwd_part_values(parts, 6, 300), Some(VALUES));
    assert_eq!(attention_bwd_part_values(parts, usize::MAX / 2, 1), None);
    let bytes = |plan: &AttentionBwdPlan| {
        attention_bwd_workspace(ROWS, plan.sums_head_dim, VALUES).unwrap()
    };
    assert_eq!(bytes(&split), ROWS * 8 + VALUES * 4);
    let of = |step, plan: &AttentionBwdPlan| {
        fit(&Tensors::dense(bytes(plan)).operands(), &tile(step), plan)
    };
    assert_eq!((of(Step::Keys, &split), of(Step::Queries, &split)), (Ok(36), Ok(36)));
    assert_eq!(of(Step::Sums, &split), Ok(2 * 6 * 6));
    assert_eq!(of(Step::KeysAndSums, &both), Ok(36));
    assert_eq!(of(Step::Sums, &both), Ok(36 + 2 * 6 * 6));
    let error = fit(&Tensors::dense(bytes(&both) - 1).operands(), &tile(Step::Sums), &both);
    assert!(error.unwrap_err().contains("bytes of"));
    let mut tensors = Tensors::dense(bytes(&both));
    let mut params = zeros::<AttentionBwd>().base.bwd;
    let (_, sums) = tensors.operands().fit(&tile(Step::Sums), &both, &mut params).unwrap();
    let first = params.negative_logs.addr();
    let [sums, key_parts] = [sums.dq, sums.key_parts].map(|at| at.addr() - first);
    assert_eq!((key_parts - sums, bytes(&both) - key_parts), (ROWS * 64 * 4, VALUES * 4));
    for (expected, parts) in [
        ("groups have 1 parts", AttentionBwdParts { count: 1, ..parts }),
        ("groups have 3 parts", AttentionBwdParts { count: 3, ..parts }),
        ("parts of head_dim 128", AttentionBwdParts { head_dim: 128, ..parts }),
    ] {
        let plan = AttentionBwdPlan { parts: Some(parts), ..split };
        let error = fit(&Tensors::dense(1 << 24).operands(), &tile(Step::Keys), &plan).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let whole = AttentionBwdTile { splits_heads: false, ..tile(Step::Keys) };
    let packed = AttentionBwdPlan { parts: Some(parts), ..plan() };
    let mut tensors = Tensors::dense(1 << 24);
    for error in [
        fit(&tensors.operands(), &whole, &split),
        fit(&Tensors::packed(1 << 24).operands(), &tile(Step::Keys), &packed),
    ] {
        assert!(error.unwrap_err().contains("the plan splits groups"));
    }
}

/// Every number of the argument is that of a tensor.
#[test]
fn sizes_and_strides_are_those_of_the_tensors() {
    let mut dense = Tensors::dense(ROWS * 8);
    let (_, b) = fitted(&dense.operands(), &tile(Step::Keys), &plan()).unwrap();
    let p = &b.base;
    assert_eq!([p.batch, p.num_heads_q, p.num_heads_kv], [3, 4, 2]);
    assert_eq!([p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv], [150, 300, 0, 0]);
    let [of_q, of_kv] = [[150 * 32, 32, 8], [300 * 16, 16, 8]];
    assert_eq!([p.o_stride_batch, p.o_stride_seq, p.o_stride_head], of_q);
    assert_eq!([b.d_o_stride_batch, b.d_o_stride_seq, b.d_o_stride_head], of_q);
    assert_eq!([b.dq_stride_batch, b.dq_stride_seq, b.dq_stride_head], of_q);
    assert_eq!([b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head], of_kv);
    assert_eq!([b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head], of_kv);
    assert_eq!([p.lse_stride_batch, p.lse_stride_head], [600, 150]);
    assert_eq!([b.statistics_stride_batch, b.statistics_stride_head], [4 * 192, 192]);
    let mut packed = Tensors::packed(4 * 320 * 8);
    let (_, b) = fitted(&packed.operands(), &tile(Step::Keys), &plan()).unwrap();
    let p = &b.base;
    assert_eq!([p.batch, p.seqlen_q, p.seqlen_kv, p.total_q, p.total_kv], [3, 150, 300, 170, 310]);
    assert_eq!([p.q_stride_batch, b.dq_stride_batch, b.dv_stride_batch], [0; 3]);
    assert_eq!([p.lse_stride_batch, p.lse_stride_head], [0, 170]);
    // The kernels add the batch stride also when the batch is packed.
    assert_eq!([b.statistics_stride_batch, b.statistics_stride_head], [0, (2 + 3) * 64]);
}

#[test]
fn what_does_not_fit() {
    let zeros = |dtype, shape: &[usize]| {
        Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
    };
    let f16 = |shape: &[usize]| zeros(DType::F16, shape);
    let cases: [(&str, Step, Tensors); 7] = [
        ("bytes of", Step::Keys, Tensors::dense(ROWS * 8 - 1)),
        ("dq is f16", Step::Queries, Tensors::with(0, f16(&[3, 150, 4, 16]))),
        ("dk is f16", Step::Zeros, Tensors::with(1, f16(&[3, 301, 2, 8]))),
        ("dv is f16", Step::Keys, Tensors::with(2, f16(&[1, 300, 2, 8]))),
        ("d_sink is f32", Step::Keys, Tensors::with(3, zeros(DType::F32, &[5]))),
        (
            "lse is f32",
            Step::Statistics,
            Tensors { lse: zeros(DType::F32, &[3, 4, 151]), ..Tensors::dense(ROWS * 8) },
        ),
        (
            "not positive",
            Step::Keys,
            Tensors { k: f16(&[3, 300, 0, 8]), ..Tensors::dense(ROWS * 8) },
        ),
    ];
    for (expected, step, mut tensors) in cases {
        let error = fit(&tensors.operands(), &tile(step), &plan()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    for longest in [[150, i32::MAX], [(1 << 30) + 1, 300]] {
        let plan = AttentionBwdPlan { scalars: scalars(longest, [64, 256]), ..plan() };
        let error = fit(&Tensors::packed(1 << 20).operands(), &tile(Step::Keys), &plan);
        let error = error.unwrap_err();
        assert!(error.contains("the limit is 1073741824"), "{error}");
    }
    for section in [0, -1, 7] {
        let plan =
            AttentionBwdPlan { sums_head_dim: Some(64), heads_per_section: section, ..plan() };
        let bytes = attention_bwd_workspace(ROWS, Some(64), 0).unwrap();
        let error = fit(&Tensors::dense(bytes).operands(), &tile(Step::KeysAndSums), &plan);
        assert!(error.unwrap_err().contains("heads_per_section is "));
    }
    let mut tensors = Tensors::dense(ROWS * 8);
    let operands = AttentionBwdOperands { workspace: None, ..tensors.operands() };
    let error = fit(&operands, &tile(Step::Keys), &plan()).unwrap_err();
    assert!(error.contains("there is no workspace, and"), "{error}");
    let mut tensors = Tensors::dense(ROWS * 8);
    let operands = AttentionBwdOperands { d_sink: None, ..tensors.operands() };
    let error = fit(&operands, &tile(Step::Sinks), &plan()).unwrap_err();
    assert!(error.contains("expected both"), "{error}");
    let mut tensors = Tensors::dense(ROWS * 8);
    let o = f16(&[3, 150, 5, 8]);
    let operands = AttentionBwdOperands { o: o.view(), ..tensors.operands() };
    let error = fit(&operands, &tile(Step::Statistics), &plan()).unwrap_err();
    assert!(error.starts_with("o is f16"), "{error}");
    let operands = AttentionBwdOperands { d_o: o.view(), ..tensors.operands() };
    let error = fit(&operands, &tile(Step::Queries), &plan()).unwrap_err();
    assert!(error.starts_with("d_o is f16"), "{error}");
}

/// Lists in which every row visits column 0.
fn lists(rows: usize, cols: usize) -> BlockLists {
    let arrays = BlockListArrays {
        groups: &[1, 1],
        rows,
        cols,
        row_ptr: &(0..=rows as i32).collect::<Vec<_>>(),
        col_idx: &vec![0; rows],
        row_order: &(0..rows as i32).collect::<Vec<_>>(),
        cu_rows: None,
    };
    BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap()
}

#[test]
fn a_mask_and_its_transpose_are_checked() {
    let of = |both: [BlockLists; 2], step, blocks| {
        let plan = AttentionBwdPlan { scalars: scalars([0; 2], blocks), ..plan() };
        let mut tensors = Tensors { lists: Some(both), ..Tensors::dense(1 << 20) };
        fitted(&tensors.operands(), &tile(step), &plan)
    };
    let both = || [lists(3, 2), lists(2, 3)];
    let (blocks, b) = of(both(), Step::Queries, [64, 256]).unwrap();
    assert_eq!(blocks, 3 * 12);
    let masks = [b.base.block_mask, b.block_mask_t].map(|m| [m.rows, m.block_q, m.block_kv]);
    assert_eq!(masks, [[3, 64, 256], [2, 256, 64]]);
    assert_eq!(b.block_mask_t.heads_per_group, 4);
    let (blocks, _) = of(both(), Step::Keys, [64, 256]).unwrap();
    assert_eq!(blocks, 4 * 6, "2 blocks of two tiles");
    let refused = |both, step, blocks| of(both, step, blocks).map(drop).unwrap_err();
    let error = refused([lists(3, 2), lists(3, 3)], Step::Keys, [64, 256]);
    assert!(error.contains("3 block rows, expected 2"), "{error}");
    let error = refused([lists(3, 2), lists(2, 4)], Step::Queries, [64, 256]);
    assert!(error.contains("block columns, beyond the"), "{error}");
    let error = refused(both(), Step::Keys, [64, 64]);
    assert!(error.contains("do not divide blocks"), "{error}");
    let plan = AttentionBwdPlan { sums_head_dim: Some(64), ..plan() };
    let mut tensors = Tensors { lists: Some(both()), ..Tensors::dense(1 << 22) };
    let error = fit(&tensors.operands(), &tile(Step::KeysAndSums), &plan).unwrap_err();
    assert!(error.contains("under a block mask"), "{error}");
}

/// As for the forward pass, of all tensors that have one of the head dimensions.
#[test]
fn each_tensor_has_its_own_head_dimension() {
    let mut wide = Tensors::of(&[3, 150, 4, 16], &[3, 300, 2, 16], &[3, 4, 150], ROWS * 8, false);
    for [qk, v] in [[16, 8], [8, 16]] {
        let mut of = |columns: [usize; 8]| {
            let all = wide.operands();
            let [q, k, values, o, d_o, dq, dk, dv] = columns;
            let operands = AttentionBwdOperands {
                q: all.q.slice(3, 0..q).unwrap(),
                k: all.k.slice(3, 0..k).unwrap(),
                v: all.v.slice(3, 0..values).unwrap(),
                o: all.o.slice(3, 0..o).unwrap(),
                d_o: all.d_o.slice(3, 0..d_o).unwrap(),
                dq: all.dq.slice(3, 0..dq).unwrap(),
                dk: all.dk.slice(3, 0..dk).unwrap(),
                dv: all.dv.slice(3, 0..dv).unwrap(),
                ..all
            };
            let (blocks, b) = fitted(&operands, &tile(Step::Keys), &plan())?;
            let p = &b.base;
            let [of_q, of_kv] = [[150 * 64, 64, 16], [300 * 32, 32, 16]];
            assert_eq!([p.q_stride_batch, p.q_stride_seq, p.q_stride_head], of_q);
            assert_eq!([p.o_stride_batch, p.o_stride_seq, p.o_stride_head], of_q);
            assert_eq!([p.k_stride_batch, p.k_stride_seq, p.k_stride_head], of_kv);
            assert_eq!([p.v_stride_batch, p.v_stride_seq, p.v_stride_head], of_kv);
            assert_eq!([b.d_o_stride_batch, b.d_o_stride_seq, b.d_o_stride_head], of_q);
            assert_eq!([b.dq_stride_batch, b.dq_stride_seq, b.dq_stride_head], of_q);
            assert_eq!([b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head], of_kv);
            assert_eq!([b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head], of_kv);
            Fit::Ok((blocks, [p.head_dim_qk, p.head_dim_v]))
        };
        let right = [qk, qk, v, v, v, qk, qk, v];
        assert_eq!(of(right), Ok((3 * 6, [qk as i32, v as i32])));
        // Those of q and v are the measure of the others.
        let names = ["k", "k", "o", "o", "d_o", "dq", "dk", "dv"];
        for (i, name) in names.into_iter().enumerate() {
            let mut columns = right;
            columns[i] = qk + v - columns[i];
            let error = of(columns).unwrap_err();
            assert!(error.starts_with(&format!("{name} is f16 ")), "{error}");
        }
    }
}
