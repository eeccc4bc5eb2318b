//! Appends to caches whose values are the first columns of the keys: every kernel that the GPU can
//! run leaves the bits of the CPU in all of the cache, and an append within attention as well.

use blockflash_ops::kv_append::{AppendKvProblem, accepts};
use blockflash_ops::{
    AppendKv, AppendLatentCodes, AttentionDecode, DType, KvCache, KvCacheMut, LatentCodesMut, Mask,
    Operation, PackedTokens, Rotary, RotaryPairs, Stream, Tensor, View,
};
use blockflash_tests::gpu::{Gpu, Report, gpu, wait};
use blockflash_tests::host::{cpu, download, upload};
use blockflash_tests::number::{encode, normal_rounded, poison};

/// Rows and values, and whether rows come in two parts.
const FORMS: [([usize; 2], bool); 5] = [
    ([576, 512], false),
    ([576, 512], true),
    ([512, 512], false),
    ([72, 40], true),
    ([24, 24], false),
];
const PAGES: usize = 9;
const SLOTS: usize = 16;
/// Columns of poison behind each row.
const GAP: usize = 8;
/// Tokens of each sequence, and numbers that its length and its table may have.
const TOKENS: [i32; 4] = [0, 3, 4, 9];
const LENGTHS: [[i32; 3]; 4] = [[3, 20, 32], [1, 33, 40], [i32::MIN, -1, i32::MAX], [32, 2, 7]];
const TABLES: [[i32; 6]; 2] = [[4, 7, 1, 0, 8, 2], [i32::MIN, 3, 5, i32::MAX, -1, 6]];

fn told(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// A call on a device; everything follows from its numbers.
struct Case {
    dtype: DType,
    dims: [usize; 2],
    in_parts: bool,
    pairs: Option<RotaryPairs>,
    lengths: [i32; 3],
    table: [i32; 6],
}

struct Tensors {
    rows: Tensor,
    new: Tensor,
    table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    angles: [Tensor; 2],
}

impl Case {
    fn tensors(&self, stream: &Stream) -> Result<Tensors, String> {
        let [row, values] = self.dims;
        let bits = |salt, count| -> Vec<u32> {
            let numbers = normal_rounded(salt, count, self.dtype);
            numbers.into_iter().map(|x| encode(self.dtype, x)).collect()
        };
        let mut rows = bits(1, PAGES * SLOTS * (row + GAP));
        rows.chunks_mut(row + GAP).for_each(|row| row[self.dims[0]..].fill(poison(self.dtype)));
        let ints = |values: &[i32], shape: &[usize]| {
            Tensor::from_slice(stream, values, shape).map_err(told)
        };
        let half = (row - values).max(2) / 2;
        let angle = |at: usize| ((at % half) as f32 + 0.3) * (at / half) as f32;
        let angles = |of: fn(f32) -> f32| {
            let numbers: Vec<f32> = (0..2 * SLOTS * half).map(|at| of(angle(at))).collect();
            Tensor::from_slice(stream, &numbers, &[2 * SLOTS, half]).map_err(told)
        };
        let total = TOKENS[3] as usize;
        Ok(Tensors {
            rows: upload(stream, self.dtype, &rows, &[PAGES, SLOTS, 1, row + GAP])?,
            new: upload(stream, self.dtype, &bits(2, total * row), &[total, 1, row])?,
            table: ints(&self.table, &[3, 2])?,
            lengths: ints(&self.lengths, &[3])?,
            offsets: ints(&TOKENS, &[4])?,
            angles: [angles(f32::cos)?, angles(f32::sin)?],
        })
    }

    /// Gives an append and its cache to `run`.
    fn with<R>(
        &self,
        tensors: &mut Tensors,
        run: impl FnOnce(AppendKv<'_>, KvCacheMut<'_>) -> R,
    ) -> Result<R, String> {
        let Tensors { rows, new, table, lengths, offsets, angles: [cos, sin] } = tensors;
        let ([row, values], new) = (self.dims, new.view());
        let part = |columns| -> Result<View<'_>, String> { new.slice(2, columns).map_err(told) };
        let append = match self.in_parts {
            true => AppendKv::latent_parts(part(0..values)?, part(values..row)?),
            false => AppendKv::latent(new),
        };
        let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 5 });
        let rotary = self.pairs.map(|pairs| Rotary { cos: cos.view(), sin: sin.view(), pairs });
        let rows = rows.view_mut().slice(3, 0..row).map_err(told)?;
        let cache = KvCacheMut {
            block_table: Some(table.view()),
            seqused_kv: Some(lengths.view()),
            ..KvCacheMut::latent(rows, values).map_err(told)?
        };
        Ok(run(AppendKv { packed, rotary, ..append }, cache))
    }

    fn problem(&self, stream: &Stream) -> Result<AppendKvProblem, String> {
        let mut tensors = self.tensors(stream)?;
        self.with(&mut tensors, |append, cache| append.problem(&cache.as_cache()?))?.map_err(told)
    }
}

