use super::super::attention_fixtures::scalars;
use super::super::checked::zeros;
use super::super::{AttentionFwdOperands, AttentionScalars, ScoreTerms};
use super::*;
use crate::{BlockListArrays, DType, Device, Result, Tensor};
use blockflash_sys::manifest::{AttentionFwd, AttentionTile, Lse};
use blockflash_sys::params::blockflash_attention_fwd_params;
use blockflash_sys::{ElementTypes, HeadDims};

const TILE: AttentionTile = AttentionTile {
    types: ElementTypes::all(DType::F16),
    head_dims: HeadDims::all(64),
    block_q: 64,
    block_rows: 1,
    block_kv: 32,
    heads: 1,
    lse: Lse::AsAsked,
    dense_only: false,
    block_masks: true,
    tensor_maps: false,
    terms: false,
    bits_only: false,
};

/// What a mask of 128 × 64 blocks for batch 3, 150 queries, 100 keys, 4 and 2 heads of 8 elements
/// knows beside its lists. A packed batch of 3 sequences has 170 queries, none of more than 150,
/// and 250 keys.
fn plan() -> AttentionScalars {
    scalars([150, 100], [128, 64])
}

/// Tensors on the CPU: `fit` looks at sizes and strides only. The mask is `[batch, heads, rows]`.
struct Tensors {
    q: Tensor,
    k: Tensor,
    o: Tensor,
    lists: BlockLists,
    /// Offsets of the queries and keys of a packed batch.
    cu_seqlens: Option<Tensor>,
}

impl Tensors {
    fn new([batch, heads, rows]: [usize; 3]) -> Result<Self> {
        let stream = Device::cpu().stream()?;
        Ok(Self {
            q: Tensor::zeros(&stream, DType::F16, &[3, 150, 4, 8])?,
            k: Tensor::zeros(&stream, DType::F16, &[3, 100, 2, 8])?,
            o: Tensor::zeros(&stream, DType::F16, &[3, 150, 4, 8])?,
            lists: lists(&[batch, heads], rows, None),
            cu_seqlens: None,
        })
    }

    /// Of a packed batch.
    fn packed() -> Self {
        let stream = Device::cpu().stream().unwrap();
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&stream, dtype, shape).unwrap();
        Self {
            q: zeros(DType::F16, &[170, 4, 8]),
            k: zeros(DType::F16, &[250, 2, 8]),
            o: zeros(DType::F16, &[170, 4, 8]),
            lists: lists(&[2], 5, Some(&[0, 2, 3, 5])),
            cu_seqlens: Some(zeros(DType::I32, &[4])),
        }
    }

    fn operands(&mut self) -> AttentionFwdOperands<'_> {
        let (q, k) = (self.q.view(), self.k.view());
        let o = self.o.view_mut();
        let cu_seqlens = self.cu_seqlens.as_ref().map(|offsets| [offsets.view(), offsets.view()]);
        let block_mask = Some(&self.lists);
        let (lse, sink, terms, scales) = (None, None, ScoreTerms::default(), [None; 3]);
        AttentionFwdOperands { q, k, v: k, o, lse, sink, cu_seqlens, block_mask, terms, scales }
    }
}

/// Lists with the second of two columns, in the first row.
fn lists(groups: &[usize], rows: usize, cu_rows: Option<&[i32]>) -> BlockLists {
    let count = groups.iter().product::<usize>();
    let mut row_ptr = vec![1; count * (rows + 1)];
    row_ptr[0] = 0;
    let sequences = cu_rows.map_or(vec![0, rows as i32], <[i32]>::to_vec);
    let order = || sequences.windows(2).flat_map(|pair| (0..pair[1] - pair[0]).rev());
    let row_order: Vec<i32> = (0..count).flat_map(|_| order()).collect();
    let (row_ptr, row_order) = (&row_ptr, &row_order);
    let arrays =
        BlockListArrays { groups, rows, cols: 2, row_ptr, col_idx: &[1], row_order, cu_rows };
    BlockLists::new(&arrays, &Device::cpu().stream().unwrap()).unwrap()
}

type Change = fn(&mut AttentionScalars);

impl Tensors {
    /// Tiles of a launch, and its argument.
    fn fitted(
        &mut self,
        tile: &AttentionTile,
        scalars: &AttentionScalars,
    ) -> Fit<(i128, blockflash_attention_fwd_params)> {
        let mut params = zeros::<AttentionFwd>().base;
        Ok((self.operands().fit(tile, scalars, &mut params)?, params))
    }

