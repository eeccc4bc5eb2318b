use super::launches::plan_all;
use super::*;
use crate::attention::Strides;
use crate::fixtures::{gpus, values};
use crate::kv_cache::{CacheSizes, RotaryPairs, RotarySizes};
use crate::{Attention, Error};
use blockflash_sys::{HeadDims, Target};

fn cpu() -> Stream {
    Device::cpu().stream().unwrap()
}

fn f32s(values: &[f32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

fn i32s(values: &[i32], shape: &[usize]) -> Tensor {
    Tensor::from_slice(&cpu(), values, shape).unwrap()
}

/// Two sequences with 3 queries of 4 heads, in 6 pages of 4 slots with 2 heads.
struct Fixture {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
}

impl Fixture {
    fn new(table: [i32; 6], lengths: [i32; 2]) -> Self {
        Self {
            q: f32s(&values(2 * 3 * 4 * 8, 1), &[2, 3, 4, 8]),
            k: f32s(&values(6 * 4 * 2 * 8, 2), &[6, 4, 2, 8]),
            v: f32s(&values(6 * 4 * 2 * 8, 3), &[6, 4, 2, 8]),
            table: i32s(&table, &[2, 3]),
            lengths: i32s(&lengths, &[2]),
        }
    }

    fn cache(&self) -> KvCache<'_> {
        KvCache {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCache::new(self.k.view(), self.v.view())
        }
    }

    fn decode(&self) -> AttentionDecode<'_> {
        AttentionDecode { scores: Mask::causal().into(), ..AttentionDecode::new(self.q.view()) }
    }

    fn run(&self, decode: AttentionDecode<'_>) -> [Vec<f32>; 2] {
        let output = decode.forward(self.cache(), &cpu()).unwrap();
        [output.o.to_vec(&cpu()).unwrap(), output.lse.to_vec(&cpu()).unwrap()]
    }
}

#[test]
fn a_full_contiguous_cache_is_plain_attention() {
    let fixture = Fixture::new([0; 6], [0; 2]);
    let k = fixture.k.view().slice(0, 0..2).unwrap();
    let v = fixture.v.view().slice(0, 0..2).unwrap();
    let decode = fixture.decode();
    let found = decode.forward(KvCache::new(k, v), &cpu()).unwrap();
    let plain =
        Attention { scores: Mask::causal().into(), ..Attention::new(fixture.q.view(), k, v) };
    let plain = plain.forward(&cpu()).unwrap();
    for (found, plain) in [(&found.o, &plain.o), (&found.lse, &plain.lse)] {
        assert_eq!(found.shape(), plain.shape());
        assert_eq!(found.to_vec::<f32>(&cpu()).unwrap(), plain.to_vec::<f32>(&cpu()).unwrap());
    }
}

#[test]
fn garbage_counts_as_the_nearest_that_exists() {
    let garbage = Fixture::new([-7, i32::MAX, 2, 6, 4, i32::MIN], [i32::MAX, -3]);
    let clamped = Fixture::new([0, 5, 2, 5, 4, 0], [12, 0]);
    assert_eq!(garbage.run(garbage.decode()), clamped.run(clamped.decode()));
    let [o, lse] = clamped.run(clamped.decode());
    let (rows, heads) = (3 * 4 * 8, 3 * 4);
    assert!(o[rows..].iter().all(|&x| x == 0.0) && o[..rows].iter().all(|&x| x != 0.0));
    assert!(lse[heads..].iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn a_sequence_does_not_depend_on_the_others() {
    let both = Fixture::new([3, 1, 4, 2, 0, 5], [11, 7]);
    let other = Fixture::new([0, 1, 2, 2, 0, 5], [1, 7]);
    let [one, two] = [both.run(both.decode()), other.run(other.decode())];
    assert_eq!(one[0][96..], two[0][96..]);
    assert_eq!(one[1][12..], two[1][12..]);
}

#[test]
fn bits_are_equal_for_any_number_of_threads() {
    let fixture = Fixture::new([3, 1, 4, 2, 0, 5], [11, 7]);
    let first = fixture.run(fixture.decode());
    for threads in [1, 2, 3, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| fixture.run(fixture.decode())), first, "{threads} threads");
    }
}

