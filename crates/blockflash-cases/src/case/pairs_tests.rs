use super::*;
use crate::case::Case;

fn shape(id: &str) -> AttentionShape {
    let case: Case = id.parse().unwrap();
    assert_eq!(case.to_string(), id);
    case.attention().unwrap().clone()
}

fn mask(id: &str) -> (AttentionShape, BlockMask) {
    let shape = shape(id);
    let mask = shape.pairs.unwrap().block_mask(&shape).unwrap().unwrap();
    (shape, mask)
}

/// Pairs by the definitions, as the competitors have them.
#[test]
fn pairs_that_are_seen() {
    let ends = ends(300, 4);
    let document = |token: usize| ends.iter().filter(|&&end| end <= token).count();
    assert_eq!((document(0), document(299), ends.len()), (0, 3, 4));
    let near = |a: usize, b: usize| a.abs_diff(b) <= 3;
    let ancestor = |node: usize, mut of: usize| {
        while of > node {
            of = (of - 1) / 2;
        }
        of == node
    };
    type Sees<'a> = Box<dyn Fn(usize, usize) -> bool + 'a>;
    let cases: [(&str, Sees<'_>); 6] = [
        ("b1_s300_h1_d8_documents4b64_full_bf16", Box::new(|q, k| document(q) == document(k))),
        (
            "b1_s300_h1_d8_documents4b128_causal_bf16",
            Box::new(|q, k| document(q) == document(k) && k <= q),
        ),
        ("b1_s300_h1_d8_prefix70b64_full_bf16", Box::new(|q, k| k < 70 || k <= q)),
        (
            "b1_s300_h1_d8_grid7b64_full_bf16",
            Box::new(|q, k| near(q / 16, k / 16) && near(q % 16, k % 16)),
        ),
        (
            "b1_s300_h1_d8_dilated9x5b128_full_bf16",
            Box::new(|q, k| k <= q && (q - k) % 5 == 0 && (q - k) / 5 < 9),
        ),
        ("b1_q20_kv300_h1_d8_treeb64_full_bf16", Box::new(|q, k| k < 280 || ancestor(k - 280, q))),
    ];
    for (id, sees) in cases {
        let (shape, mask) = mask(id);
        assert_eq!(shape.mask(), Mask::Full);
        let mut count = 0;
        for query in 0..shape.seqlen_q {
            for key in 0..shape.seqlen_kv {
                assert_eq!(mask.is_visible(0, 0, query, key).unwrap(), sees(query, key), "{id}");
                count += usize::from(sees(query, key));
            }
        }
        assert_eq!(Case::Attention(shape).work().exps, count as f64, "{id}");
    }
}

#[test]
fn a_list_with_and_without_bits() {
    let [full, bits] = ["blocks4b64", "blocks4bits64"]
        .map(|pairs| mask(&format!("b1_s300_h1_d8_{pairs}_full_bf16")).1);
    let (_, documents) = mask("b1_s300_h1_d8_documents4b64_full_bf16");
    assert_eq!(full.to_bool().unwrap(), documents.to_bool().unwrap());
    assert_eq!(full.to_token_mask().unwrap(), bits.to_token_mask().unwrap());
    assert_eq!((full.bits().is_some(), bits.partial_blocks().unwrap()), (false, full.nnz()));
}

#[test]
fn what_is_added_is_bytes() {
    let bytes = |pairs: &str| shape(&format!("b2_s64_h2_d8_{pairs}full_bf16")).bytes();
    let without = bytes("");
    let added = ["bias_", "sharedbias_", "alibi_"].map(|pairs| bytes(pairs) - without);
    assert_eq!(added, [0.0; 3], "those of the operands alone");
    let work = |pairs: &str| {
        Case::Attention(shape(&format!("b2_s64_h2_d8_{pairs}full_bf16"))).work().bytes - without
    };
    assert_eq!(["bias_", "sharedbias_", "alibi_"].map(work), [32768.0, 16384.0, 8.0]);
}

#[test]
fn other_texts_are_refused() {
    for text in ["documentsb64", "documents0b64", "tree", "dilated3b64", "dilated3x0b64", "b64"] {
        assert!(Pairs::parse(text).is_none(), "{text}");
    }
    for id in ["varlen64_h1_d8_alibi_full_bf16", "b1_s64_h1_d8_treeb64_window9_bf16"] {
        id.parse::<Case>().unwrap_err();
    }
}