    fn fit(&mut self, tile: &AttentionTile, scalars: &AttentionScalars) -> Fit<i128> {
        self.fitted(tile, scalars).map(|(tiles, _)| tiles)
    }
}

fn fit(mask: [usize; 3], change: Change) -> Fit<i128> {
    let mut plan = plan();
    change(&mut plan);
    Tensors::new(mask).unwrap().fit(&TILE, &plan)
}

/// What kernels find lists by.
#[test]
fn masks_that_fit() {
    // Two tiles per row, also in the last one, for 4 heads of 3 entries.
    for (mask, groups) in
        [([1, 2, 2], [0, 2]), ([3, 2, 2], [2, 2]), ([1, 1, 2], [0, 4]), ([1, 4, 2], [0, 1])]
    {
        let (tiles, p) = Tensors::new(mask).unwrap().fitted(&TILE, &plan()).unwrap();
        let m = p.block_mask;
        assert_eq!(tiles, 2 * 2 * 4 * 3);
        assert_eq!([m.groups_per_batch, m.heads_per_group], groups, "{mask:?}");
        assert_eq!([m.rows, m.block_q, m.block_kv], [2, 128, 64]);
    }
    assert_eq!(fit([1, 2, 3], |p| p.blocks[0] = 64), Ok(36));
    assert_eq!(fit([1, 2, 1], |p| p.blocks[0] = 192), Ok(36));
    assert_eq!(fit([1, 2, 1], |p| p.blocks[0] = 1024), Ok(192));
}

