use blockflash_ops::{E4M3, E5M2};
use blockflash_sys::DType;
use half::{bf16, f16};
use ndarray::ArrayD;
use rayon::prelude::*;
use std::fmt;

/// Element type in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stored {
    F16,
    Bf16,
    F32,
    F64,
    I32,
    I64,
    Bool,
    E4m3,
    E5m2,
    I8,
}

impl Stored {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Stored::Bool | Stored::E4m3 | Stored::E5m2 | Stored::I8 => 1,
            Stored::F16 | Stored::Bf16 => 2,
            Stored::F32 | Stored::I32 => 4,
            Stored::F64 | Stored::I64 => 8,
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stored::F16 => "f16",
            Stored::Bf16 => "bf16",
            Stored::F32 => "f32",
            Stored::F64 => "f64",
            Stored::I32 => "i32",
            Stored::I64 => "i64",
            Stored::Bool => "bool",
            Stored::E4m3 => "e4m3",
            Stored::E5m2 => "e5m2",
            Stored::I8 => "i8",
        })
    }
}

/// An array of one of the types that kernels take.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Values {
    F16(ArrayD<f16>),
    Bf16(ArrayD<bf16>),
    F32(ArrayD<f32>),
    I32(ArrayD<i32>),
    U8(ArrayD<u8>),
    E4m3(ArrayD<E4M3>),
    E5m2(ArrayD<E5M2>),
    I8(ArrayD<i8>),
}

/// Element type in memory: f16, bf16, f32, i32, u8, e4m3, e5m2 or i8.
pub trait Scalar: blockflash_ops::Element + Default {
    /// The largest magnitude of a number above 0.
    const LIMIT: f64;
    /// Rounded to nearest even.
    fn from_f32(value: f32) -> Self;
    /// Rounded once, to nearest even.
    fn from_f64(value: f64) -> Self;
    /// Exact for the types that fit into f32; i32 is rounded.
    fn to_f32(self) -> f32;
    /// The variant of `Values` for this type.
    fn wrap(values: ArrayD<Self>) -> Values;
}

macro_rules! scalar {
    ($type:ty, $variant:ident, $limit:expr, $from32:expr, $from64:expr, $to:expr) => {
        impl Scalar for $type {
            const LIMIT: f64 = $limit;
            fn from_f32(value: f32) -> Self {
                $from32(value)
            }
            fn from_f64(value: f64) -> Self {
                $from64(value)
            }
            fn to_f32(self) -> f32 {
                $to(self)
            }
            fn wrap(values: ArrayD<Self>) -> Values {
                Values::$variant(values)
            }
        }
    };
}
scalar!(f16, F16, 65504.0, f16::from_f32, f16::from_f64, f16::to_f32);
scalar!(bf16, Bf16, 3.3895313892515355e38, bf16::from_f32, bf16::from_f64, bf16::to_f32);
scalar!(f32, F32, f32::MAX as f64, |value| value, |value| value as f32, |value| value);
scalar!(i32, I32, i32::MAX as f64, |value| value as i32, |value| value as i32, |value| value
    as f32);
scalar!(E4M3, E4m3, E4M3::MAX as f64, E4M3::from_f32, |x| E4M3::from_f32(once(x)), E4M3::to_f32);
scalar!(E5M2, E5m2, E5M2::MAX as f64, E5M2::from_f32, |x| E5M2::from_f32(once(x)), E5M2::to_f32);
scalar!(
    i8,
    I8,
    128.0,
    |x: f32| x.round_ties_even() as i8,
    |x: f64| x.round_ties_even() as i8,
    f32::from
);
scalar!(u8, U8, u8::MAX as f64, |value| value as u8, |value| value as u8, f32::from);

/// f32 with whose rounding to fewer bits `value` is rounded once: of an inexact one the last bit is
/// set.
fn once(value: f64) -> f32 {
    let nearest = value as f32;
    let (wide, magnitude) = (f64::from(nearest), nearest.abs().to_bits());
    if wide == value || !nearest.is_finite() || value.is_nan() {
        return nearest;
    }
    let toward_zero = if wide.abs() > value.abs() { magnitude - 1 } else { magnitude };
    f32::from_bits(toward_zero | 1).copysign(nearest)
}

