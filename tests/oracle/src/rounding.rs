//! What a correct computation is free to round: the floors below which no error is a mistake. The
//! checks of the command and the tests of the workspace share them.
//!
//! A tensor core adds a few products to an f32 accumulator at once. It aligns all addends to the
//! largest of them, cuts off what lies below 24 bits and one or two extra ones, adds, and cuts the
//! sum off to 24 bits. Ampere and Ada add 8 products with one extra bit, Hopper and Blackwell 16
//! with two (Fasi, Higham, Mikaitis and Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ
//! Computer Science 7:e330, 2021; Khattak and Mikaitis, "Accurate models of NVIDIA tensor cores",
//! arXiv:2512.07004, 2025). With S the largest of partial sums and products, such an addition loses
//! at most
//!
//! - 16 · 2^-25 · S by aligning 16 products and 2^-23 · S by cutting off the sum: 5 · 2^-23 · S for
//!   16 products on Hopper;
//! - 8 · 2^-24 · S + 2^-23 · S = 5 · 2^-23 · S for 8 products on Ampere. A truncation loses half of
//!   its bound on average, and the mean of hundreds of them does not stray from that unless the low
//!   bits of all products are alike: 5 · 2^-23 · S for 16 products there as well.
//!
//! Truncation is towards zero, so losses of sums of one sign add up instead of cancelling: the
//! error grows like the number of additions and not like its root. Rounding to nearest, as a CPU
//! does it, stays far below.

use blockflash_sys::DType;

/// Products for which a tensor core loses at most [`TRUNCATION`].
pub const PRODUCTS: usize = 16;
/// What a tensor core loses of a partial sum while it adds [`PRODUCTS`] products to it.
pub const TRUNCATION: f64 = 5.0 / (1 << 23) as f64;

/// The largest relative error of one rounding: 2⁻¹¹ for f16, 2⁻⁸ for bf16, 2⁻²⁴ for f32.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// The largest absolute error of one rounding among the subnormal numbers; it matters for f16
/// alone.
pub fn subnormal_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-25),
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// A sum of products in f64.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProductSum {
    /// The sum.
    pub sum: f64,
    /// Of the squares of the products.
    pub squares: f64,
}

impl ProductSum {
    /// Adds a product.
    pub fn add(&mut self, product: f64) {
        self.sum += product;
        self.squares += product * product;
    }
}

/// How large a sum of products is on the way.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartialSums {
    additions: usize,
    sizes: f64,
    before: ProductSum,
}

impl PartialSums {
    /// An addition of a tensor core ends here: due after [`PRODUCTS`] products, or as many as there
    /// are.
    pub fn settle(&mut self, now: ProductSum) {
        // The root is at least the largest of the products.
        let products = (now.squares - self.before.squares).sqrt();
        self.sizes += self.before.sum.abs().max(now.sum.abs()).max(products);
        self.additions += 1;
        self.before = now;
    }

    /// Mean size of what is aligned in an addition: for products of one sign about half of the sum.
    pub fn mean(&self) -> f64 {
        self.sizes / self.additions.max(1) as f64
    }
}

/// How large an element is, or the norm of several.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sizes {
    /// Of the exact value.
    pub exact: f64,
    /// Of the root of the sum of squares of the terms that were added up.
    pub magnitude: f64,
    /// Of the partial sums in a tensor core, on average ([`PartialSums::mean`]).
    pub partial: f64,
}

/// What a correct computation is free to round.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    /// Type of the output: its values are rounded once.
    pub output: DType,
    /// Type of the probabilities, when there are any: they are rounded once.
    pub factor: Option<DType>,
    /// Absolute error of the exponents of the probabilities.
    pub exponent: f64,
    /// Roundings in f32 on the way, outside of tensor cores: those of the epilogue.
    pub steps: usize,
    /// Additions of [`PRODUCTS`] products each in the longest sum of a tensor core.
    pub additions: usize,
}

impl Rounding {
    /// Of sums of so many products in f32: the sum, then so many operations of the epilogue, then
    /// the output.
    pub fn of_products(products: usize, steps: usize, output: DType) -> Self {
        let additions = products.div_ceil(PRODUCTS);
        Self { output, factor: None, exponent: 0.0, steps, additions }
    }

    /// The floor of the largest error of values of these sizes.
    pub fn largest(&self, sizes: Sizes) -> f64 {
        self.floor(sizes, 1.0) + subnormal_roundoff(self.output)
    }

    /// The floor of the norm of the errors of so many elements, from the norms of their sizes.
    pub fn norm(&self, sizes: Sizes, elements: usize) -> f64 {
        self.floor(sizes, 3f64.sqrt().recip())
            + subnormal_roundoff(self.output) * (elements as f64).sqrt()
    }

    fn floor(&self, Sizes { exact, magnitude, partial }: Sizes, of_a_rounding: f64) -> f64 {
        let factor = self.factor.map_or(0.0, unit_roundoff);
        let epilogue = self.steps as f64 * unit_roundoff(DType::F32);
        of_a_rounding * (unit_roundoff(self.output) * exact + factor * magnitude)
            + self.exponent * magnitude
            + epilogue * exact.max(magnitude)
            + self.additions as f64 * TRUNCATION * partial
    }
}
