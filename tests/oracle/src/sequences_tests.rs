use crate::tests::{array, case};
use crate::{AttentionBackwardCase, AttentionCase, Bits, Blocks, attention, attention_backward};

/// Of each sequence the last query is at its last key, also where there are more keys or more
/// queries; blocks are its own.
#[test]
fn sequences_of_queries_and_keys_of_other_lengths() {
    // Queries 2 and 2, keys 3 and 1; the value is ten times the place among all keys.
    let q = array(&[4, 1, 1], vec![0.0; 4]);
    let k = array(&[4, 1, 1], vec![0.0; 4]);
    let v = array(&[4, 1, 1], vec![0.0, 10.0, 20.0, 30.0]);
    let tensors = [q, k, v];
    let lengths: Option<[&[usize]; 2]> = Some([&[2, 2], &[3, 1]]);
    let causal = AttentionCase { lengths, bottom_right: true, ..case(&tensors, Some(0)) };
    let check = |case: &AttentionCase<'_>, o: [f32; 4], lse: [f32; 4]| {
        let (o, lse) = (array(&[4, 1, 1], o.to_vec()), array(&[1, 4], lse.to_vec()));
        attention(case, &o, &lse, 0, |_| ()).map(|results| results.map(|c| (c.passed(), c.checked)))
    };
    let (none, two, three) = (f32::NEG_INFINITY, 2f32.ln(), 3f32.ln());
    let (o, lse) = ([5.0, 10.0, 0.0, 30.0], [two, three, none, 0.0]);
    assert_eq!(check(&causal, o, lse).unwrap(), [(true, 4); 2]);
    assert_eq!(check(&causal, [5.0, 10.0, 30.0, 30.0], lse).unwrap()[0], (false, 4));
    let top_left = AttentionCase { bottom_right: false, ..causal };
    assert_eq!(
        check(&top_left, [0.0, 5.0, 30.0, 30.0], [0.0, two, 0.0, 0.0]).unwrap(),
        [(true, 4); 2]
    );

    // One query and two keys a block: keys 0, 1; key 2; none; key 3.
    let blocks = Blocks {
        block_q: 1,
        block_kv: 2,
        heads: 1,
        row_ptr: &[0, 1, 2, 2, 3],
        col_idx: &[0, 1, 0],
        bits: None,
    };
    let sparse = AttentionCase { blocks: Some(blocks), right: None, ..causal };
    let (o, lse) = ([5.0, 20.0, 0.0, 30.0], [two, 0.0, none, 0.0]);
    assert_eq!(check(&sparse, o, lse).unwrap(), [(true, 4); 2]);
    let wrong = Blocks { row_ptr: &[0, 1, 2, 3], ..blocks };
    assert!(check(&AttentionCase { blocks: Some(wrong), ..sparse }, o, lse).is_err());
}

/// Lists of each batch entry, or one set of lists for all.
#[test]
fn batch_entries_have_lists_of_blocks() {
    let q = array(&[2, 1, 1, 1], vec![0.0; 2]);
    let k = array(&[2, 2, 1, 1], vec![0.0; 4]);
    let v = array(&[2, 2, 1, 1], vec![0.0, 10.0, 20.0, 30.0]);
    let tensors = [q, k, v];
    let check = |row_ptr: &[i32], col_idx: &[i32], o: [f32; 2]| {
        let blocks = Blocks { block_q: 1, block_kv: 1, heads: 1, row_ptr, col_idx, bits: None };
        let case = AttentionCase { blocks: Some(blocks), ..case(&tensors, None) };
        let (o, lse) = (array(&[2, 1, 1, 1], o.to_vec()), array(&[2, 1, 1], vec![0.0; 2]));
        attention(&case, &o, &lse, 0, |_| ()).unwrap().map(|c| c.passed())
    };
    assert_eq!(check(&[0, 1, 2], &[0, 1], [0.0, 30.0]), [true; 2]);
    assert_eq!(check(&[0, 1, 2], &[0, 1], [10.0, 30.0]), [false, true]);
    assert_eq!(check(&[0, 1], &[1], [10.0, 30.0]), [true; 2]);
}

#[test]
fn packed_sequences_see_themselves_only() {
    // One key each: the output is the value, the lse the score. Then two keys, of which the causal
    // query sees the first.
    let q = array(&[3, 1, 1], vec![1.0, 1.0, 1.0]);
    let k = array(&[3, 1, 1], vec![2.0, 0.0, 3f32.ln()]);
    let v = array(&[3, 1, 1], vec![5.0, 4.0, 8.0]);
    let tensors = [q, k, v];
    let packed = AttentionCase { lengths: Some([&[1, 2]; 2]), ..case(&tensors, Some(0)) };
    let check = |o: [f32; 3], lse: [f32; 3]| {
        let (o, lse) = (array(&[3, 1, 1], o.to_vec()), array(&[1, 3], lse.to_vec()));
        attention(&packed, &o, &lse, 0, |_| ()).unwrap().map(|c| (c.passed(), c.checked, c.total))
    };
    let lse = [2.0, 0.0, 4f32.ln()];
    assert_eq!(check([5.0, 4.0, 7.0], lse), [(true, 3, 3); 2]);
    assert_eq!(check([5.0, 4.5, 7.0], lse)[0], (false, 3, 3));
    assert_eq!(check([5.0, 4.0, 7.0], [2.0, 0.1, 4f32.ln()])[1], (false, 3, 3));
    let (o, lse) = (array(&[3, 1, 1], vec![5.0, 4.0, 7.0]), array(&[1, 3], lse.to_vec()));
    let wrong = AttentionCase { lengths: Some([&[1, 1]; 2]), ..packed };
    assert!(attention(&wrong, &o, &lse, 0, |_| ()).is_err());
    assert!(attention(&AttentionCase { lengths: None, ..packed }, &o, &lse, 0, |_| ()).is_err());
}