#[test]
fn lists_of_pages() {
    let fixture = Fixture::new([3, 1, 4, 2, 0, 5], [11, 7]);
    let listed = |lists: &[i32], counts: [i32; 2]| {
        let (lists, counts) = (i32s(lists, &[2, 2, 3]), i32s(&counts, &[2]));
        let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
        fixture.run(AttentionDecode { pages, ..fixture.decode() })
    };
    let all = listed(&[0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2], [3, 3]);
    let dense = fixture.run(fixture.decode());
    for (found, expected) in all.iter().flatten().zip(dense.iter().flatten()) {
        assert!((found - expected).abs() < 1e-6);
    }
    // Nothing is listed, and a head that sees one page only.
    let some = listed(&[0, 7, 7, 2, 7, 7, 1, 7, 7, 1, 7, 7], [1, -4]);
    assert!(some[1][12..].iter().all(|&x| x == f32::NEG_INFINITY));
    assert!(some[1][..12].iter().all(|&x| x.is_finite()));
    // Counts and columns beyond what there is.
    let garbage = [i32::MAX, -1, 1, 0, 1, 2, 5, 4, 3, i32::MIN, 9, -9];
    let found = listed(&garbage, [i32::MAX, 2]);
    assert!(found[0].iter().all(|x| x.is_finite()));
}

#[test]
fn prepared_calls() {
    let mut fixture = Fixture::new([3, 1, 4, 2, 0, 5], [11, 7]);
    let stream = cpu();
    let dense = fixture.run(fixture.decode())[0].clone();
    let mut o = f32s(&[0.0; 192], &[2, 3, 4, 8]);
    let prepared = {
        let cache = CacheAccess::Read(fixture.cache());
        let operands = AttentionDecodeOperands { cache, o: o.view_mut(), lse: None };
        fixture.decode().prepare(&operands, &stream).unwrap()
    };
    assert_eq!(prepared.kernel(), None);
    let mut run = |fixture: &Fixture, decode: AttentionDecode<'_>| {
        let cache = CacheAccess::Read(fixture.cache());
        let operands = AttentionDecodeOperands { cache, o: o.view_mut(), lse: None };
        decode.run_prepared(&prepared, operands, &stream)?;
        Ok::<_, Error>(o.to_vec::<f32>(&stream)?)
    };
    assert_eq!(run(&fixture, fixture.decode()).unwrap(), dense);
    // Other lengths are the same call, other options are not.
    fixture.lengths = i32s(&[2, 7], &[2]);
    assert_ne!(run(&fixture, fixture.decode()).unwrap(), dense);
    let error = run(
        &fixture,
        AttentionDecode {
            scores: Scores { softcap: Some(2.0), ..fixture.decode().scores },
            ..fixture.decode()
        },
    );
    assert!(matches!(error, Err(Error::NotPrepared { op: "attention_decode" })));
}

#[test]
fn wrong_queries_are_named() {
    let fixture = Fixture::new([0; 6], [0; 2]);
    let message =
        |decode: AttentionDecode<'_>| decode.problem(&fixture.cache()).unwrap_err().to_string();
    for (shape, what) in [
        (&[1, 3, 4, 8][..], "expected [2, seqlen_q, num_heads_q, 8]"),
        (&[2, 3, 4, 16], "expected [2, seqlen_q, num_heads_q, 8]"),
        (&[2, 3, 3, 8], "3 query heads"),
        (&[6, 4, 8], "q has shape"),
    ] {
        let q = Tensor::zeros(&cpu(), DType::F32, shape).unwrap();
        let message = message(AttentionDecode::new(q.view()));
        assert!(message.contains(what), "{message}");
    }
    let halves = Tensor::zeros(&cpu(), DType::F16, &[2, 3, 4, 8]).unwrap();
    assert!(message(AttentionDecode::new(halves.view())).contains("q is f16"));
    let offsets = i32s(&[0, 1, 2, 3], &[4]);
    let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 3 });
    let rows = Tensor::zeros(&cpu(), DType::F32, &[6, 4, 8]).unwrap();
    let call = AttentionDecode { packed, ..AttentionDecode::new(rows.view()) };
    assert!(message(call).contains("of 2 sequences"));
    let decode = fixture.decode();
    assert!(
        message(AttentionDecode {
            scores: Scores { softcap: Some(-1.0), ..decode.scores },
            ..decode
        })
        .contains("softcap")
    );
    let scale = Some(f32::NAN);
    assert!(
        message(AttentionDecode {
            scores: Scores { softmax_scale: scale, ..decode.scores },
            ..decode
        })
        .contains("softmax_scale")
    );
    let sink = f32s(&[0.0; 3], &[3]);
    assert!(
        message(AttentionDecode {
            scores: Scores { sink: Some(sink.view()), ..decode.scores },
            ..decode
        })
        .contains("sink")
    );
    let (lists, counts) = (i32s(&[0; 12], &[2, 2, 3]), i32s(&[0; 2], &[2]));
    let of = |lists: &Tensor, counts: &Tensor| {
        let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
        message(AttentionDecode { pages, ..decode })
    };
    assert!(of(&i32s(&[0; 6], &[2, 1, 3]), &counts).contains("pages.lists"));
    assert!(of(&i32s(&[0; 6], &[2, 3]), &counts).contains("[batch, num_heads_kv, capacity]"));
    assert!(of(&lists, &i32s(&[0; 3], &[3])).contains("pages.counts"));
    let pages = Some(PageLists { lists: lists.view(), counts: counts.view() });
    let contiguous = KvCache {
        k: fixture.k.view().slice(0, 0..2).unwrap(),
        v: fixture.v.view().slice(0, 0..2).unwrap(),
        block_table: None,
        ..fixture.cache()
    };
    let error = AttentionDecode { pages, ..decode }.problem(&contiguous).unwrap_err();
    assert!(error.to_string().contains("without a block table"), "{error}");
}