fn cases(dtype: DType) -> Vec<Case> {
    let mut cases = Vec::new();
    for (dims, in_parts) in FORMS {
        for pairs in [None, Some(RotaryPairs::Halves), Some(RotaryPairs::Interleaved)] {
            if pairs.is_some() && dims[0] == dims[1] {
                continue;
            }
            for lengths in LENGTHS {
                for table in TABLES {
                    cases.push(Case { dtype, dims, in_parts, pairs, lengths, table });
                }
            }
        }
    }
    cases
}

#[test]
fn every_kernel_leaves_the_bits_of_the_cpu() {
    let Some(gpu) = gpu("latent_append_gpu::every_kernel_leaves_the_bits_of_the_cpu") else {
        return;
    };
    let check = |dtype: DType, gpu: &Gpu, report: &mut Report| {
        let (host, stream) = (cpu(), &gpu.stream);
        for case in cases(dtype) {
            let mut expected = case.tensors(&host).unwrap();
            case.with(&mut expected, |append, cache| append.append_into(cache, &host))
                .unwrap()
                .unwrap();
            let expected = download(&host, &expected.rows).unwrap();
            let problem = case.problem(stream).unwrap();
            let accepted =
                gpu.kernels().filter(|kernel| accepts(kernel, &problem, &gpu.properties).is_ok());
            let kernels: Vec<_> = accepted.collect();
            assert!(!kernels.is_empty());
            for kernel in kernels {
                report.run(kernel, || {
                    let mut tensors = case.tensors(stream)?;
                    case.with(&mut tensors, |append, cache| {
                        append.run_with(kernel, cache, stream)
                    })?
                    .map_err(told)?;
                    wait(stream, &|| format!("{:?} {:?}", case.dims, case.lengths))?;
                    let found = download(stream, &tensors.rows)?;
                    let differs = (0..found.len()).find(|&at| found[at] != expected[at]);
                    let told = |at| format!("element {at} of rows of {:?} differs", case.dims);
                    differs.map_or(Ok(found.len()), |at| Err(told(at)))
                });
            }
        }
    };
    gpu.check_groups("latent_append_gpu", &Report::default(), [DType::F16, DType::BF16], check);
}

/// On the CPU, rows in two parts leave the bits of whole ones.
#[test]
fn both_forms_are_one() {
    let stream = cpu();
    for case in cases(DType::BF16).into_iter().filter(|case| case.dims[0] > case.dims[1]) {
        let written = |in_parts| {
            let case = Case { in_parts, ..case };
            let mut tensors = case.tensors(&stream).unwrap();
            let appended =
                case.with(&mut tensors, |append, cache| append.append_into(cache, &stream));
            appended.unwrap().unwrap();
            download(&stream, &tensors.rows).unwrap()
        };
        let (whole, fresh) = (written(false), case.tensors(&stream).unwrap());
        assert!(whole == written(true), "{:?} {:?}", case.dims, case.lengths);
        let fresh = download(&stream, &fresh.rows).unwrap();
        let row = case.dims[0] + GAP;
        let changed = whole.chunks(row).zip(fresh.chunks(row)).filter(|(a, b)| a != b).count();
        let tokens = TOKENS.windows(2).map(|pair| i64::from(pair[1] - pair[0]));
        let dropped = tokens.zip(case.lengths).map(|(tokens, length)| {
            let first = i64::from(length) - tokens;
            (first..first + tokens).filter(|at| !(0..32).contains(at)).count()
        });
        assert_eq!(changed, 9 - dropped.sum::<usize>(), "{:?} {:?}", case.dims, case.lengths);
    }
}

