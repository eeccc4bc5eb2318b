//! Rows of attention as codes of 8 bits.

use super::Case;
use super::decode::code_of;
use super::grid::each;
use super::id::{Fields, Id, named};
use super::limits;
use super::operands::{Operands, Placed, Progress, launched, normal};
use super::shape::Shape;
use super::work::Work;
use crate::error::Result;
use crate::io::Array;
use blockflash_ops::quantize::{self, QuantizeProblem};
use blockflash_ops::{
    CudaProperties, Device, Kernel, Operation, Prepared, Quantize, QuantizeOutputMut,
    QuantizeScale, Stream, Tensor,
};
use blockflash_oracle::Comparison;
use blockflash_sys::{DType, HeadDims};
use serde::{Deserialize, Serialize};

/// Which elements share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScaledBy {
    /// A scale that is given.
    Given,
    /// All.
    Tensor,
    /// Those of a sequence and head.
    Head,
    /// Those of a token and head.
    Token,
}

named!(ScaledBy: Given = "given", Tensor = "tensor", Head = "head", Token = "token");

/// What happens to a row before it is divided by its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rows {
    /// Nothing.
    Plain,
    /// It is rotated.
    Rotated,
}

named!(Rows: Plain = "plain", Rotated = "rotated");

/// Rows of sequences of equal lengths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct QuantizeShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of each.
    pub seqlen: usize,
    /// Heads.
    pub num_heads: usize,
    /// Elements of a row of a head.
    pub head_dim: usize,
    /// Which elements share a scale.
    pub scale: ScaledBy,
    /// What happens to a row before.
    pub rows: Rows,
    /// Element type of the numbers.
    pub dtype: DType,
    /// Element type of the codes.
    pub codes: DType,
}

impl Fields for QuantizeShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen: 0,
        num_heads: 0,
        head_dim: 0,
        scale: ScaledBy::Head,
        rows: Rows::Plain,
        dtype: DType::F16,
        codes: DType::E4M3,
    };

    /// `quantize_b4_s8192_h8_d128_head_plain_bf16_e4m3`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("quantize")?;
        id.field("b", &mut self.batch)?;
        id.field("s", &mut self.seqlen)?;
        id.field("h", &mut self.num_heads)?;
        id.field("d", &mut self.head_dim)?;
        id.name(&mut self.scale)?;
        id.name(&mut self.rows)?;
        id.name(&mut self.dtype)?;
        id.part(&mut self.codes, |dtype| dtype.name().to_owned(), code_of)
    }
}

impl QuantizeShape {
    fn shape(&self) -> [usize; 4] {
        [self.batch, self.seqlen, self.num_heads, self.head_dim]
    }
}

impl Shape for QuantizeShape {
    fn check(&self) -> Result<(), String> {
        let Self { batch, seqlen, num_heads, head_dim, codes, .. } = *self;
        limits::attention(batch, [seqlen; 2], [num_heads; 2], HeadDims::all(head_dim))?;
        if self.rows == Rows::Rotated && !head_dim.is_power_of_two() {
            return Err(format!("head_dim is {head_dim}, but rotated rows need a power of 2"));
        }
        match codes.is_code() {
            true => Ok(()),
            false => Err(format!("codes is {codes}, expected e4m3, e5m2 or i8")),
        }
    }

    fn op(&self) -> &'static str {
        "quantize"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    /// Numbers once and codes once, and the scales of tokens: what a copy would move. Another pass
    /// over the numbers, for scales that many share, is not counted.
    fn work(&self) -> Work {
        let [batch, seqlen, num_heads, head_dim] = self.shape();
        let rows = batch * seqlen * num_heads;
        let of_scale = if self.scale == ScaledBy::Token { 4 } else { 0 };
        let bytes = (rows * (head_dim * (self.dtype.size() + 1) + of_scale)) as f64;
        Work { flops: 0.0, exps: 0.0, bytes, l2_bytes: bytes }
    }

    fn group(&self) -> String {
        format!("{} rows by {}", self.rows, self.scale)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        Ok(Box::new(QuantizeOperands::new(*self, stream, seed)?))
    }
}

/// Grid of a suite file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuantizeGrid {
    batch: Vec<usize>,
    seqlen: Vec<usize>,
    num_heads: usize,
    head_dim: Vec<usize>,
    scale: Vec<ScaledBy>,
    rows: Vec<Rows>,
    dtype: Vec<DType>,
    codes: Vec<DType>,
}

impl QuantizeGrid {
    /// The cases.
    ///
    /// # Errors
    /// One line that says which field is wrong.
    pub fn expand(&self) -> Result<Vec<Case>, String> {
        let (num_heads, mut cases) = (self.num_heads, Vec::new());
        each!(batch in self.batch, seqlen in self.seqlen, head_dim in self.head_dim,
              scale in self.scale, rows in self.rows, dtype in self.dtype,
              codes in self.codes => {
            let shape =
                QuantizeShape { batch, seqlen, num_heads, head_dim, scale, rows, dtype, codes };
            shape.check()?;
            cases.push(shape.into());
        });
        Ok(cases)
    }
}