/// On each GPU the narrowest kernel is selected, and planned within its checks.
#[test]
fn gpus_have_kernels() {
    let cache = |dtype, head_dim| CacheSizes::contiguous(dtype, [3, 1000], 2, head_dim);
    for gpu in gpus() {
        for (head_dim, queries, [width, rows]) in [
            (64, 1, [64, 8]),
            (72, 4, [128, 16]),
            (128, 9, [128, 32]),
            (136, 100, [256, 16]),
            (264, 1, [512, 8]),
            (512, 300, [512, 8]),
        ] {
            let of = AttentionDecodeProblem::of(cache(DType::BF16, head_dim), queries, 8);
            // Otherwise an estimate decides for wide heads.
            let problem = AttentionDecodeProblem { batch_invariant: true, ..of };
            let kernel = select(&problem, &gpu).unwrap();
            match tile(kernel) {
                Some(CacheTile::Few(tile)) => {
                    assert_eq!(
                        [tile.head_dims.qk as u32, tile.rows],
                        [width, rows],
                        "{}",
                        gpu.name
                    );
                }
                // 16 and 36 rows.
                Some(CacheTile::Several(tile)) => {
                    assert!(tile.head_dims.qk == 128 && queries > 1, "{}", gpu.name);
                    assert_eq!(kernel.target, Target::Sm90a);
                }
                _ => panic!("{}", kernel.symbol()),
            }
            let AttentionDecodePlan { items, config, .. } = plan(kernel, &problem, &gpu).unwrap();
            assert!(config.grid[0] as usize <= items && problem.cache.capacity == 1000);
            let bytes = workspace_bytes(kernel, &problem, &gpu).unwrap();
            assert!(bytes >= items * 4);
        }
        let message = |problem: &AttentionDecodeProblem| match select(problem, &gpu) {
            Err(Error::Unsupported { op: "attention_decode", what, .. }) => what,
            other => panic!("{other:?}"),
        };
        let of = |cache| AttentionDecodeProblem::of(cache, 1, 8);
        assert!(message(&of(cache(DType::F32, 64))).contains("f32"));
        let codes = of(cache(DType::E4M3, 272)).with_queries(DType::F16);
        assert!(message(&codes).contains("multiples of 16 up to 256"));
        assert!(message(&of(cache(DType::F16, 520))).contains("up to 512"));
        let mut paged = of(cache(DType::F16, 64));
        paged.cache.table = Some(crate::kv_cache::TableSizes { max_pages: 2, stride: 2 });
        assert!(message(&paged).contains("a multiple of 16"));
        assert!(
            message(&of(CacheSizes::contiguous(DType::F16, [3, 0], 2, 64)))
                .contains("the cache has 0 slots")
        );
        let many = AttentionDecodeProblem::of(cache(DType::F16, 64), 1 << 20, 8);
        assert!(message(&many).contains("2^20"));
    }
    let fixture = Fixture::new([0; 6], [0; 2]);
    assert_eq!(fixture.decode().workspace_bytes(&fixture.cache(), &Device::cpu()).unwrap(), 0);
}

#[test]
fn a_workspace_may_be_anything_on_the_cpu() {
    let fixture = Fixture::new([3, 1, 4, 2, 0, 5], [11, 7]);
    for bytes in [0, 1000] {
        let workspace = AttentionDecodeWorkspace::new(&cpu(), bytes).unwrap();
        assert_eq!((workspace.bytes(), workspace.device()), (bytes, Device::cpu()));
        let decode = AttentionDecode { workspace: Some(&workspace), ..fixture.decode() };
        assert_eq!(fixture.run(decode), fixture.run(fixture.decode()));
    }
}

