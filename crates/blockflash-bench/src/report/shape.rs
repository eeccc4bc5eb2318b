//! The group that a case belongs to.

use crate::case::Case;
use crate::record::Record;
use crate::timing::Cache;
use blockflash_sys::DType;

/// The case of a record. `None` for an id that this program does not know; such a case appears in
/// tables but not in plots.
pub(crate) fn case(record: &Record) -> Option<Case> {
    record.case.parse().ok().filter(|case: &Case| case.op() == record.op)
}

/// Whether the L2 cache is overwritten before each launch.
pub(crate) fn is_cold(record: &Record) -> bool {
    record.cache == Cache::Cold.name()
}

/// Heading under which a record is listed. It holds the properties that change the character of a
/// case, but neither length nor density.
pub(crate) fn group(record: &Record) -> String {
    let case = case(record);
    let mut label = case.as_ref().map_or(record.op.clone(), |case| case.shape().group());
    // Both 16-bit types run at the same speed.
    if let Some(dtype) =
        case.map(|case| case.dtype()).filter(|dtype| !matches!(dtype, DType::F16 | DType::BF16))
    {
        label += &format!(", {dtype}");
    }
    if is_cold(record) {
        label += ", cold caches";
    }
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(op: &str, case: &str) -> String {
        group(&Record { op: op.into(), case: case.into(), ..Record::default() })
    }

    #[test]
    fn groups_are_what_a_reader_looks_for() {
        assert_eq!(label("attention_fwd", "b4_s4096_h32_d64_causal_bf16"), "head_dim 64, causal");
        assert_eq!(
            label("attention_fwd", "b1_q1_kv8192_h32kv8_d128_full_f16"),
            "head_dim 128, full, one query"
        );
        assert_eq!(
            label("attention_fwd", "varlen4096+512x2_h16_d128_causal_bf16"),
            "head_dim 128, causal, variable length"
        );
        assert_eq!(label("bsr_matmul", "m64_n1_k64_b64_d0.1_uniform_f16"), "blocks of 64 × 64");
        assert_eq!(label("bsr_matmul", "m64_n1_k64_b64_d0.1_power_law_f16"), "pattern power_law");
        let blocks = "b1_s16384_h16_d128_q128kv64_d0.25_uniform_full_bf16";
        assert_eq!(label("block_sparse_fwd", blocks), "head_dim 128, blocks of 128 × 64");
        let causal = "b1_s16384_h16_d128_q64kv64_d0.25_uniform_causal_bf16";
        assert_eq!(label("block_sparse_fwd", causal), "head_dim 128, blocks of 64 × 64, causal");
        let banded = "b1_s16384_h16_d128_q64kv64_d0.25_banded_full_bf16";
        assert_eq!(label("block_sparse_fwd", banded), "head_dim 128, blocks of 64 × 64, banded");
        let shared = "b1_s16384_h32kv8m8_d128_q64kv64_d0.25_uniform_full_bf16";
        let expected = "head_dim 128, blocks of 64 × 64, lists of several heads";
        assert_eq!(label("block_sparse_fwd", shared), expected);
        let scores = "mask_s32768_h16_b128_scores_d128_bf16";
        assert_eq!(label("block_mask_build", scores), "scores of blocks of 128 × 128");
        let choose = "mask_s32768_h16_b128_top32";
        assert_eq!(label("block_mask_build", choose), "mask of blocks of 128 × 128, f32");
        let sampled = "sddmm_m64_n64_k64_b64_d0.1_uniform_column_row_f16";
        assert_eq!(label("bsr_sddmm", sampled), "blocks of 64 × 64, A by columns, B by rows");
        assert_eq!(label("other", "x"), "other");
        let cold = Record { op: "other".into(), cache: "cold".into(), ..Record::default() };
        assert_eq!(group(&cold), "other, cold caches");
    }

    #[test]
    fn an_id_of_another_operation_is_no_case() {
        let id = "b4_s4096_h32_d64_causal_bf16";
        let record = |op: &str| Record { op: op.into(), case: id.into(), ..Record::default() };
        assert!(case(&record("attention_fwd")).is_some());
        assert!(case(&record("block_sparse_fwd")).is_none());
    }
}