/// An append within attention gives the bits of one before it.
#[test]
fn with_attention() {
    let Some(gpu) = gpu("latent_append_gpu::with_attention") else { return };
    let stream = &gpu.stream;
    for dtype in [DType::F16, DType::BF16] {
        for case in cases(dtype).into_iter().filter(|case| case.dims[1] == 512) {
            // Tables whose sequences share no page, so that no slot is written twice.
            if case.table != TABLES[0] {
                continue;
            }
            let heads = 16;
            let numbers = normal_rounded(3, 9 * heads * case.dims[0], dtype);
            let bits: Vec<_> = numbers.into_iter().map(|x| encode(dtype, x)).collect();
            let q = upload(stream, dtype, &bits, &[9, heads, case.dims[0]]).unwrap();
            let run = |together: bool| {
                let mut tensors = case.tensors(stream).unwrap();
                let attended = case.with(&mut tensors, |append, mut cache| {
                    let scores = Mask::causal().into();
                    let packed = append.packed;
                    let decode =
                        AttentionDecode { scores, packed, ..AttentionDecode::new(q.view()) };
                    if together {
                        return decode.append(&append, cache, stream);
                    }
                    append.append_into(cache.reborrow(), stream)?;
                    let read: KvCache<'_> = cache.as_cache()?;
                    decode.forward(read, stream)
                });
                let output = attended.unwrap().unwrap();
                [&output.o, &output.lse, &tensors.rows]
                    .map(|tensor| download(stream, tensor).unwrap())
            };
            assert!(run(true) == run(false), "{dtype} {:?} {:?}", case.dims, case.lengths);
        }
    }
}

/// Rows of codes, as the CPU writes them.
#[test]
fn rows_of_codes() {
    let Some(gpu) = gpu("latent_append_gpu::rows_of_codes") else { return };
    const ROW: usize = 656;
    for (lengths, table) in LENGTHS.into_iter().flat_map(|l| TABLES.map(|table| (l, table))) {
        let appended = |stream: &Stream| -> Vec<u32> {
            let bits = |salt, count: usize| -> Vec<u32> {
                let numbers = normal_rounded(salt, count, DType::BF16);
                numbers.into_iter().map(|x| encode(DType::BF16, x)).collect()
            };
            let mut values = bits(1, 9 * 512);
            values[128..256].fill(0);
            values[3 * 512] = poison(DType::BF16);
            let values = upload(stream, DType::BF16, &values, &[9, 1, 512]).unwrap();
            let turned = upload(stream, DType::BF16, &bits(2, 9 * 64), &[9, 1, 64]).unwrap();
            let ints = |values: &[i32], shape: &[usize]| {
                Tensor::from_slice(stream, values, shape).unwrap()
            };
            let (lengths, table, offsets) =
                (ints(&lengths, &[3]), ints(&table, &[3, 2]), ints(&TOKENS, &[4]));
            let before = vec![0x5a; PAGES * SLOTS * (ROW + 16)];
            let mut rows =
                upload(stream, DType::U8, &before, &[PAGES, SLOTS, 1, ROW + 16]).unwrap();
            let cache = LatentCodesMut {
                rows: rows.view_mut().slice(3, 0..ROW).unwrap(),
                block_table: Some(table.view()),
                seqused_kv: Some(lengths.view()),
            };
            let packed = Some(PackedTokens { cu_seqlens: offsets.view(), max_seqlen: 5 });
            let new = AppendLatentCodes::new(values.view(), turned.view());
            AppendLatentCodes { packed, ..new }.append_into(cache, stream).unwrap();
            download(stream, &rows).unwrap()
        };
        // Where sequences share a slot either may be there.
        if table == TABLES[0] {
            assert!(appended(&gpu.stream) == appended(&cpu()), "{lengths:?}");
        } else {
            appended(&gpu.stream);
            wait(&gpu.stream, &|| format!("{lengths:?} {table:?}")).unwrap();
        }
    }
}