#[test]
fn unequal_head_dims_are_planned_but_not_rotated() {
    for ((qk, v), queries) in [((192, 128), 1), ((128, 192), 2), ((64, 128), 16), ((72, 40), 300)] {
        let cache = CacheSizes {
            head_dims: HeadDims { qk, v },
            k: Strides::contiguous(1024, 2, qk),
            v: Strides::contiguous(1024, 2, v),
            ..CacheSizes::contiguous(DType::F16, [4, 1024], 2, qk)
        };
        let problem = AttentionDecodeProblem::of(cache, queries, 8);
        for gpu in gpus() {
            let kernel = select(&problem, &gpu).unwrap();
            assert!(tile(kernel).unwrap().head_dims().qk >= qk.max(v), "{}", kernel.image_name());
            let room = workspace_bytes(kernel, &problem, &gpu).unwrap();
            if let Some((_, plan)) = plan_all(kernel, &problem, &gpu).unwrap().few {
                let slots = plan.items << plan.scalars.run_log2;
                let one = plan.scalars.splits == 1;
                assert!(one || room >= slots * plan.partial_rows * (v + 2) * 4, "{}", gpu.name);
            }
            let rotary = RotarySizes {
                positions: 1024,
                rotary_dim: qk,
                strides: [qk / 2; 2],
                pairs: RotaryPairs::Halves,
                dtype: DType::F16,
            };
            let rotated = AttentionDecodeProblem { rotary: Some(rotary), ..problem };
            let error = select(&rotated, &gpu).unwrap_err().to_string();
            assert!(error.contains("a rotary embedding with head_dim"), "{error}");
        }
    }
}

/// Codes have kernels on each GPU, beside queries of 16 bits.
#[test]
fn codes_have_kernels() {
    for gpu in gpus() {
        for dtype in [DType::E4M3, DType::E5M2, DType::I8] {
            for (head_dim, queries) in [(64, 1), (96, 16), (128, 300), (192, 4), (256, 64)] {
                let cache = CacheSizes::contiguous(dtype, [3, 8192], 2, head_dim);
                let of = AttentionDecodeProblem::of(cache, queries, 8);
                for q in [DType::F16, DType::BF16] {
                    let problem = of.with_queries(q);
                    let kernel = select(&problem, &gpu).unwrap();
                    let Some(CacheTile::Few(tile)) = tile(kernel) else { panic!("{dtype}") };
                    assert_eq!((tile.types.kv, tile.terms), (dtype, false), "{}", gpu.name);
                    plan(kernel, &problem, &gpu).unwrap();
                    let append = kv_append::AppendKvProblem::nothing(cache, q);
                    kv_append::select(&append, &gpu).unwrap();
                }
                let error = select(&of.with_queries(DType::F32), &gpu).unwrap_err();
                let expected = format!("q is f32: beside {dtype} kernels take f16 and bf16");
                assert!(error.to_string().contains(&expected), "{error}");
            }
        }
    }
}

/// What is added to scores has a kernel of its own on each GPU, and a mask of the last keys one of
/// those that take it.
#[test]
fn score_terms_have_kernels() {
    for gpu in gpus() {
        for (head_dim, queries) in [(64, 1), (96, 64), (128, 64), (192, 5), (256, 300)] {
            let cache = CacheSizes::contiguous(DType::BF16, [3, 8192], 8, head_dim);
            let plain = AttentionDecodeProblem::of(cache, queries, 32);
            let tail_mask = Some(TailMaskSizes { tail: 64 });
            let tree = AttentionDecodeProblem { tail_mask, ..plain };
            let mut alibi = plain;
            alibi.attention.scores.alibi = true;
            for batch_invariant in [false, true] {
                for (problem, adds) in [(tree, false), (alibi, true)] {
                    let problem = AttentionDecodeProblem { batch_invariant, ..problem };
                    let kernel = select(&problem, &gpu).unwrap();
                    match tile(kernel) {
                        Some(CacheTile::Few(tile)) => assert!(tile.terms, "{}", gpu.name),
                        Some(CacheTile::Several(_)) => assert!(!adds, "{}", gpu.name),
                        _ => panic!("{}", kernel.symbol()),
                    }
                    let AttentionDecodePlan { items, .. } = plan(kernel, &problem, &gpu).unwrap();
                    assert!(workspace_bytes(kernel, &problem, &gpu).unwrap() >= items);
                }
            }
            // Wider heads have none.
            let cache = CacheSizes::contiguous(DType::BF16, [3, 8192], 8, 512);
            let mut wide = AttentionDecodeProblem::of(cache, queries, 32);
            wide.attention.scores.alibi = true;
            for wide in [wide, AttentionDecodeProblem { tail_mask, ..wide }] {
                assert!(matches!(select(&wide, &gpu), Err(Error::Unsupported { .. })));
            }
            let few = |problem| match tile(select(problem, &gpu).unwrap()) {
                Some(CacheTile::Few(tile)) => tile.terms,
                _ => false,
            };
            assert!(!few(&plain), "{}", gpu.name);
            // Hopper computes a tree of many rows with the kernel for several queries.
            let several = gpu.compute_capability.major == 9 && head_dim <= 128;
            assert!(few(&tree) || several, "{} {head_dim} {queries}", gpu.name);
            assert!(!few(&tree) || !several || queries <= 16, "{} {head_dim} {queries}", gpu.name);
        }
    }
}
