//! Runs cases on a device and checks everything that they write.

use super::reference::{PageOf, score, summary};
use super::{PageCase, PageKernels};
use crate::attention::Choice;
use crate::gpu::wait;
use crate::host::{download, poisoned, refill, upload};
use crate::number::{decode, encode, poison};
use blockflash_ops::{
    AttentionDecodeWorkspace, ChoosePages, DType, Error, KvCache, Operation, PackedTokens, Stream,
    SummarizePages, Tensor, View,
};
use blockflash_oracle::{PageScore, page_choice};
use std::collections::BTreeSet;

/// The operands of a case on a device.
struct PageInputs {
    case: PageCase,
    stream: Stream,
    k: Tensor,
    q: Tensor,
    table: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    workspace: Option<AttentionDecodeWorkspace>,
}

/// What a case writes.
struct PageOutputs {
    summaries: Tensor,
    lists: Tensor,
    counts: Tensor,
}

impl PageOutputs {
    fn poisoned(case: &PageCase, stream: &Stream) -> Result<Self, String> {
        let PageCase { dtype, head_dim, heads_kv, statistics, capacity, .. } = *case;
        let shape = [case.pages(), statistics, heads_kv, head_dim];
        Ok(Self {
            summaries: poisoned(stream, dtype, &shape)?,
            lists: poisoned(stream, DType::I32, &[case.batch(), heads_kv, capacity])?,
            counts: poisoned(stream, DType::I32, &[case.batch()])?,
        })
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl PageInputs {
    /// Uploads the data of a case.
    fn upload(case: &PageCase, stream: &Stream) -> Result<Self, String> {
        let encoded =
            |values: &[f32]| values.iter().map(|&x| encode(case.dtype, x)).collect::<Vec<u32>>();
        let ints = |values: &[i32], shape: &[usize]| {
            Tensor::from_slice(stream, values, shape).map_err(text)
        };
        let PageCase { dtype, head_dim, heads_kv, page_size, max_pages, .. } = *case;
        let (batch, pages, heads_q) = (case.batch(), case.pages(), heads_kv * case.group);
        let mut keys = case.keys();
        if case.heads_first {
            let by_slot = keys.clone();
            let rows = keys.chunks_exact_mut(head_dim).enumerate();
            rows.for_each(|(at, row)| {
                let (slot, head) = (at % page_size, at / page_size % heads_kv);
                let page = at / page_size / heads_kv;
                let from = ((page * page_size + slot) * heads_kv + head) * head_dim;
                row.copy_from_slice(&by_slot[from..][..head_dim]);
            });
        }
        let k_shape = match case.heads_first {
            true => [pages, heads_kv, page_size, head_dim],
            false => [pages, page_size, heads_kv, head_dim],
        };
        let q_shape = match case.packed {
            true => vec![case.queries.iter().sum(), heads_q, head_dim],
            false => vec![batch, case.queries[0], heads_q, head_dim],
        };
        let mut inputs = Self {
            stream: stream.clone(),
            k: upload(stream, dtype, &encoded(&keys), &k_shape)?,
            q: upload(stream, dtype, &encoded(&case.q()), &q_shape)?,
            table: ints(&case.table(), &[batch, max_pages])?,
            lengths: ints(&case.lengths, &[batch])?,
            offsets: ints(&case.offsets(), &[batch + 1])?,
            workspace: None,
            case: case.clone(),
        };
        let PageOutputs { summaries, .. } = PageOutputs::poisoned(case, stream)?;
        let bytes = inputs.choice(summaries.view()).workspace_bytes(stream.device());
        let workspace = AttentionDecodeWorkspace::new(stream, bytes.map_err(text)?);
        inputs.workspace = Some(workspace.map_err(text)?);
        Ok(inputs)
    }

    fn cache(&self) -> KvCache<'_> {
        let k = match self.case.heads_first {
            true => self.k.view().permute(&[0, 2, 1, 3]).expect("four dimensions"),
            false => self.k.view(),
        };
        KvCache {
            block_table: Some(self.table.view()),
            seqused_kv: Some(self.lengths.view()),
            ..KvCache::new(k, k)
        }
    }

    fn choice<'a>(&'a self, summaries: View<'a>) -> ChoosePages<'a> {
        let max_seqlen = self.case.queries.iter().copied().max().unwrap_or(0).max(1);
        let offsets = PackedTokens { cu_seqlens: self.offsets.view(), max_seqlen };
        ChoosePages {
            packed: self.case.packed.then_some(offsets),
            workspace: self.workspace.as_ref(),
            ..ChoosePages::new(self.q.view(), self.cache(), summaries)
        }
    }

    fn summarize(&self, kernel: Choice, out: &mut PageOutputs) -> Result<(), Error> {
        let op = SummarizePages { cache: self.cache(), tokens: self.case.tokens };
        let summaries = out.summaries.view_mut();
        match kernel {
            Choice::Selected => op.run(summaries, &self.stream),
            Choice::This(kernel) => op.run_with(kernel, summaries, &self.stream),
        }
    }

    /// Chooses by other summaries, or by those of the outputs.
    fn choose(
        &self,
        kernel: Choice,
        summaries: Option<&Tensor>,
        out: &mut PageOutputs,
    ) -> Result<(), Error> {
        let op = self.choice(summaries.unwrap_or(&out.summaries).view());
        let out = (out.lists.view_mut(), out.counts.view_mut());
        match kernel {
            Choice::Selected => op.run(out, &self.stream),
            Choice::This(kernel) => op.run_with(kernel, out, &self.stream),
        }
    }

    fn wait(&self) -> Result<(), String> {
        wait(&self.stream, &|| format!("{:?}", self.case))
    }

    /// Checks every element of the summaries, those that stay poison, too.
    fn check_summaries(&self, out: &PageOutputs) -> Result<usize, String> {
        let (case, keys, table) = (&self.case, self.case.keys(), self.case.table());
        let bits = download(&self.stream, &out.summaries)?;
        let (d, heads) = (case.head_dim, case.heads_kv);
        let mut written = BTreeSet::new();
        for sequence in 0..case.batch() {
            let first = case.length(sequence).saturating_sub(case.tokens) / case.page_size;
            let columns = first..case.columns(sequence);
            for (column, head) in columns.flat_map(|c| (0..heads).map(move |head| (c, head))) {
                let page = table[sequence * case.max_pages + column] as usize;
                let expected = summary(case, &keys, &table, PageOf { sequence, column, head });
                for (i, [low, high]) in expected.into_iter().enumerate() {
                    let at = ((page * case.statistics + i / d) * heads + head) * d + i % d;
                    written.insert(at);
                    let found = decode(case.dtype, bits[at]);
                    let nan = low.is_nan() && found.is_nan();
                    if !nan && !(low..=high).contains(&found) {
                        let what = format!("column {column}, head {head} of {sequence}, {}", i % d);
                        return Err(format!("summary of {what}: {found}, not {low} to {high}"));
                    }
                }
            }
        }
        let stays = |at: &usize| !written.contains(at) && bits[*at] != poison(case.dtype);
        match (0..bits.len()).find(stays) {
            Some(at) => Err(format!("element {at} of the summaries is written")),
            None => Ok(1),
        }
    }

    /// Summaries of all pages, by their definition; those without keys are NaN.
    fn expected_summaries(&self) -> Vec<f32> {
        let (case, keys, table) = (&self.case, self.case.keys(), self.case.table());
        let (d, heads) = (case.head_dim, case.heads_kv);
        let mut values = vec![f32::NAN; case.pages() * case.statistics * heads * d];
        for sequence in 0..case.batch() {
            for column in 0..case.columns(sequence) {
                let page = table[sequence * case.max_pages + column] as usize;
                for head in 0..heads {
                    let rows = summary(case, &keys, &table, PageOf { sequence, column, head });
                    for (i, [low, _]) in rows.into_iter().enumerate() {
                        values[((page * case.statistics + i / d) * heads + head) * d + i % d] = low;
                    }
                }
            }
        }
        values
    }

    /// Checks lists and counts of a choice by these summaries.
    fn check_choice(&self, summaries: &[f32], out: &PageOutputs) -> Result<usize, String> {
        let (case, q, table) = (&self.case, self.case.q(), self.case.table());
        let (d, heads) = (case.head_dim, case.heads_kv);
        let lists = out.lists.to_vec::<i32>(&self.stream).map_err(text)?;
        let counts = out.counts.to_vec::<i32>(&self.stream).map_err(text)?;
        for sequence in 0..case.batch() {
            let columns = case.columns(sequence);
            if counts[sequence] as usize != columns.min(case.capacity) {
                return Err(format!("{} pages of {columns}", counts[sequence]));
            }
            for head in 0..heads {
                let list = &lists[(sequence * heads + head) * case.capacity..][..case.capacity];
                let of_column = |column: usize| {
                    let page = table[sequence * case.max_pages + column] as usize;
                    let rows = (0..case.statistics).flat_map(|statistic| {
                        let start = ((page * case.statistics + statistic) * heads + head) * d;
                        summaries[start..][..d].to_vec()
                    });
                    score(case, &q, &rows.collect::<Vec<f32>>(), sequence, head)
                };
                let scores: Vec<PageScore> = (0..columns).map(of_column).collect();
                if !page_choice(list, &scores).passed() {
                    return Err(format!("head {head} of {sequence}: {list:?} by {scores:?}"));
                }
            }
        }
        Ok(2)
    }
}

/// Runs both steps of a case twice, the choice by summaries of the host, and returns the number of
/// compared outputs.
pub fn run_pages(case: &PageCase, kernels: PageKernels, stream: &Stream) -> Result<usize, String> {
    let check = || -> Result<usize, String> {
        let inputs = PageInputs::upload(case, stream)?;
        let mut out = PageOutputs::poisoned(case, stream)?;
        let expected = inputs.expected_summaries();
        let bits: Vec<u32> = expected.iter().map(|&x| encode(case.dtype, x)).collect();
        let summaries = upload(stream, case.dtype, &bits, out.summaries.shape())?;
        let (mut compared, mut first) = (0, None);
        for _ in 0..2 {
            inputs.summarize(kernels.summaries, &mut out).map_err(text)?;
            inputs.choose(kernels.choice, Some(&summaries), &mut out).map_err(text)?;
            inputs.wait()?;
            compared += inputs.check_summaries(&out)? + inputs.check_choice(&expected, &out)?;
            let found = [download(stream, &out.lists)?, download(stream, &out.summaries)?];
            if *first.get_or_insert_with(|| found.clone()) != found {
                return Err("another result at the second run".into());
            }
        }
        Ok(compared)
    };
    check().map_err(|error| format!("{error}\n    {case:?}"))
}

/// Captures both steps while sequences have one key, and replays them for other lengths.
pub fn page_replays(
    case: &PageCase,
    kernels: PageKernels,
    stream: &Stream,
) -> Result<usize, String> {
    let lengths = |lengths: &[i32]| lengths.iter().map(|&x| x as u32).collect::<Vec<u32>>();
    let mut case = PageCase { tokens: 1 << 20, ..case.clone() };
    let short = vec![1; case.batch()];
    let targets = std::mem::replace(&mut case.lengths, short);
    let mut inputs = PageInputs::upload(&case, stream)?;
    let mut out = PageOutputs::poisoned(&case, stream)?;
    let mut both = || -> Result<(), Error> {
        inputs.summarize(kernels.summaries, &mut out)?;
        inputs.choose(kernels.choice, None, &mut out)
    };
    let graph = stream.capture(|_| both()).map_err(text)?;
    let mut compared = 0;
    for step in 1..=20 {
        inputs.case.lengths = targets.iter().map(|&target| target / 20 * step).collect();
        refill(&mut inputs.lengths, stream, &lengths(&inputs.case.lengths))?;
        graph.launch(stream).map_err(text)?;
        inputs.wait()?;
        let bits = download(stream, &out.summaries)?;
        let found: Vec<f32> = bits.iter().map(|&bits| decode(case.dtype, bits)).collect();
        compared += inputs.check_choice(&found, &out)?;
    }
    Ok(compared)
}
