//! The rounding errors that a correct computation is free to make: floors below which no error is a
//! mistake. The command's `--check` and the tests of the workspace share them.
//!
//! A tensor core adds a few products to an f32 accumulator at once. It aligns all addends to the
//! largest one, cuts off everything below 24 bits and one or two extra bits, adds, and truncates
//! the sum to 24 bits. Ampere and Ada add 8 products with one extra bit, Hopper and Blackwell 16
//! with two (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ
//! Computer Science 7:e330, 2021; Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores",
//! arXiv:2512.07004, 2025). With S the largest of the partial sums and products, such an addition
//! loses at most
//!
//! - 16 · 2^-25 · S by aligning 16 products and 2^-23 · S by cutting off the sum: 5 · 2^-23 · S for
//!   16 products on Hopper;
//! - 8 · 2^-24 · S + 2^-23 · S = 5 · 2^-23 · S for 8 products on Ampere. A truncation loses half of
//!   its bound on average, and the mean of hundreds of them does not stray from that unless the low
//!   bits of all products are alike: 5 · 2^-23 · S for 16 products there as well.
//!
//! Of 8-bit floating-point types Hopper adds 32 products at once and keeps 13 fraction bits
//! (`code_row.rs`): aligning 32 products and the sum loses at most 33 · 2^-13 · S, half of it on
//! average ([`CODE_TRUNCATION`]). Products with values are promoted: the additions to one sum are
//! those of a tile of up to 128 keys, four, however many tiles there are.
//!
//! Truncation is towards zero, so the losses of a sum of equal signs add up instead of cancelling:
//! the error grows with the number of additions and not with its square root. A CPU, which rounds
//! to nearest, stays far below.

use crate::code_row::CODE_PRODUCTS;
use blockflash_sys::DType;

/// Number of products for which a tensor core loses at most [`TRUNCATION`].
pub const PRODUCTS: usize = 16;
/// Largest relative loss of a partial sum while a tensor core adds [`PRODUCTS`] products to it.
pub const TRUNCATION: f64 = 5.0 / (1 << 23) as f64;

/// The relative loss of a partial sum, on average, while a tensor core adds 32 products of e4m3.
pub const CODE_TRUNCATION: f64 = 33.0 / (1 << 14) as f64;

/// The largest relative error of one rounding: 2⁻⁴ for e4m3, 2⁻¹¹ for f16, 2⁻⁸ for bf16, 2⁻²⁴ for
/// f32.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::E4M3 => 2f64.powi(-4),
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// The largest absolute error of one rounding among the subnormal numbers, which matters for f16
/// and e4m3 alone.
pub fn subnormal_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::E4M3 => 2f64.powi(-10),
        DType::F16 => 2f64.powi(-25),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// A sum of products in f64.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductSum {
    /// The sum.
    pub sum: f64,
    /// Sum of the squares of the products.
    pub squares: f64,
}

impl ProductSum {
    /// Adds a product.
    pub fn add(&mut self, product: f64) {
        self.sum += product;
        self.squares += product * product;
    }
}

/// The sizes that a sum of products goes through, addition by addition.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartialSums {
    additions: usize,
    sizes: f64,
    before: ProductSum,
}

impl PartialSums {
    /// Ends an addition of a tensor core: after [`PRODUCTS`] products, or after fewer at the end.
    /// are.
    pub fn settle(&mut self, now: ProductSum) {
        // The norm of the products is at least the largest of them.
        let products = (now.squares - self.before.squares).sqrt();
        self.sizes += self.before.sum.abs().max(now.sum.abs()).max(products);
        self.additions += 1;
        self.before = now;
    }

    /// Mean over all additions of the size to which the addends are aligned; for products of one
    /// sign, about half of the sum.
    pub fn mean(&self) -> f64 {
        self.sizes / self.additions.max(1) as f64
    }
}

/// The size of an element, or the norm of several elements' sizes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Size of the exact value.
    pub exact: f64,
    /// Root of the sum of squares of the terms that were added up.
    pub magnitude: f64,
    /// Size of the partial sums in a tensor core, on average ([`PartialSums::mean`]).
    pub partial: f64,
}

/// The roundings that a correct computation is free to make.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Type of the output, whose values are rounded once.
    pub output: DType,
    /// Type of the probabilities, if there are any; they are rounded once.
    pub factor: Option<DType>,
    /// Whether the rows that these factors multiply may be parallel. The errors of the factors are
    /// the same for all elements of a row of the result. Where those rows point in all directions,
    /// the norm is an average over the elements; where they are parallel, it is a single draw.
    pub parallel: bool,
    /// Absolute error of the exponents of the probabilities.
    pub exponent: f64,
    /// Number of f32 roundings outside of tensor cores, in the epilogue.
    pub steps: usize,
    /// Number of additions of [`PRODUCTS`] products each in the longest sum of a tensor core.
    pub additions: usize,
    /// Relative loss of a partial sum in each of them: [`TRUNCATION`].
    pub truncation: f64,
}

impl Rounding {
    /// The rounding of sums of `products` products in f32, followed by `steps` operations of the
    /// epilogue and the rounding of the output.
    pub fn of_products(products: usize, steps: usize, output: DType) -> Self {
        let additions = products.div_ceil(PRODUCTS);
        let (parallel, exponent, truncation) = (false, 0.0, TRUNCATION);
        Self { output, factor: None, parallel, exponent, steps, additions, truncation }
    }

    /// The rounding of attention over codes in e4m3 by tiles of this many keys, of which there are
    /// `tiles`: probabilities are rounded to e4m3, sums of a tile are added in f32.
    pub fn of_codes(tile: usize, tiles: usize, output: DType) -> Self {
        let additions = tile.div_ceil(CODE_PRODUCTS);
        let (factor, truncation) = (Some(DType::E4M3), CODE_TRUNCATION);
        // The epilogue multiplies with the scale, too.
        Self { factor, additions, truncation, ..Self::of_products(0, 2 + tiles, output) }
    }

    /// The floor of the largest error of values with these sizes.
    pub fn largest(&self, sizes: Sizes) -> f64 {
        self.floor(sizes, [1.0; 2]) + subnormal_roundoff(self.output)
    }

    /// The floor of the norm of the errors of several elements, from the norms of their sizes.
    pub fn norm(&self, sizes: Sizes, elements: usize) -> f64 {
        let deviation = 3f64.sqrt().recip();
        // A single draw stays within three standard deviations.
        let of_factors = if self.parallel { 3.0 * deviation } else { deviation };
        self.floor(sizes, [deviation, of_factors])
            + subnormal_roundoff(self.output) * (elements as f64).sqrt()
    }

    /// `parts` of the largest error of a rounding count for the result and for the factors.
    fn floor(&self, Sizes { exact, magnitude, partial }: Sizes, parts: [f64; 2]) -> f64 {
        let factor = self.factor.map_or(0.0, unit_roundoff);
        let epilogue = self.steps as f64 * unit_roundoff(DType::F32);
        parts[0] * unit_roundoff(self.output) * exact
            + parts[1] * factor * magnitude
            + self.exponent * magnitude
            + epilogue * exact.max(magnitude)
            + self.additions as f64 * self.truncation * partial
    }
}
