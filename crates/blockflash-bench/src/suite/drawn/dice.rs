//! A generator whose numbers depend on nothing but its seed.

/// SplitMix64 (Steele, Lea and Flood, 2014), of which an integer is drawn at a time.
pub(super) struct Dice(u64);

impl Dice {
    /// A sequence of its own for each pair of numbers.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed);
        dice.0 = dice.next() ^ stream;
        Self(dice.next())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// One of `0..count`, all equally likely but for 2⁻⁴⁴ of it and less.
    pub(super) fn below(&mut self, count: usize) -> usize {
        ((u128::from(self.next()) * count as u128) >> 64) as usize
    }

    /// Whether it is the one case of `count`.
    pub(super) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// One of these, of which there is at least one.
    pub(super) fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// A number between these, both of them at least 1 and included: each octave is as likely as
    /// any other, as far as it is between them, and within it each number.
    pub(super) fn log(&mut self, least: usize, most: usize) -> usize {
        let most = most.max(least);
        let (first, last) = (least.ilog2(), most.ilog2());
        loop {
            let octave: usize = 1 << (first as usize + self.below((last - first + 1) as usize));
            let number = octave + self.below(octave);
            if (least..=most).contains(&number) {
                return number;
            }
        }
    }
}
