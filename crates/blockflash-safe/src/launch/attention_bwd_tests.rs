use super::super::attention_fixtures::{NO_MASK, PLAIN_SCORES, attention};
use super::*;
use crate::{BlockListArrays, Device, Tensor};
use blockflash_sys::params::{blockflash_block_mask, blockflash_scores, blockflash_window};
use blockflash_sys::{ElementTypes, HeadDims};
use std::ptr::null;

fn tile(step: Step) -> AttentionBwdTile {
    let (types, head_dims) = (ElementTypes::all(DType::F16), HeadDims::all(64));
    let (block_q, block_kv, tensor_maps, splits_heads) = (64, 128, true, true);
    AttentionBwdTile { step, types, head_dims, block_q, block_kv, tensor_maps, splits_heads }
}

/// Batch 3, 150 queries, 300 keys, 4 and 2 heads of 8 elements.
fn plan() -> AttentionBwdPlan {
    let [q, kv] = [[150 * 32, 32, 8], [300 * 16, 16, 8]];
    let base = blockflash_attention_fwd_params {
        lse_stride_batch: 600,
        lse_stride_head: 150,
        scores: blockflash_scores {
            window: blockflash_window { right: 0, ..PLAIN_SCORES.window },
            ..PLAIN_SCORES
        },
        ..attention(3, [150, 300], [4, 2])
    };
    let params = blockflash_attention_bwd_params {
        base,
        d_o: null(),
        dq: null_mut(),
        dk: null_mut(),
        dv: null_mut(),
        d_sink: null_mut(),
        negative_logs: null_mut(),
        deltas: null_mut(),
        semaphores: null_mut(),
        d_o_stride_batch: q[0],
        d_o_stride_seq: q[1],
        d_o_stride_head: q[2],
        dq_stride_batch: q[0],
        dq_stride_seq: q[1],
        dq_stride_head: q[2],
        dk_stride_batch: kv[0],
        dk_stride_seq: kv[1],
        dk_stride_head: kv[2],
        dv_stride_batch: kv[0],
        dv_stride_seq: kv[1],
        dv_stride_head: kv[2],
        statistics_stride_batch: 4 * 192,
        statistics_stride_head: 192,
        block_mask_t: NO_MASK,
    };
    AttentionBwdPlan { params, sums_head_dim: None, heads_per_section: 2, parts: None }
}

/// The same as a packed batch of 3 sequences, none longer than that: 170 queries and 310 keys.
fn packed_plan() -> AttentionBwdPlan {
    let mut plan = plan();
    let p = &mut plan.params.base;
    (p.total_q, p.total_kv) = (170, 310);
    (p.lse_stride_batch, p.lse_stride_head) = (0, 170);
    (plan.params.statistics_stride_batch, plan.params.statistics_stride_head) = (0, (2 + 3) * 64);
    plan
}

/// Tensors on the CPU: `fit` looks at sizes and strides only.
struct Tensors {
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    sink: Tensor,
    written: [Tensor; 5],
    offsets: Option<Tensor>,
    lists: Option<[BlockLists; 2]>,
}

