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

    /// A scaled score after the cap, and the slope of the cap there, in f64.
    pub(crate) fn exact(self, score: f64) -> [f64; 2] {
        self.softcap.map(f64::from).map_or([score, 1.0], |cap| {
            let tanh = (score / cap).tanh();
            [cap * tanh, 1.0 - tanh * tanh]
        })
    }

    /// The same in f32.
    pub(crate) fn plain(self, score: f32) -> [f32; 2] {
        self.softcap.map_or([score, 1.0], |cap| {
            let tanh = (score / cap).tanh();
            [cap * tanh, 1.0 - tanh * tanh]
        })
    }
}
