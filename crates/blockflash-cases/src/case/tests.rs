use super::*;
use blockflash_sys::{DType, HeadDims};

const ATTENTION: AttentionShape = AttentionShape {
    pass: Pass::Forward,
    batch: 4,
    seqlen_q: 4096,
    seqlen_kv: 4096,
    lengths: None,
    num_heads_q: 32,
    num_heads_kv: 32,
    head_dims: HeadDims::all(64),
    lists: None,
    pairs: None,
    mask: MaskKind::Causal,
    dtype: DType::BF16,
};

fn varlen(lengths: &[usize], mask: MaskKind) -> AttentionShape {
    let shape = AttentionShape { num_heads_q: 4, num_heads_kv: 2, mask, ..ATTENTION };
    shape.packed(Lengths::new(lengths).unwrap())
}

const LISTS: BlockLists = BlockLists {
    mask_heads: 4,
    block_q: 64,
    block_kv: 128,
    density: 0.25,
    pattern: Pattern::Uniform,
};
const BLOCK_SPARSE: AttentionShape = AttentionShape {
    batch: 1,
    seqlen_q: 1024,
    seqlen_kv: 1024,
    num_heads_q: 4,
    num_heads_kv: 2,
    head_dims: HeadDims::all(128),
    lists: Some(LISTS),
    mask: MaskKind::Full,
    dtype: DType::F16,
    ..ATTENTION
};

fn backward(shape: AttentionShape) -> Case {
    AttentionShape { pass: Pass::Backward, ..shape }.into()
}

const SCORES: BlockMaskShape = BlockMaskShape {
    seqlen: 1000,
    num_heads: 4,
    block: 128,
    step: MaskStep::Scores { head_dim: 64, dtype: DType::BF16 },
};
const CODES: QuantizeShape = QuantizeShape {
    batch: 2,
    seqlen: 100,
    num_heads: 4,
    head_dim: 64,
    scale: ScaledBy::Token,
    rows: Rows::Rotated,
    dtype: DType::BF16,
    codes: DType::E4M3,
};
const CHOOSE: MaskStep = MaskStep::Choose { top_k: 3 };
pub(super) const BSR: BsrShape = BsrShape {
    m: 8192,
    n: 1024,
    k: 8192,
    block_size: 64,
    density: 0.1,
    pattern: Pattern::Uniform,
    dtype: DType::F16,
};

const DECODE: DecodeShape = DecodeShape {
    batch: 3,
    seqlen_q: 2,
    seqlen_kv: 96,
    num_heads_q: 8,
    num_heads_kv: 2,
    head_dims: HeadDims::all(64),
    page_size: Some(16),
    chosen: None,
    fill: Fill::Power,
    window: Some(20),
    latent: false,
    dtype: DType::BF16,
    kv_dtype: None,
};

