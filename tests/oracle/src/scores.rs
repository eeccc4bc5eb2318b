//! What happens to a score.

/// How scores are made of products.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// Factor of the products.
    pub scale: f32,
    /// Scores become `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// A score that joins the sum of exponentials and has no value; -inf is none.
    pub sink: Option<f32>,
}

impl Scores {
    /// Without a sink.
    pub fn new(scale: f32, softcap: Option<f32>) -> Self {
        Self { scale, softcap, sink: None }
    }

    /// The sink, if it counts.
    pub(crate) fn sink(self) -> Option<f32> {
        self.sink.filter(|&sink| sink != f32::NEG_INFINITY)
    }

    /// A scaled score after the cap and what is added, and the slope of the cap there, in f64.
    pub(crate) fn exact(self, score: f64, added: Added) -> [f64; 2] {
        let [capped, slope] = self.softcap.map(f64::from).map_or([score, 1.0], |cap| {
            let tanh = (score / cap).tanh();
            [cap * tanh, 1.0 - tanh * tanh]
        });
        let [bias, alibi] = added.terms();
        [capped + bias + alibi, slope]
    }

    /// The same in f32.
    pub(crate) fn plain(self, score: f32, added: Added) -> [f32; 2] {
        let [capped, slope] = self.softcap.map_or([score, 1.0], |cap| {
            let tanh = (score / cap).tanh();
            [cap * tanh, 1.0 - tanh * tanh]
        });
        let Added { bias, slope: of_distance, distance } = added;
        [capped + bias - of_distance * distance as f32, slope]
    }
}

/// What is added to the score of a pair: `bias - slope · distance`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Added {
    /// The element of the bias.
    pub bias: f32,
    /// The slope of ALiBi.
    pub slope: f32,
    /// How far the key is from the one at which the query stands, aligned at the last of both.
    pub distance: u64,
}

impl Added {
    /// The distance of a query and a key of a sequence of these lengths.
    pub fn distance(query: usize, key: usize, [seqlen_q, seqlen_kv]: [usize; 2]) -> u64 {
        let aligned = query as i128 + seqlen_kv as i128 - seqlen_q as i128;
        aligned.abs_diff(key as i128) as u64
    }

    /// The two terms.
    fn terms(self) -> [f64; 2] {
        [f64::from(self.bias), -f64::from(self.slope) * self.distance as f64]
    }

    /// The size of the larger one that is finite.
    pub(crate) fn size(self) -> f64 {
        self.terms().map(f64::abs).into_iter().filter(|x| x.is_finite()).fold(0.0, f64::max)
    }
}
