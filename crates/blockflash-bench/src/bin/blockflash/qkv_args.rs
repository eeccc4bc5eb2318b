//! Options that `blockflash attention` and `blockflash attention-decode` share.

use crate::args::{Input, Window, out_path, window};
use crate::failure::{Result, bail, ensure};
use crate::operand::{Source, random};
use crate::outputs::{Named, Outputs};
use blockflash_bench::io::{Array, Stored};
use blockflash_bench::memory;
use blockflash_ops::{Align, DType, Mask, Scores};
use std::path::{Path, PathBuf};

/// Where q, k and v come from, and the type to compute in.
#[derive(clap::Args)]
#[command(next_help_heading = "Input")]
pub struct Qkv {
    /// Read the tensors q, k and v from a .safetensors file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["q", "k", "v", "random"])]
    pub input: Option<PathBuf>,
    /// Read q from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["k", "v"], conflicts_with = "random")]
    pub q: Option<PathBuf>,
    /// Read k from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "v"], conflicts_with = "random")]
    pub k: Option<PathBuf>,
    /// Read v from a .npy file
    #[arg(long, value_name = "FILE", requires_all = ["q", "k"], conflicts_with = "random")]
    pub v: Option<PathBuf>,
    /// Element type to compute in, e4m3 for attention without a cache alone, with an output of bf16
    /// [default: the type of the files; f16 for f32, f64 and random input]
    #[arg(long, value_name = "f16|bf16|f32|e4m3")]
    pub dtype: Option<Input>,
    /// Number of heads of random k and v [default: as many as q]
    #[arg(long, value_name = "N")]
    pub kv_heads: Option<usize>,
    /// Elements of a row of random v, and of the output [default: as many as of q]
    #[arg(long, value_name = "N")]
    pub v_head_dim: Option<usize>,
}

impl Qkv {
    pub fn dtype(&self) -> Option<DType> {
        self.dtype.map(DType::from)
    }

    /// The files of q, k and v, of which k and v have one shape but for the last size. `random` is
    /// the form of the option that could be given instead.
    pub fn sources(&self, random: &str) -> Result<[Source; 3]> {
        let sources = match (&self.input, &self.q, &self.k, &self.v) {
            (Some(file), ..) => {
                Source::open_named(file, ["q", "k", "v"], ": give .npy files by --q, --k and --v")?
            }
            (None, Some(q), Some(k), Some(v)) => {
                [Source::open(q, "q")?, Source::open(k, "k")?, Source::open(v, "v")?]
            }
            _ => {
                bail!(
                    "nothing to compute: give --input FILE, or --q, --k and --v, or --random \
                     {random} (see --help)"
                );
            }
        };
        let (k, v) = (sources[1].shape()?, sources[2].shape()?);
        // Before anything is read: one of them may be hundreds of gigabytes long.
        let but_last = |shape: &[usize]| shape[..shape.len().saturating_sub(1)].to_vec();
        let like = k.len() == v.len() && but_last(k) == but_last(v);
        ensure!(like, "v is {v:?} and k {k:?}, expected the same but for the last size");
        Ok(sources)
    }

    /// Whether sizes of random tensors are given.
    pub fn has_sizes(&self) -> bool {
        self.kv_heads.or(self.v_head_dim).is_some()
    }

    /// Names of the options, and the files that they name.
    pub fn files(&self) -> [(&'static str, Option<&PathBuf>); 4] {
        [
            ("--input", self.input.as_ref()),
            ("--q", self.q.as_ref()),
            ("--k", self.k.as_ref()),
            ("--v", self.v.as_ref()),
        ]
    }
}

/// What is done to the scores, but for the mask.
#[derive(clap::Args)]
#[command(next_help_heading = "Operation")]
pub struct ScoreArgs {
    /// Attend to at most L keys before and R keys after the aligned key; `-` leaves a side
    /// unlimited
    #[arg(long, value_name = "L,R", value_parser = window, allow_hyphen_values = true)]
    pub window: Option<Window>,
    /// Multiply the scores by this factor [default: 1/sqrt(head_dim)]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub scale: Option<f32>,
    /// Replace each score by X·tanh(score / X)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub softcap: Option<f32>,
    /// Add one score per query head, an attention sink, to the sum of exponentials: f32 `[heads]`
    /// from a file (tensor `sink`), or `random`
    #[arg(long, value_name = "FILE|random")]
    pub sink: Option<PathBuf>,
    /// Add to the scores of all pairs: f16, bf16 or f32 `[batch, heads, queries, keys]`, any of
    /// which may be 1 for all, from a file (tensor `bias`), or `random`, drawn from N(0, 1) for
    /// batch 1. Not for packed sequences
    #[arg(long, value_name = "FILE|random")]
    pub bias: Option<PathBuf>,
    /// Take the distance of query and key times a slope off the scores (ALiBi): f32 slopes
    /// `[heads]` or `[batch, heads]` from a file (tensor `alibi`) [default: 2^(-8 i / heads) for
    /// the heads i from 1 on]
    #[arg(long, value_name = "FILE", num_args = 0..=1, require_equals = true,
        default_missing_value = POWERS)]
    pub alibi: Option<PathBuf>,
}

