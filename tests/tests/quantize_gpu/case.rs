//! Drawn rows to quantise, and where they are in tensors with margins.

use crate::tensors::{Outcome, Written, told};
use blockflash_ops::{DType, Tensor, View, ViewMut};
use blockflash_tests::number::{encode, normal, poison, rng};
use rand::Rng;
use rand::rngs::StdRng;

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scaled {
    /// Given: one, or those of sequences, of heads, or of both.
    One,
    OfSequences,
    OfHeads,
    Given,
    /// Chosen.
    Tensor,
    Head,
    Token,
    /// The scales of tokens are not taken.
    LeftOut,
}

impl Scaled {
    pub(crate) fn is_given(self) -> bool {
        matches!(self, Self::One | Self::OfSequences | Self::OfHeads | Self::Given)
    }
}

/// Tokens, sequences, heads or scales around those of a call.
pub(crate) const MARGIN: usize = 2;

#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) seed: u64,
    pub(crate) dtype: DType,
    pub(crate) codes: DType,
    pub(crate) batch: usize,
    pub(crate) tokens: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    /// Offsets of packed sequences, and the rows of their tensors.
    pub(crate) packed: Option<(Vec<i32>, usize)>,
    pub(crate) scaled: Scaled,
    pub(crate) subtract_mean: bool,
    pub(crate) rotate: bool,
    /// Heads before tokens in memory.
    pub(crate) heads_first: bool,
}

fn garbage(random: &mut StdRng, near: i32) -> i32 {
    match random.random_range(0..6) {
        0 => [i32::MIN, i32::MAX, -1][random.random_range(0..3)],
        1 => random.random(),
        _ => random.random_range(-2..near + 3),
    }
}

impl Case {
    /// With `hostile`, offsets hold anything.
    pub(crate) fn draw(seed: u64, hostile: bool) -> Self {
        let mut random = rng(seed);
        let mut of = |choices: &[usize]| choices[random.random_range(0..choices.len())];
        let head_dim =
            of(&[8, 16, 24, 32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 136, 192, 248, 256, 256]);
        let dtype = [DType::F16, DType::BF16, DType::F32][of(&[0, 1, 2])];
        let codes = [DType::E4M3, DType::E5M2, DType::I8][of(&[0, 1, 2])];
        let batch = of(&[1, 1, 2, 3, 9, 40]);
        let heads = of(&[1, 1, 2, 3, 5, 8, 12, 17, 40]);
        let most = (1 << 19) / (batch * heads * head_dim);
        let tokens = of(&[1, 2, 3, 9, 40, 127, 128, 129, 300, 2000]).min(most.max(1));
        let kinds = [
            Scaled::One,
            Scaled::OfSequences,
            Scaled::OfHeads,
            Scaled::Given,
            Scaled::Tensor,
            Scaled::Head,
            Scaled::Token,
            Scaled::LeftOut,
        ];
        let scaled = kinds[of(&[0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 6, 6, 7])];
        let subtract_mean = of(&[0, 0, 1]) == 1;
        let rotate = head_dim.is_power_of_two() && of(&[0, 1]) == 1;
        let heads_first = of(&[0, 1]) == 1;
        let is_packed = hostile || of(&[0, 1]) == 1;
        let packed = is_packed.then(|| {
            let mut offsets = vec![0];
            for _ in 0..batch {
                let most = tokens * random.random_range(0..=2usize);
                offsets.push(offsets[offsets.len() - 1] + random.random_range(0..=most as i32));
            }
            let total = offsets[batch] as usize + random.random_range(0..5usize);
            if hostile {
                offsets.iter_mut().for_each(|x| *x = garbage(&mut random, total as i32));
            }
            (offsets, total)
        });
        Self {
            seed,
            dtype,
            codes,
            batch,
            tokens,
            heads,
            head_dim,
            packed,
            scaled,
            subtract_mean,
            rotate,
            heads_first,
        }
    }

    /// Without sequences, tokens or heads.
    pub(crate) fn empty(seed: u64) -> Self {
        let mut case = Self::draw(seed, false);
        match seed % 3 {
            0 => (case.batch, case.packed) = (0, None),
            1 => case.heads = 0,
            _ => case.tokens = 0,
        }
        let packed = case.packed.take();
        case.packed = packed.map(|_| (vec![0; case.batch + 1], seed as usize % 2 * case.tokens));
        case
    }

    /// One sequence.
    pub(crate) fn long(seed: u64, tokens: usize, heads: usize, head_dim: usize) -> Self {
        let rotate = head_dim.is_power_of_two() && seed.is_multiple_of(2);
        let case = Self::draw(seed, false);
        Self { batch: 1, tokens, heads, head_dim, packed: None, rotate, ..case }
    }

    /// Batch entries and tokens of a tensor without its margins.
    fn rows(&self) -> [usize; 2] {
        self.packed.as_ref().map_or([self.batch, self.tokens], |(_, total)| [1, *total])
    }

    pub(crate) fn physical(&self, width: Option<usize>) -> Vec<usize> {
        let [entries, tokens] = self.rows();
        let (tokens, heads) = (tokens + 2 * MARGIN, self.heads + 1);
        let rows = if self.heads_first { [heads, tokens] } else { [tokens, heads] };
        let entries = self.packed.is_none().then_some(entries);
        entries.into_iter().chain(rows).chain(width).collect()
    }