impl Tensors {
    fn of(q: &[usize], k: &[usize], lse: &[usize], bytes: usize, packed: bool) -> Self {
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

    fn packed(bytes: usize) -> Self {
        Self::of(&[170, 4, 8], &[310, 2, 8], &[4, 170], bytes, true)
    }

    fn operands(&mut self) -> AttentionBwdOperands<'_> {
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
    let fit = |step| Tensors::dense(ROWS * 8).operands().fit(&tile(step), &plan());
    assert_eq!(fit(Step::Statistics), Ok(3 * 12));
    assert_eq!(fit(Step::Sinks), Ok(4));
    assert_eq!(fit(Step::Keys), Ok(3 * 6));
    assert_eq!(fit(Step::Queries), Ok(3 * 12));
    assert_eq!(fit(Step::Zeros), Ok(22), "3 · 450 rows");
    assert!(fit(Step::Sums).unwrap_err().contains("sums"));
    let sums = AttentionBwdPlan { sums_head_dim: Some(64), ..plan() };
    let bytes = attention_bwd_workspace(ROWS, Some(64), 0).unwrap();
    let fit = |step, bytes| Tensors::dense(bytes).operands().fit(&tile(step), &sums);
    assert_eq!((fit(Step::KeysAndSums, bytes), fit(Step::Sums, bytes)), (Ok(18), Ok(36)));
    assert!(fit(Step::KeysAndSums, bytes - 1).unwrap_err().contains("bytes of"));
    let packed = |step| Tensors::packed(4 * 320 * 8).operands().fit(&tile(step), &packed_plan());
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
    let fit = |step, plan: &AttentionBwdPlan| {
        Tensors::dense(bytes(plan)).operands().fit(&tile(step), plan)
    };
    assert_eq!((fit(Step::Keys, &split), fit(Step::Queries, &split)), (Ok(36), Ok(36)));
    assert_eq!(fit(Step::Sums, &split), Ok(2 * 6 * 6));
    assert_eq!(fit(Step::KeysAndSums, &both), Ok(36));
    assert_eq!(fit(Step::Sums, &both), Ok(36 + 2 * 6 * 6));
    let error = Tensors::dense(bytes(&both) - 1).operands().fit(&tile(Step::Sums), &both);
    assert!(error.unwrap_err().contains("bytes of"));
    let mut tensors = Tensors::dense(bytes(&both));
    let operands = tensors.operands();
    let [first, .., sums, key_parts] = operands.places(&both);
    let [sums, key_parts] = [sums, key_parts].map(|at| at.addr() - first.addr());
    assert_eq!((key_parts - sums, bytes(&both) - key_parts), (ROWS * 64 * 4, VALUES * 4));
    for (expected, parts) in [
        ("groups have 1 parts", AttentionBwdParts { count: 1, ..parts }),
        ("groups have 3 parts", AttentionBwdParts { count: 3, ..parts }),
        ("parts of head_dim 128", AttentionBwdParts { head_dim: 128, ..parts }),
    ] {
        let plan = AttentionBwdPlan { parts: Some(parts), ..split };
        let error = Tensors::dense(1 << 24).operands().fit(&tile(Step::Keys), &plan).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    let whole = AttentionBwdTile { splits_heads: false, ..tile(Step::Keys) };
    let packed = AttentionBwdPlan { parts: Some(parts), ..packed_plan() };
    let mut tensors = Tensors::dense(1 << 24);
    for error in [
        tensors.operands().fit(&whole, &split),
        Tensors::packed(1 << 24).operands().fit(&tile(Step::Keys), &packed),
    ] {
        assert!(error.unwrap_err().contains("the plan splits groups"));
    }
}

#[test]
fn what_does_not_fit() {
    type Change = fn(&mut AttentionBwdPlan);
    let fit = |bytes, step, change: Change| {
        let mut plan = plan();
        change(&mut plan);
        Tensors::dense(bytes).operands().fit(&tile(step), &plan).unwrap_err()
    };
    let cases: [(&str, usize, Step, Change); 11] = [
        ("bytes of", ROWS * 8 - 1, Step::Keys, |_| {}),
        ("statistics have the strides", ROWS * 8, Step::Keys, |p| {
            p.params.statistics_stride_head = 0
        }),
        ("statistics have the strides", ROWS * 8, Step::Statistics, |p| {
            p.params.statistics_stride_batch += 64;
        }),
        ("dq is f16", ROWS * 8, Step::Queries, |p| p.params.dq_stride_seq = 40),
        ("d_o is f16", ROWS * 8, Step::Queries, |p| p.params.d_o_stride_head = 16),
        ("dk is f16", ROWS * 8, Step::Zeros, |p| p.params.dk_stride_batch = 1),
        ("dv is f16", ROWS * 8, Step::Keys, |p| p.params.dv_stride_batch = -1),
        ("lse is f32", ROWS * 8, Step::Statistics, |p| p.params.base.lse_stride_head = 151),
        ("not positive", ROWS * 8, Step::Keys, |p| p.params.base.num_heads_kv = 0),
        ("o is f16", ROWS * 8, Step::Statistics, |p| p.params.base.o_stride_seq = 31),
        ("the limit is", ROWS * 8, Step::Keys, |p| p.params.base.seqlen_kv = i32::MAX),
    ];
    for (expected, bytes, step, change) in cases {
        let error = fit(bytes, step, change);
        let too_long = expected == "the limit is" && error.starts_with("k is f16");
        assert!(error.contains(expected) || too_long, "{error} does not say {expected}");
    }
    for section in [0, -1, 7] {
        let plan =
            AttentionBwdPlan { sums_head_dim: Some(64), heads_per_section: section, ..plan() };
        let bytes = attention_bwd_workspace(ROWS, Some(64), 0).unwrap();
        let error = Tensors::dense(bytes).operands().fit(&tile(Step::KeysAndSums), &plan);
        assert!(error.unwrap_err().contains("heads_per_section is "));
    }
    let mut tensors = Tensors::dense(ROWS * 8);
    let operands = AttentionBwdOperands { workspace: None, ..tensors.operands() };
    assert!(
        operands
            .fit(&tile(Step::Keys), &plan())
            .unwrap_err()
            .contains("there is no workspace, and")
    );
    let mut tensors = Tensors::dense(ROWS * 8);
    let operands = AttentionBwdOperands { d_sink: None, ..tensors.operands() };
    assert!(operands.fit(&tile(Step::Sinks), &plan()).unwrap_err().contains("expected both"));
    let mut packed = packed_plan();
    packed.params.statistics_stride_batch = 64;
    let error = Tensors::packed(1 << 20).operands().fit(&tile(Step::Keys), &packed).unwrap_err();
    assert!(error.contains("batch stride"), "{error}");
    let mut packed = packed_plan();
    packed.params.base.total_q = 171;
    let error = Tensors::packed(1 << 20).operands().fit(&tile(Step::Keys), &packed).unwrap_err();
    assert!(error.contains("total_q and total_kv are"), "{error}");
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
    let fit = |both: [BlockLists; 2], step, change: fn(&mut blockflash_attention_bwd_params)| {
        let mut plan = plan();
        let of = |rows, block_q, block_kv| blockflash_block_mask {
            rows,
            block_q,
            block_kv,
            heads_per_group: 4,
            ..NO_MASK
        };
        plan.params.base.block_mask = of(3, 64, 256);
        plan.params.block_mask_t = of(2, 256, 64);
        change(&mut plan.params);
        let mut tensors = Tensors { lists: Some(both), ..Tensors::dense(1 << 20) };
        tensors.operands().fit(&tile(step), &plan)
    };
    let both = || [lists(3, 2), lists(2, 3)];
    assert_eq!(fit(both(), Step::Queries, |_| {}), Ok(3 * 12));
    assert_eq!(fit(both(), Step::Keys, |_| {}), Ok(4 * 6), "2 blocks of two tiles");
    let error = fit([lists(3, 2), lists(3, 3)], Step::Keys, |_| {}).unwrap_err();
    assert!(error.contains("row_ptr"), "{error}");
    let error = fit([lists(3, 2), lists(2, 4)], Step::Queries, |_| {}).unwrap_err();
    assert!(error.contains("block columns, beyond the"), "{error}");
    let error = fit(both(), Step::Keys, |b| b.block_mask_t.block_q = 64).unwrap_err();
    assert!(error.contains("do not divide blocks"), "{error}");
    let plan = AttentionBwdPlan { sums_head_dim: Some(64), ..plan() };
    let mut tensors = Tensors { lists: Some(both()), ..Tensors::dense(1 << 22) };
    let error = tensors.operands().fit(&tile(Step::KeysAndSums), &plan).unwrap_err();
    assert!(error.contains("under a block mask"), "{error}");
}

/// As for the forward pass, of all tensors that have one of the head dimensions.
#[test]
fn each_tensor_has_its_own_head_dimension() {
    let mut wide = Tensors::of(&[3, 150, 4, 16], &[3, 300, 2, 16], &[3, 4, 150], ROWS * 8, false);
    for [qk, v] in [[16, 8], [8, 16]] {
        let mut plan = plan();
        let b = &mut plan.params;
        let p = &mut b.base;
        (p.head_dim_qk, p.head_dim_v) = (qk as i32, v as i32);
        let [of_q, of_kv] = [[150 * 64, 64, 16], [300 * 32, 32, 16]];
        [p.q_stride_batch, p.q_stride_seq, p.q_stride_head] = of_q;
        [p.o_stride_batch, p.o_stride_seq, p.o_stride_head] = of_q;
        [p.k_stride_batch, p.k_stride_seq, p.k_stride_head] = of_kv;
        [p.v_stride_batch, p.v_stride_seq, p.v_stride_head] = of_kv;
        [b.d_o_stride_batch, b.d_o_stride_seq, b.d_o_stride_head] = of_q;
        [b.dq_stride_batch, b.dq_stride_seq, b.dq_stride_head] = of_q;
        [b.dk_stride_batch, b.dk_stride_seq, b.dk_stride_head] = of_kv;
        [b.dv_stride_batch, b.dv_stride_seq, b.dv_stride_head] = of_kv;
        let mut fit = |columns: [usize; 8]| {
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
            operands.fit(&tile(Step::Keys), &plan)
        };
        let right = [qk, qk, v, v, v, qk, qk, v];
        assert_eq!(fit(right), Ok(3 * 6));
        let names = ["q", "k", "v", "o", "d_o", "dq", "dk", "dv"];
        for (i, name) in names.into_iter().enumerate() {
            let mut columns = right;
            columns[i] = qk + v - columns[i];
            let error = fit(columns).unwrap_err();
            assert!(error.starts_with(&format!("{name} is f16 ")), "{error}");
        }
    }
}