#[test]
fn masks_that_do_not_fit() {
    let cases: [(&str, [usize; 3], Change); 12] = [
        ("do not divide blocks of", [1, 2, 2], |p| p.blocks[0] = 96),
        ("do not divide blocks of", [1, 2, 2], |p| p.blocks[0] = 0),
        ("do not divide blocks of", [1, 2, 2], |p| p.blocks[0] = -128),
        ("do not divide blocks of", [1, 2, 2], |p| p.blocks[1] = 48),
        ("do not divide blocks of", [1, 2, 2], |p| p.blocks[1] = 0),
        ("3 block rows, expected 2", [1, 2, 3], |_| {}),
        ("1 block rows, expected 2", [1, 2, 1], |_| {}),
        ("2 block rows, expected 1", [1, 2, 2], |p| p.blocks[0] = 256),
        ("not a multiple of the 3 of the mask", [1, 3, 2], |_| {}),
        ("not a multiple of the 8 of the mask", [1, 8, 2], |_| {}),
        ("the mask has 2 batch entries, expected 3", [2, 2, 2], |_| {}),
        ("block columns, beyond the", [1, 2, 2], |p| p.blocks[1] = 128),
    ];
    for (expected, mask, change) in cases {
        let error = fit(mask, change).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
    for (expected, groups) in [
        ("not a multiple of the 0 of the mask", [1, 0]),
        ("the mask has 0 batch entries, expected 3", [0, 2]),
    ] {
        let stream = Device::cpu().stream().unwrap();
        let lists = BlockLists::with_capacity(groups, 2, 2, 1, &stream).unwrap();
        let mut tensors = Tensors { lists, ..Tensors::new([1, 2, 2]).unwrap() };
        let error = tensors.fit(&TILE, &plan()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

/// Kernels would attend all pairs of a partial block.
#[test]
fn masks_with_partial_blocks_do_not_fit() {
    let stream = Device::cpu().stream().unwrap();
    let lists = lists(&[1, 2], 2, None).with_bits(2, &[0], &[0; 2 * 128], &stream).unwrap();
    let mut tensors = Tensors { lists, ..Tensors::new([1, 2, 2]).unwrap() };
    let error = tensors.fit(&TILE, &plan()).unwrap_err();
    assert!(error.starts_with("block_bits is given, expected none"), "{error}");
}

/// Positions in a row are counted in 32 bits, whatever a kernel may write to it.
#[test]
fn rows_of_a_mask_are_not_too_long() {
    let lists = BlockLists::with_capacity([1, 2], 2, 2, 1 << 10, &Device::cpu().stream().unwrap());
    let mut tensors = Tensors { lists: lists.unwrap(), ..Tensors::new([1, 2, 2]).unwrap() };
    // Room for 2^10 columns of 2^27 keys, 2^22 tiles each.
    let error = tensors.fit(&TILE, &scalars([150, 100], [128, 1 << 27])).unwrap_err();
    assert_eq!(error, "a row of the mask has 4294967296 tiles of keys, the limit is 2147483647");
}

#[test]
fn packed_masks_that_fit() {
    let fitted = |change: Change| {
        let mut plan = plan();
        change(&mut plan);
        Tensors::packed().fitted(&TILE, &plan)
    };
    let fit = |change| fitted(change).map(|(tiles, _)| tiles);
    // As many tiles as for the longest sequence, which has 2 rows, for 4 heads of 3 sequences.
    let (tiles, p) = fitted(|_| {}).unwrap();
    let m = p.block_mask;
    assert_eq!((tiles, m.rows, m.groups_per_batch, m.heads_per_group), (2 * 2 * 4 * 3, 5, 0, 2));
    // Offsets are clamped to the rows that there are.
    assert_eq!([p.total_q, p.total_kv], [170, 250]);
    assert_eq!([p.q_stride_batch, p.k_stride_batch, p.o_stride_batch], [0; 3]);
    assert_eq!(fit(|p| p.longest[0] = 128), Ok(24));
    assert_eq!(fit(|p| (p.blocks[0], p.longest[1]) = (64, 250)), Ok(36));
    for (expected, change) in [
        ("the limit of queries is 2147483647", (|p| p.longest[0] = i32::MAX) as Change),
        ("a size is not positive", |p| p.longest[0] = 0),
        ("a size is not positive", |p| p.longest[1] = -1),
    ] {
        let error = fit(change).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    }
}

#[test]
fn a_log_sum_exp_where_the_kernel_computes_one() {
    let mut tensors = Tensors::packed();
    assert!(tensors.operands().lse.is_none());
    let mut fit = |lse| tensors.fit(&AttentionTile { lse, ..TILE }, &plan());
    assert_eq!((fit(Lse::AsAsked), fit(Lse::Never)), (Ok(48), Ok(48)));
    assert!(
        fit(Lse::Always)
            .unwrap_err()
            .contains("lse is not given, and the kernel computes it in each launch")
    );
}

#[test]
fn packed_arrays_that_do_not_fit() {
    let refused = |expected: &str, lists: BlockLists| {
        let mut tensors = Tensors { lists, ..Tensors::packed() };
        let error = tensors.fit(&TILE, &plan()).unwrap_err();
        assert!(error.contains(expected), "{error} does not say {expected}");
    };
    refused("not a multiple of the 3", lists(&[3], 5, Some(&[0, 2, 3, 5])));
    refused("the mask has 2 batch entries, expected 3", lists(&[2], 5, Some(&[0, 2, 5])));
    // Either the batch or the mask.
    let mut tensors = Tensors::packed();
    let operands = AttentionFwdOperands { cu_seqlens: None, ..tensors.operands() };
    let mut params = zeros::<AttentionFwd>().base;
    assert!(operands.fit(&TILE, &plan(), &mut params).is_err());
    let offsets = Tensor::zeros(&Device::cpu().stream().unwrap(), DType::I32, &[4]).unwrap();
    let mut dense = Tensors::new([1, 2, 2]).unwrap();
    let cu_seqlens = Some([offsets.view(), offsets.view()]);
    let (q, k, o) = (tensors.q.view(), tensors.k.view(), tensors.o.view_mut());
    let operands = AttentionFwdOperands { q, k, v: k, o, cu_seqlens, ..dense.operands() };
    let error = operands.fit(&TILE, &plan(), &mut params).unwrap_err();
    assert!(error.contains("the block mask is not packed, and the batch is packed"), "{error}");
}

/// Whatever blocks the plan names, a call without a mask is dense.
#[test]
fn without_a_mask_its_sizes_are_ignored() {
    let mut tensors = Tensors::new([1, 2, 2]).unwrap();
    let operands = AttentionFwdOperands { block_mask: None, ..tensors.operands() };
    let mut params = zeros::<AttentionFwd>().base;
    let fit = operands.fit(&TILE, &scalars([0; 2], [77, -1]), &mut params);
    assert_eq!(fit, Ok(3 * 4 * 3));
    let mask = params.block_mask;
    assert!(mask.row_ptr.is_null() && mask.cu_rows.is_null() && mask.rows == 0);
}