#[test]
fn ids_are_readable_and_can_be_read_back() {
    let grouped =
        AttentionShape { num_heads_kv: 8, seqlen_q: 1, mask: MaskKind::Full, ..ATTENTION };
    let skewed = BsrShape { pattern: Pattern::PowerLaw, density: 0.0625, ..BSR };
    let of_two = BlockLists { mask_heads: 2, ..LISTS };
    let shared = AttentionShape { lists: Some(of_two), mask: MaskKind::Causal, ..BLOCK_SPARSE };
    let lists = BlockLists { mask_heads: 1, pattern: Pattern::PowerLaw, ..LISTS };
    let of_one = AttentionShape { lists: Some(lists), num_heads_kv: 4, ..BLOCK_SPARSE };
    for (case, id) in [
        (Case::Attention(ATTENTION), "b4_s4096_h32_d64_causal_bf16"),
        (Case::Attention(grouped.clone()), "b4_q1_kv4096_h32kv8_d64_full_bf16"),
        (
            Case::Attention(varlen(&[700, 300, 300, 8, 300], MaskKind::Causal)),
            "varlen700+300x2+8+300_h4kv2_d64_causal_bf16",
        ),
        (Case::Attention(varlen(&[2048; 8], MaskKind::Full)), "varlen2048x8_h4kv2_d64_full_bf16"),
        (Case::Attention(varlen(&[5], MaskKind::Full)), "varlen5_h4kv2_d64_full_bf16"),
        (Case::Attention(varlen(&[5, 9], MaskKind::Window(4))), "varlen5+9_h4kv2_d64_window4_bf16"),
        (Case::Attention(BLOCK_SPARSE), "b1_s1024_h4kv2_d128_q64kv128_d0.25_uniform_full_f16"),
        (Case::Attention(shared), "b1_s1024_h4kv2m2_d128_q64kv128_d0.25_uniform_causal_f16"),
        (Case::Attention(of_one.clone()), "b1_s1024_h4m1_d128_q64kv128_d0.25_power_law_full_f16"),
        (backward(ATTENTION), "bwd_b4_s4096_h32_d64_causal_bf16"),
        (backward(grouped), "bwd_b4_q1_kv4096_h32kv8_d64_full_bf16"),
        (backward(varlen(&[7, 2, 2], MaskKind::Full)), "bwd_varlen7+2x2_h4kv2_d64_full_bf16"),
        (backward(of_one), "bwd_b1_s1024_h4m1_d128_q64kv128_d0.25_power_law_full_f16"),
        (Case::BlockMaskBuild(SCORES), "mask_s1000_h4_b128_scores_d64_bf16"),
        (
            Case::BlockMaskBuild(BlockMaskShape { step: CHOOSE, ..SCORES }),
            "mask_s1000_h4_b128_top3",
        ),
        (Case::AttentionDecode(DECODE), "decode_b3_q2_kv96_h8kv2_d64_page16_power_window20_bf16"),
        (
            Case::AttentionDecode(DecodeShape { kv_dtype: Some(DType::E4M3), ..DECODE }),
            "decode_b3_q2_kv96_h8kv2_d64_page16_power_window20_bf16_e4m3_bf16",
        ),
        (Case::Quantize(CODES), "quantize_b2_s100_h4_d64_token_rotated_bf16_e4m3"),
        (Case::BsrMatmul(BSR), "m8192_n1024_k8192_b64_d0.1_uniform_f16"),
        (Case::BsrMatmul(skewed), "m8192_n1024_k8192_b64_d0.0625_power_law_f16"),
    ] {
        assert_eq!(case.to_string(), id);
        assert_eq!(id.parse(), Ok(case));
    }
    for wrong in [
        "",
        "b",
        "b4_s4096_h32_d64_causal",
        "b4_s04096_h32_d64_causal_bf16",
        "m8_n8_k8_b0_d1_uniform_f16",
        "x",
        "varlen_h4_d64_full_bf16",
        "varlen0_h4_d64_full_bf16",
        "varlen7+_h4_d64_full_bf16",
        "varlen7x0_h4_d64_full_bf16",
        "varlen7+7_h4_d64_full_bf16",
        "varlen7_h4_d64_window0_bf16",
        "varlen7_h4_d64_window_bf16",
        "b1_s128_h4_d64_q64kv64_d0.5_uniform_window64_bf16",
        "varlen7x1_h4_d64_full_bf16",
        "varlen+7_h4_d64_full_bf16",
        "varlen7x9999999999_h4_d64_full_bf16",
        "varlen2147483647+1_h4_d64_full_bf16",
        "varlen7_h4_d64_q64kv64_d0.5_uniform_full_bf16",
        "b1_varlen7_h4_d64_full_bf16",
        "b1_s128_h4m1_d64_full_bf16",
        "b1_s128_h4m4_d64_q64kv64_d0.5_uniform_full_bf16",
        "b1_s128_h4m2_d64_q64kv64_d0.5_uniform_full_bf16",
        "b1_s100_h4_d64_q64kv64_d0.5_uniform_full_bf16",
        "b1_s128_h4_d64_q64kv64_d0_uniform_full_bf16",
        "b1_s128_h4_d64_q64kv64_d0.5_banded_causal_bf16",
        "bwd",
        "bwd_bwd_b4_s4096_h32_d64_causal_bf16",
        "bwd_m8192_n1024_k8192_b64_d0.1_uniform_f16",
        "mask_s128_h4_b64",
        "mask_s128_h4_b64_top0",
        "mask_s128_h4_b64_top3_f32",
        "mask_s128_h4_b0_scores_d64_bf16",
        "mask_s128_h4_b64_scores_d64_i64",
        "quantize_b2_s100_h4_d96_token_rotated_bf16_e4m3",
        "quantize_b2_s100_h4_d64_row_plain_bf16_e4m3",
        "quantize_b2_s100_h4_d64_token_plain_bf16_f16",
    ] {
        assert!(wrong.parse::<Case>().unwrap_err().contains("is not a case"), "{wrong}");
    }
}