/// The numbers, and the tensors that are written.
#[derive(Debug)]
struct QuantizeOperands {
    shape: QuantizeShape,
    x: Placed,
    given: Tensor,
    codes: Tensor,
    scale: Option<Tensor>,
    prepared: Option<Prepared<QuantizeProblem>>,
}

impl QuantizeOperands {
    fn new(shape: QuantizeShape, stream: &Stream, seed: u64) -> Result<Self> {
        Self::of(shape, Placed::new(normal(&shape.shape(), shape.dtype, seed, 0)?, stream)?, stream)
    }

    fn of(shape: QuantizeShape, x: Placed, stream: &Stream) -> Result<Self> {
        let QuantizeShape { batch, seqlen, num_heads, .. } = shape;
        let zeros = |shape: &[usize]| Tensor::zeros(stream, DType::F32, shape);
        let scale = match shape.scale {
            ScaledBy::Given => None,
            ScaledBy::Tensor => Some(zeros(&[1])?),
            ScaledBy::Head => Some(zeros(&[batch, num_heads])?),
            ScaledBy::Token => Some(zeros(&[batch, seqlen, num_heads])?),
        };
        Ok(Self {
            shape,
            x,
            given: Tensor::from_slice(stream, &[0.02f32], &[1])?,
            codes: Tensor::zeros(stream, shape.codes, &shape.shape())?,
            scale,
            prepared: None,
        })
    }

    fn call(&mut self, _kernel: Option<&Kernel>) -> Result<(Quantize<'_>, QuantizeOutputMut<'_>)> {
        let scale = match self.shape.scale {
            ScaledBy::Given => QuantizeScale::Given(self.given.view()),
            ScaledBy::Tensor => QuantizeScale::Tensor,
            ScaledBy::Head => QuantizeScale::Head,
            ScaledBy::Token => QuantizeScale::Token,
        };
        let call = Quantize {
            scale,
            rotate: self.shape.rows == Rows::Rotated,
            ..Quantize::new(self.x.view()?)
        };
        let out = QuantizeOutputMut {
            codes: self.codes.view_mut(),
            scale: self.scale.as_mut().map(Tensor::view_mut),
            mean: None,
        };
        Ok((call, out))
    }

    fn problem(&mut self, kernel: Option<&Kernel>) -> Result<QuantizeProblem> {
        let codes = self.shape.codes;
        Ok(self.call(kernel)?.0.problem(codes)?)
    }

    /// Codes, and scales that are chosen.
    fn written(&self, stream: &Stream) -> Result<Vec<Array>> {
        let tensors = [Some(&self.codes), self.scale.as_ref()].into_iter().flatten();
        tensors.map(|tensor| Ok(Array::download(tensor, stream)?)).collect()
    }

    /// What the CPU writes.
    fn expected(&self) -> Result<Vec<Array>> {
        let stream = Device::cpu().stream()?;
        let x = Placed::new(self.x.host().clone(), &stream)?;
        let mut exact = Self::of(self.shape, x, &stream)?;
        exact.launch(None, &stream)?;
        exact.written(&stream)
    }
}

impl Operands for QuantizeOperands {
    launched!(quantize::accepts);

    fn outputs(&mut self, _kernel: Option<&Kernel>) -> Vec<(&'static str, &mut Tensor)> {
        let scale = self.scale.as_mut().map(|scale| ("scale", scale));
        [("codes", &mut self.codes)].into_iter().chain(scale).collect()
    }

    fn compare(
        &self,
        _results: &[Array],
        _seed: u64,
        _progress: Progress<'_>,
    ) -> Result<Vec<Comparison>> {
        Ok(Vec::new()) // codes are right or wrong
    }

    /// Compares bit by bit with what the CPU makes of the same numbers.
    fn verify(
        &mut self,
        kernel: Option<&'static Kernel>,
        stream: &Stream,
        _seed: u64,
    ) -> Result<(bool, f64)> {
        self.reset(kernel, stream)?;
        self.launch(kernel, stream)?;
        let passed = self.written(stream)? == self.expected()?;
        Ok((passed, if passed { 0.0 } else { f64::INFINITY }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_numbers_are_not_verified() {
        let stream = Device::cpu().stream().unwrap();
        for (scale, rows) in [(ScaledBy::Given, Rows::Plain), (ScaledBy::Token, Rows::Rotated)] {
            let shape = QuantizeShape {
                batch: 2,
                seqlen: 30,
                num_heads: 3,
                head_dim: 16,
                scale,
                rows,
                dtype: DType::BF16,
                codes: DType::I8,
            };
            let mut operands = QuantizeOperands::new(shape, &stream, 5).unwrap();
            assert_eq!(operands.verify(None, &stream, 5).unwrap(), (true, 0.0));
            operands.codes.fill_bytes(&stream, 1).unwrap();
            assert_ne!(operands.written(&stream).unwrap(), operands.expected().unwrap());
        }
    }
}