    /// Where a row begins in the physical tensor.
    pub(crate) fn place(&self, [entry, token, head]: [usize; 3]) -> usize {
        let (tokens, heads) = (self.rows()[1] + 2 * MARGIN, self.heads + 1);
        let token = token + MARGIN;
        self.head_dim
            * match self.heads_first {
                true => (entry * heads + head) * tokens + token,
                false => (entry * tokens + token) * heads + head,
            }
    }

    /// The axes of tokens and of heads in memory, and the order of a view.
    fn axes(&self, rank: usize) -> ([usize; 2], Vec<usize>) {
        let first = usize::from(self.packed.is_none());
        let mut order: Vec<usize> = (0..rank).collect();
        if self.heads_first {
            order.swap(first, first + 1);
        }
        ([order[first], order[first + 1]], order)
    }

    /// A tensor between its margins.
    pub(crate) fn inside<'t>(&self, tensor: &'t mut Tensor) -> Outcome<ViewMut<'t>> {
        let ([of_tokens, of_heads], order) = self.axes(tensor.shape().len());
        let view = tensor.view_mut().slice(of_tokens, MARGIN..MARGIN + self.rows()[1]);
        let view = view.and_then(|view| view.slice(of_heads, 0..self.heads)).map_err(told)?;
        view.permute(&order).map_err(told)
    }

    pub(crate) fn inside_read<'t>(&self, tensor: &'t Tensor) -> Outcome<View<'t>> {
        let ([of_tokens, of_heads], order) = self.axes(tensor.shape().len());
        let view = tensor.view().slice(of_tokens, MARGIN..MARGIN + self.rows()[1]);
        let view = view.and_then(|view| view.slice(of_heads, 0..self.heads)).map_err(told)?;
        view.permute(&order).map_err(told)
    }

    /// The rows of each sequence: entry, and tokens.
    pub(crate) fn ranges(&self) -> Vec<(usize, std::ops::Range<usize>)> {
        match &self.packed {
            None => (0..self.batch).map(|entry| (entry, 0..self.tokens)).collect(),
            Some((offsets, _)) => {
                let range = |pair: &[i32]| (0, pair[0] as usize..pair[1] as usize);
                offsets.windows(2).map(range).collect()
            }
        }
    }

    /// The most tokens of a sequence.
    pub(crate) fn longest(&self) -> usize {
        let Some((offsets, total)) = &self.packed else { return self.tokens };
        let lengths = offsets.windows(2).map(|pair| i64::from(pair[1]) - i64::from(pair[0]));
        let most = lengths.max().unwrap_or(0);
        usize::try_from(most).unwrap_or(0).clamp(1, (*total).max(1))
    }

    /// Whether nothing around the outputs is written.
    pub(crate) fn are_margins_untouched(&self, [codes, chosen, means]: &Written) -> bool {
        let [entries, tokens] = self.rows();
        let mut is_inside = vec![false; codes.len()];
        for at in 0..entries * tokens * self.heads {
            let (head, token) = (at % self.heads, at / self.heads % tokens);
            let start = self.place([at / self.heads / tokens, token, head]);
            is_inside[start..start + self.head_dim].fill(true);
        }
        let group = |at: usize| {
            let (sequence, head) = (at / (self.heads + 1), at % (self.heads + 1));
            (MARGIN..MARGIN + self.batch).contains(&sequence) && head < self.heads
        };
        let untouched = |all: &[u32], poison: u32, inside: &dyn Fn(usize) -> bool| {
            all.iter().enumerate().all(|(at, &x)| x == poison || inside(at))
        };
        untouched(codes, poison(self.codes), &|at| is_inside[at])
            && untouched(chosen, poison(DType::F32), &|at| match self.scaled {
                Scaled::Tensor => at == MARGIN,
                Scaled::Head => group(at),
                _ => is_inside[at * self.head_dim],
            })
            && untouched(means, poison(DType::F32), &|at| group(at / self.head_dim))
    }

    /// The bits of x with its margins, which are NaN.
    pub(crate) fn numbers(&self, seed: u64) -> Vec<u32> {
        let mut random = rng(self.seed + seed);
        let physical = self.physical(Some(self.head_dim));
        let mut bits = vec![poison(self.dtype); physical.iter().product()];
        let [entries, tokens] = self.rows();
        let rows = entries * tokens * self.heads;
        let values = normal(self.seed + seed + 1, rows * self.head_dim);
        // A tensor or a head with a scale of its own has small rows, too, and seldom infinities.
        let is_wild = self.scaled.is_given() || self.scaled == Scaled::Token;
        let is_odd = is_wild || random.random_range(0..4) == 0;
        for (at, row) in values.chunks_exact(self.head_dim.max(1)).enumerate() {
            let (head, token) = (at % self.heads, at / self.heads % tokens);
            let size = 2f32.powi(random.random_range(-12..=12));
            let kind = random.random_range(0..8);
            let start = self.place([at / self.heads / tokens, token, head]);
            for (column, x) in row.iter().enumerate() {
                let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
                let x = match kind {
                    0 => 0.0,
                    1 if is_odd && column % 5 == 0 => odd[random.random_range(0..4)],
                    2 => -0.0,
                    3 | 4 => *x + 3.0,
                    _ => x * size,
                };
                bits[start + column] = encode(self.dtype, x);
            }
        }
        bits
    }
}