#[test]
fn flops_count_what_is_needed() {
    let causal = AttentionShape { seqlen_q: 2, seqlen_kv: 5, ..ATTENTION };
    // 4 + 5 pairs.
    let causal = Case::Attention(causal).work();
    assert_eq!((causal.flops, causal.exps), (4.0 * 4.0 * 32.0 * 64.0 * 9.0, 4.0 * 32.0 * 9.0));
    let full = Case::Attention(AttentionShape { mask: MaskKind::Full, ..ATTENTION }).work();
    assert_eq!(full.flops, 4.0 * 4.0 * 32.0 * 4096.0 * 4096.0 * 64.0);
    // 2 of 8 blocks of keys for each of 16 blocks of queries and 4 heads.
    let sparse = Case::Attention(BLOCK_SPARSE).work();
    assert_eq!(sparse.flops, 4.0 * 128.0 * (4 * 16 * 2 * 64 * 128) as f64);
    // The backward pass has five products of the size of these two.
    assert_eq!(backward(BLOCK_SPARSE).work().flops, 2.5 * sparse.flops);
    // 12.8 blocks of a row round to 13.
    assert_eq!(Case::BsrMatmul(BSR).work().flops, 2.0 * 128.0 * 13.0 * 4096.0 * 1024.0);
}

#[test]
fn making_a_mask_reads_once_and_writes_once() {
    let work = Case::BlockMaskBuild(SCORES).work();
    let (inputs, scores) = (2.0 * 1000.0 * 4.0 * 64.0, 4.0 * 8.0 * 8.0);
    assert_eq!((work.flops, work.exps), (inputs + scores * 128.0, 0.0));
    assert_eq!(work.bytes, inputs * 2.0 + scores * 4.0);
    let case = Case::BlockMaskBuild(BlockMaskShape { step: CHOOSE, ..SCORES });
    let work = case.work();
    assert_eq!((work.flops, case.dtype()), (0.0, DType::F32));
    // 36 scores of 64 are seen. Sink, window and diagonal are all of the first six rows, and 6
    // blocks of the others.
    let (seen, always) = (36.0, 21.0 + 6.0 + 6.0);
    assert_eq!(work.bytes, 4.0 * (9.0 + always + 4.0 * (seen + always + 9.0 + 8.0)));
}

#[test]
fn quantising_moves_what_a_copy_moves() {
    let work = Case::Quantize(CODES).work();
    assert_eq!((work.flops, work.bytes), (0.0, 800.0 * (3.0 * 64.0 + 4.0)));
    let of_heads = QuantizeShape { scale: ScaledBy::Head, dtype: DType::F32, ..CODES };
    assert_eq!(Case::Quantize(of_heads).work().bytes, 800.0 * 5.0 * 64.0);
}

#[test]
fn packed_sequences_are_counted_one_by_one() {
    let dense = |length| AttentionShape {
        batch: 1,
        seqlen_q: length,
        seqlen_kv: length,
        num_heads_q: 4,
        num_heads_kv: 2,
        ..ATTENTION
    };
    let shape = varlen(&[700, 8, 300], MaskKind::Causal);
    let work = Case::Attention(shape.clone()).work();
    let each = [700, 8, 300].map(|length| Case::Attention(dense(length)).work());
    let sum = |of: fn(&Work) -> f64| each.iter().map(of).sum::<f64>();
    assert_eq!((work.exps, work.l2_bytes), (sum(|work| work.exps), sum(|work| work.l2_bytes)));
    assert_eq!(work.bytes, sum(|work| work.bytes) + 16.0);
    let offsets = offsets(shape.lengths.as_ref().unwrap().as_slice());
    assert_eq!(offsets, [0, 700, 708, 1008]);
    let flops = blockflash_ops::attention_varlen_flops(&shape.problem(), &offsets, &offsets);
    assert_eq!((work.flops, sum(|work| work.flops)), (flops as f64, flops as f64));
    // As many tokens in equal lengths are the work of a dense batch, but for the offsets.
    let equal = Case::Attention(varlen(&[256; 4], MaskKind::Full)).work();
    let batch = AttentionShape { batch: 4, mask: MaskKind::Full, ..dense(256) };
    assert_eq!(equal, Work { bytes: equal.bytes, ..Case::Attention(batch).work() });
    // Of ten queries of each head, the first three see 1, 2 and 3 keys, the others 4.
    let window = Case::Attention(varlen(&[10], MaskKind::Window(4))).work();
    assert_eq!((window.exps, window.flops), (136.0, 136.0 * 4.0 * 64.0));
}

