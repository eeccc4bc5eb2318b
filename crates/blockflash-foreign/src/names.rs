//! The names that errors give to the arguments of a call.

/// Fields of the operations' structs, and the parameters of front ends that set them.
const PARAMETERS: &[(&str, &str)] = &[
    ("alibi", "alibi_slopes"),
    ("cache.block_table", "block_table"),
    ("cache.k", "k_cache"),
    ("cache.k_scale", "k_scale"),
    ("cache.seqused_kv", "seqused_k"),
    ("cache.v", "v_cache"),
    ("cache.v_scale", "v_scale"),
    ("cu_seqlens.kv", "cu_seqlens_k"),
    ("cu_seqlens.q", "cu_seqlens_q"),
    ("ids_kv", "ids_k"),
    ("max_seqlen_kv", "max_seqlen_k"),
    ("new.k", "k"),
    ("new.v", "v"),
    ("o_dtype", "out_dtype"),
    ("pages.counts", "page_counts"),
    ("pages.lists", "page_lists"),
    ("rotary.cos", "rotary_cos"),
    ("rotary.sin", "rotary_sin"),
    ("scales.k", "k_scale"),
    ("scales.q", "q_scale"),
    ("scales.v", "v_scale"),
    ("seqused_kv", "seqused_k"),
    ("softmax_scale", "scale"),
];

/// The text of an error of an operation, with the parameters that a caller knows in place of the
/// fields that they set: `scales.q` is `q_scale`.
pub fn with_parameters(text: &str) -> String {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
    let words = text.split_inclusive(|c| !is_name(c));
    let named = words.flat_map(|word| {
        // A full stop may end a sentence.
        let name = word.trim_end_matches(|c| !is_name(c) || c == '.');
        [parameter(name), &word[name.len()..]]
    });
    named.collect()
}

fn parameter(field: &str) -> &str {
    let known = PARAMETERS.iter().find(|(name, _)| *name == field);
    known.map_or(field, |(_, parameter)| parameter)
}

#[cfg(test)]
mod tests {
    use super::{PARAMETERS, with_parameters};

    #[test]
    fn fields_become_parameters_wherever_they_stand() {
        for (text, expected) in [
            ("scales.q has shape [2, 3]", "q_scale has shape [2, 3]"),
            ("q is f32, since scales.v is given", "q is f32, since v_scale is given"),
            ("cu_seqlens.kv[2] is 9: 8 rows", "cu_seqlens_k[2] is 9: 8 rows"),
            ("cache.k_scale of cache.k.", "k_scale of k_cache."),
            ("softmax_scale is 0.5", "scale is 0.5"),
            ("scale, `cache.v`; cache.values", "scale, `v_cache`; cache.values"),
            ("…: 1..3 ×  new.k\n", "…: 1..3 ×  k\n"),
            ("", ""),
        ] {
            assert_eq!(with_parameters(text), expected);
        }
    }

    #[test]
    fn every_field_is_named_once() {
        assert!(PARAMETERS.is_sorted_by(|a, b| a.0 < b.0));
    }
}