/// In place of a file with slopes.
const POWERS: &str = "powers";

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum MaskName {
    Full,
    Causal,
    CausalTopLeft,
}

impl ScoreArgs {
    /// The options that name files, and the files.
    pub fn files(&self) -> [(&'static str, Option<&PathBuf>); 3] {
        [
            ("--sink", self.sink.as_ref()),
            ("--bias", self.bias.as_ref()),
            ("--alibi", self.alibi.as_ref()),
        ]
    }

    /// The options with the mask; `default` stands for a mask that is not named. Tensors are where
    /// they come from: see [`with_tensors`].
    pub fn of(&self, mask: Option<MaskName>, default: Mask) -> Result<Scores<&Path>> {
        let Self { scale, softcap, sink, bias, alibi, .. } = self;
        let mask = self.mask(mask, default)?;
        let [sink, bias, alibi] = [sink, bias, alibi].map(Option::as_deref);
        Ok(Scores { mask, softmax_scale: *scale, softcap: *softcap, sink, bias, alibi })
    }

    fn mask(&self, name: Option<MaskName>, default: Mask) -> Result<Mask> {
        let default = if default == Mask::Full { MaskName::Full } else { MaskName::Causal };
        let name = name.unwrap_or(default);
        let top_left = name == MaskName::CausalTopLeft;
        let align = if top_left { Align::TopLeft } else { Align::BottomRight };
        Ok(match (name, self.window) {
            (MaskName::Full, None) => Mask::Full,
            (MaskName::Full, Some(Window { left, right })) => Mask::Window { left, right, align },
            (_, None) => Mask::Causal { align },
            (_, Some(Window { left, right: None | Some(0) })) => {
                Mask::Window { left, right: Some(0), align }
            }
            (_, Some(Window { right: Some(right), .. })) => {
                bail!(
                    "--window with {right} keys after the query contradicts a causal --mask: the \
                     right side must be 0 or -"
                );
            }
        })
    }
}

/// Bytes of the output: rows of q with the elements of v.
pub fn o_bytes([q, _, v]: &[Source; 3], dtype: DType) -> Result<u64> {
    let mut shape = q.shape()?.to_vec();
    if let (Some(last), Some(&width)) = (shape.last_mut(), v.shape()?.last()) {
        *last = width;
    }
    Ok(memory::size(&[&shape], dtype.size().max(if dtype.is_code() { 2 } else { 0 })))
}

/// Scores with their tensors, from files or random, for this q and as many keys.
pub fn with_tensors(
    scores: Scores<&Path>,
    q: &Array,
    keys: usize,
    seed: u64,
) -> Result<Scores<Array>> {
    scores.try_map(|name, path| {
        let &[.., heads, _] = q.shape() else {
            bail!("q is {:?}, which has no heads", q.shape());
        };
        let drawn = path == Path::new("random");
        match (name, q.shape()) {
            ("bias", &[_, queries, _, _]) if drawn => {
                let shape = [1, heads, queries, keys];
                let dtype = if q.dtype().is_code() { DType::BF16 } else { q.dtype() };
                memory::ensure(name, memory::size(&[&shape], dtype.size()))?;
                random(name, dtype, &shape, seed, 4)
            }
            ("bias", _) if drawn => bail!("--bias is not for packed sequences (--cu-seqlens)"),
            ("bias", _) => {
                let source = Source::open(path, name)?;
                let dtype = match source.stored() {
                    Some(Stored::F16) => DType::F16,
                    Some(Stored::Bf16) => DType::BF16,
                    _ => DType::F32,
                };
                source.load(dtype)
            }
            ("alibi", _) if path == Path::new(POWERS) => {
                let slope = |head: usize| (-8.0 * (head + 1) as f32 / heads as f32).exp2();
                Ok(Array::from((0..heads).map(slope).collect::<Vec<f32>>()))
            }
            _ if drawn => random(name, DType::F32, &[heads], seed, 3),
            _ => Source::open(path, name)?.load(DType::F32),
        }
    })
}

/// The files to write.
#[derive(clap::Args)]
#[command(next_help_heading = "Output")]
pub struct Written {
    /// Write the output to a .npy or .safetensors file (tensor `o`)
    #[arg(long, value_name = "FILE", value_parser = out_path)]
    pub out: Option<PathBuf>,
    /// Compute the log-sum-exp, f32 [batch, heads, queries], and write it to a .npy or .safetensors
    /// file (tensor `lse`; it may be the same file)
    #[arg(long, value_name = "FILE", value_parser = out_path)]
    pub lse: Option<PathBuf>,
}

impl Written {
    /// The files with those of `others`. Refuses to write over the files that are read.
    pub fn outputs(
        &self,
        others: &[Named<'_>],
        inputs: &[(&'static str, Option<&PathBuf>)],
    ) -> Result<Outputs> {
        let outputs = [("--out", "o", self.out.as_ref()), ("--lse", "lse", self.lse.as_ref())];
        Outputs::new(&[&outputs[..], others].concat(), inputs)
    }
}