#[test]
fn lists_that_are_no_lengths_say_why() {
    assert_eq!(Lengths::new(&[]), Err(LengthsError::Empty));
    assert_eq!(Lengths::new(&[3, 0]), Err(LengthsError::Zero));
    assert_eq!(Lengths::new(&[1 << 30, 1 << 30]), Err(LengthsError::TooLarge));
    assert_eq!(Lengths::new(&[usize::MAX, 2]), Err(LengthsError::TooLarge));
    assert_eq!(Lengths::new(&[1; (1 << 16) + 1]), Err(LengthsError::TooLarge));
    assert_eq!("3x".parse::<Lengths>(), Err(LengthsError::Text));
    let lengths = "3x2+9".parse::<Lengths>().unwrap();
    assert_eq!((lengths.batch(), lengths.tokens(), lengths.longest()), (3, 15, 9));
}

#[test]
fn bytes_count_operands_once_and_tiles_again() {
    let full = AttentionShape { mask: MaskKind::Full, ..ATTENTION };
    let work = Case::Attention(full).work();
    let rows = 4.0 * 4096.0 * 32.0;
    assert_eq!(work.bytes, rows * (4.0 * 128.0 + 4.0));
    // 32 tiles of 128 queries fetch all keys and values, and each its queries.
    assert_eq!(work.l2_bytes, 4.0 * 32.0 * 32.0 * 4096.0 * 256.0 + rows * 128.0);
    // Tiles of a causal mask see 1, 2, … 32 tiles of keys.
    let causal = Case::Attention(ATTENTION).work();
    assert_eq!(causal.l2_bytes, 4.0 * 32.0 * (32.0 * 33.0 / 2.0) * 128.0 * 256.0 + rows * 128.0);
    // All four heads that share keys fit into one tile of a single query.
    let decode = AttentionShape { seqlen_q: 1, num_heads_kv: 8, mask: MaskKind::Full, ..ATTENTION };
    assert_eq!(
        Case::Attention(decode).work().l2_bytes,
        4.0 * 8.0 * 4096.0 * 256.0 + 4.0 * 32.0 * 128.0
    );

    let sparse = Case::Attention(BLOCK_SPARSE).work();
    assert_eq!(sparse.l2_bytes, (4 * 16 * 2 * 128 * 512 + 1024 * 4 * 256) as f64);
    // Two heads that share keys and lists fill one tile of 128 rows.
    let lists = Some(BlockLists { mask_heads: 2, ..LISTS });
    let shared = AttentionShape { lists, ..BLOCK_SPARSE };
    let work = Case::Attention(shared).work();
    assert_eq!(work.l2_bytes, (2 * 16 * 2 * 128 * 512 + 1024 * 4 * 256) as f64);
    assert_eq!((work.flops, work.exps, work.bytes), (sparse.flops, sparse.exps, sparse.bytes));
    let bsr = Case::BsrMatmul(BSR).work();
    let blocks = 128.0 * 13.0;
    assert_eq!(bsr.l2_bytes, blocks * 64.0 * 1024.0 * 2.0 + blocks * 8192.0 * 4.0);
    assert_eq!(bsr.bytes, blocks * 8192.0 + 4.0 * (blocks + 129.0) + 2.0 * 2.0 * 8192.0 * 1024.0);
}