/// Two queries that share a head of keys; the second one attends to the second key only.
#[test]
fn gradients_on_paper() {
    let ln_3 = 3f32.ln();
    let (q, k) = (array(&[1, 1, 2, 1], vec![1.0, 2.0]), array(&[1, 2, 1, 1], vec![0.0, ln_3]));
    let (v, o) = (array(&[1, 2, 1, 1], vec![4.0, 8.0]), array(&[1, 1, 2, 1], vec![7.0, 8.0]));
    let lse = array(&[1, 2, 1], vec![4f32.ln(), 2.0 * ln_3]);
    let d_o = array(&[1, 1, 2, 1], vec![1.0, 3.0]);
    let tensors = [q, k, v];
    let blocks = Blocks {
        block_q: 1,
        block_kv: 1,
        heads: 2,
        row_ptr: &[0, 2, 3],
        col_idx: &[0, 1, 1],
        bits: None,
    };
    let attention = AttentionCase { blocks: Some(blocks), ..case(&tensors, None) };
    let case = AttentionBackwardCase { attention, o: &o, lse: &lse, d_o: &d_o };
    // Weights 1/4 and 3/4 of the first query, whose gradients of the scores are -3/4 and 3/4; a
    // single weight of 1 has none.
    let right = [vec![0.75 * ln_3, 0.0], vec![-0.75, 0.75], vec![0.25, 0.75 + 3.0]];
    let check = |[dq, dk, dv]: [Vec<f32>; 3]| {
        let gradients =
            [array(&[1, 1, 2, 1], dq), array(&[1, 2, 1, 1], dk), array(&[1, 2, 1, 1], dv)];
        let [dq, dk, dv] = &gradients;
        let compared = attention_backward(&case, [dq, dk, dv], 0, |_| ()).unwrap();
        assert_eq!(compared.map(|of| (of.checked, of.total)), [(2, 2); 3]);
        compared.map(|of| of.passed())
    };
    assert_eq!(check(right.clone()), [true; 3]);
    for wrong in 0..3 {
        for change in [1.001, f32::NAN] {
            let mut gradients = right.clone();
            gradients[wrong][0] *= change;
            let expected: [bool; 3] = std::array::from_fn(|at| at != wrong);
            assert_eq!(check(gradients), expected, "{wrong} {change}");
        }
    }
    let error = attention_backward(&case, [&o, &o, &o], 0, |_| ()).unwrap_err();
    assert!(error.to_string().contains("dk is [1, 1, 2, 1], not [1, 2, 1, 1]"), "{error}");
}

#[test]
fn bits_show_pairs_of_a_block() {
    // 17 queries and 128 keys in one block of two tiles: query 0 sees keys 0, 9 and 127, query 8
    // sees key 3, query 16 sees key 64, and no other query sees any.
    let mut words = [0; 256];
    (words[0], words[128 + 3]) = (0b1001, 1 << 15);
    words[1] = 1 << 17;
    words[128 + 32] = 1;
    let v = array(&[1, 128, 1, 1], (0..128).map(|key| key as f32).collect::<Vec<_>>());
    let [q, k] = [17, 128].map(|rows| array(&[1, rows, 1, 1], vec![0.0; rows]));
    let tensors = [q, k, v];
    let bits = Bits { block_bits: &[0], words: &words };
    let blocks = Blocks {
        block_q: 64,
        block_kv: 128,
        heads: 1,
        row_ptr: &[0, 1],
        col_idx: &[0],
        bits: Some(bits),
    };
    let check = |bits: Bits<'_>, o: &[f32], lse: &[f32]| {
        let blocks = Blocks { bits: Some(bits), ..blocks };
        let case = AttentionCase { blocks: Some(blocks), ..case(&tensors, None) };
        let (o, lse) = (array(&[1, 17, 1, 1], o.to_vec()), array(&[1, 1, 17], lse.to_vec()));
        attention(&case, &o, &lse, 0, |_| ()).map(|c| c.map(|c| c.passed()))
    };
    let (mut o, mut lse) = ([0.0; 17], [f32::NEG_INFINITY; 17]);
    for (query, sum, keys) in [(0, 136.0, 3.0f32), (8, 3.0, 1.0), (16, 64.0, 1.0)] {
        (o[query], lse[query]) = (sum / keys, keys.ln());
    }
    assert_eq!(check(bits, &o, &lse).unwrap(), [true; 2]);
    // A full block is another result.
    assert_eq!(check(Bits { block_bits: &[-1], ..bits }, &o, &lse).unwrap(), [false; 2]);
    let refused = check(Bits { block_bits: &[0, 0], ..bits }, &o, &lse).unwrap_err().to_string();
    assert!(refused.contains("bits of 2 blocks, not of 1"), "{refused}");
}