/// Why a piece of a file could not be converted.
#[derive(Debug, PartialEq)]
pub(super) enum Refusal {
    /// Integers where numbers with a fraction are wanted, or the reverse.
    Kind,
    /// Position in the piece, and value.
    Range(usize, f64),
}

/// Converts little-endian elements; finite values beyond the range of `T` are refused, infinities
/// and NaN are kept.
pub(super) fn convert<T: Scalar>(
    stored: Stored,
    bytes: &[u8],
    out: &mut [T],
) -> Result<(), Refusal> {
    const PIECE: usize = 1 << 14;
    let integers = matches!(stored, Stored::I32 | Stored::I64 | Stored::Bool | Stored::I8);
    let fits = match T::DTYPE {
        DType::I32 => integers,
        // Codes, of which other numbers are no multiples.
        DType::I8 => stored == Stored::I8,
        // It has no room for negative numbers.
        DType::U8 => false,
        _ => !integers,
    };
    if !fits {
        return Err(Refusal::Kind);
    }
    let pieces = out.par_chunks_mut(PIECE).zip(bytes.par_chunks(PIECE * stored.size())).enumerate();
    let refusals = pieces.map(|(piece, (out, bytes))| match convert_piece(stored, bytes, out) {
        Err(Refusal::Range(at, value)) => Err(Refusal::Range(piece * PIECE + at, value)),
        result => result,
    });
    // The leftmost refusal, whichever thread found one first.
    refusals.reduce(|| Ok(()), |left, right| left.and(right))
}

fn convert_piece<T: Scalar>(stored: Stored, bytes: &[u8], out: &mut [T]) -> Result<(), Refusal> {
    match stored {
        Stored::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32(), T::from_f32, f64::from),
        Stored::Bf16 => {
            each(bytes, out, |b| bf16::from_le_bytes(b).to_f32(), T::from_f32, f64::from)
        }
        Stored::F32 => each(bytes, out, f32::from_le_bytes, T::from_f32, f64::from),
        Stored::F64 => each(bytes, out, f64::from_le_bytes, T::from_f64, |value| value),
        Stored::I32 => {
            each(bytes, out, i32::from_le_bytes, |value| T::from_f64(value.into()), f64::from)
        }
        Stored::E4m3 => each(bytes, out, |[b]| E4M3(b).to_f32(), T::from_f32, f64::from),
        Stored::E5m2 => each(bytes, out, |[b]| E5M2(b).to_f32(), T::from_f32, f64::from),
        Stored::I8 => {
            each(bytes, out, i8::from_le_bytes, |value| T::from_f32(value.into()), f64::from)
        }
        Stored::Bool => {
            each(bytes, out, |[b]| b != 0, |value| T::from_f64(value.into()), f64::from)
        }
        Stored::I64 => each(
            bytes,
            out,
            i64::from_le_bytes,
            |value| T::from_f64(value as f64),
            |value| value as f64,
        ),
    }
}

fn each<T: Scalar, S: Copy, const N: usize>(
    bytes: &[u8],
    out: &mut [T],
    decode: impl Fn([u8; N]) -> S,
    round: impl Fn(S) -> T,
    magnitude: impl Fn(S) -> f64,
) -> Result<(), Refusal> {
    let (elements, _) = bytes.as_chunks::<N>();
    for (at, (out, &element)) in out.iter_mut().zip(elements).enumerate() {
        let value = decode(element);
        let exact = magnitude(value);
        // Integers have one more below 0.
        let least = if T::DTYPE == DType::I32 { -T::LIMIT - 1.0 } else { -T::LIMIT };
        if exact.is_finite() && (exact > T::LIMIT || exact < least) {
            return Err(Refusal::Range(at, exact));
        }
        *out = round(value);
    }
    Ok(())
}
