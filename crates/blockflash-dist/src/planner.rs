use crate::Scheme;
use blockflash_ops::Mask;
use std::fmt;

/// A call over several ranks, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    /// Batch entries.
    pub batch: usize,
    /// Rows of the whole sequence.
    pub seqlen: usize,
    /// Heads of q.
    pub num_heads_q: usize,
    /// Heads of k and v.
    pub num_heads_kv: usize,
    /// Elements of a row of a head.
    pub head_dim: usize,
    /// Bytes of an element.
    pub element_bytes: usize,
    /// The mask of the whole sequence.
    pub mask: Mask,
    /// The forward or the backward pass.
    pub pass: Pass,
}

/// How much of the work of a dense call is left under a block mask.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Density {
    /// Of the pairs of queries and keys that the token mask leaves, the visited ones: 0 to 1.
    pub pairs: f64,
    /// Of the rows of keys of other ranks that a dense call needs, those that a rank receives: 0 to
    /// 1.
    pub keys: f64,
}

/// Which pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Output and log-sum-exp.
    Forward,
    /// The gradients.
    Backward,
}

/// Ranks and their measured rates.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Number of ranks.
    pub ranks: usize,
    /// Ranks of one host, which follow each other.
    pub ranks_per_host: usize,
    /// FLOPs per second that one rank reaches in the pass, counting visited pairs of queries and
    /// keys.
    pub flops: f64,
    /// Bytes per second that one rank copies in its own memory, each byte read and written.
    pub copies: f64,
    /// Bytes per second that one rank sends to another one of its host.
    pub link: f64,
    /// Bytes per second that one rank sends to one of another host.
    pub network: f64,
    /// Seconds that an exchange takes beyond its bytes.
    pub latency: f64,
}

/// How long a scheme is expected to take, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The scheme.
    pub scheme: Scheme,
    /// Attention, and the work in memory that one device would not have.
    pub compute: f64,
    /// All exchanges one after another.
    pub exchange: f64,
    /// The part of the exchanges that no computation hides.
    pub exposed: f64,
    /// Attention on one device, divided by the number of ranks.
    pub ideal: f64,
}

impl Forecast {
    /// Seconds from the beginning to the end.
    pub fn total(&self) -> f64 {
        self.compute + self.exposed
    }

    /// The time of one device, divided by the number of ranks times their time: 1 is perfect.
    pub fn scaling(&self) -> f64 {
        self.ideal / self.total()
    }
}

impl fmt::Display for Forecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |seconds: f64| seconds * 1e3;
        write!(
            f,
            "{}: compute {:.2} ms, exchange {:.2} ms of which {:.2} ms are exposed, scaling {:.2}",
            self.scheme,
            ms(self.compute),
            ms(self.exchange),
            ms(self.exposed),
            self.scaling()
        )
    }
}

impl Workload {
    /// Every scheme that fits, the fastest one first; of equally fast ones the one with more heads.
    ///
    /// ```
    /// # use blockflash_dist::{Machine, Pass, Workload};
    /// # use blockflash_ops::Mask;
    /// let workload = Workload {
    ///     batch: 1,
    ///     seqlen: 131072,
    ///     num_heads_q: 32,
    ///     num_heads_kv: 8,
    ///     head_dim: 128,
    ///     element_bytes: 2,
    ///     mask: Mask::causal(),
    ///     pass: Pass::Forward,
    /// };
    /// let machine = Machine {
    ///     ranks: 16,
    ///     ranks_per_host: 8,
    ///     flops: 600e12,
    ///     copies: 1.9e12,
    ///     link: 250e9,
    ///     network: 45e9,
    ///     latency: 50e-6,
    /// };
    /// let forecasts = workload.forecasts(&machine);
    /// assert_eq!(forecasts[0].scheme.heads, 1, "{}", forecasts[0]);
    /// ```
    pub fn forecasts(&self, machine: &Machine) -> Vec<Forecast> {
        let schemes = Scheme::all(machine.ranks, self.num_heads_kv).into_iter();
        let fits =
            |scheme: &Scheme| self.num_heads_q.is_multiple_of(scheme.heads) && self.takes(scheme);
        let mut forecasts: Vec<_> =
            schemes.filter(fits).map(|scheme| self.forecast(scheme, machine)).collect();
        forecasts.sort_by(|a, b| a.total().total_cmp(&b.total()));
        forecasts
    }

    /// Whether the mask allows the scheme.
    fn takes(&self, scheme: &Scheme) -> bool {
        scheme.keys == 1 || matches!(self.mask, Mask::Full | Mask::Causal { .. })
    }

    fn forecast(&self, scheme: Scheme, machine: &Machine) -> Forecast {
        let ranks = machine.ranks as f64;
        let (groups, members) = (scheme.keys as f64, scheme.heads as f64);
        let rows = (self.batch * self.seqlen) as f64 / ranks;
        let bytes = |heads: usize| rows * (heads * self.head_dim * self.element_bytes) as f64;
        let (q, k) = (bytes(self.num_heads_q), bytes(self.num_heads_kv));
        let ideal = self.flops() / machine.flops / ranks;

        // Rows for heads, before and after attention; a copy packs what is sent, one places it.
        let moved = match self.pass {
            Pass::Forward => 2.0 * q + 2.0 * k,
            Pass::Backward => 4.0 * q + 4.0 * k,
        };
        let inside = members.min(machine.ranks_per_host as f64);
        let [near, far] = [inside - 1.0, members - inside].map(|peers| moved * peers / members);
        let mut heads = (near / machine.link).max(far / machine.network);
        let mut copied = 0.0;
        if scheme.heads > 1 {
            heads += 2.0 * machine.latency;
            copied += 2.0 * moved / machine.copies;
        }

        // Keys and values, and in the backward pass their gradients, once for each other group.
        let rate =
            if machine.ranks > machine.ranks_per_host { machine.network } else { machine.link };
        let keys = 2.0 * k / rate + machine.latency;
        let step = match self.pass {
            Pass::Forward => keys,
            Pass::Backward => 2.0 * keys,
        };
        let mut exposed = heads;
        if scheme.keys > 1 {
            let hidden = ideal / groups;
            exposed += (groups - 1.0) * (step - hidden).max(0.0);
            if self.pass == Pass::Backward {
                // The last gradients have nothing behind which to hide.
                exposed += keys;
            }
            // Parts are written in place of results, then all of them are read.
            let parts = if self.is_causal() { (groups + 1.0) * 0.75 } else { groups };
            let merged = match self.pass {
                Pass::Forward => q,
                Pass::Backward => q + 2.0 * k,
            };
            copied += 0.5 * merged * (parts + 1.0) / machine.copies;
        }
        let exchange = heads + (groups - 1.0) * step;
        Forecast { scheme, compute: ideal + copied, exchange, exposed, ideal }
    }

    fn is_causal(&self) -> bool {
        !matches!(self.mask, Mask::Full)
    }

    /// FLOPs of the visited pairs: two products in the forward pass, five in the backward pass.
    fn flops(&self) -> f64 {
        let seqlen = self.seqlen as f64;
        let pairs = match self.mask {
            Mask::Full => seqlen * seqlen,
            Mask::Causal { .. } => seqlen * (seqlen + 1.0) / 2.0,
            _ => self.mask.visited_pairs(self.seqlen, self.seqlen) as f64,
        };
        let products = if self.pass == Pass::Forward { 2.0 } else { 5.0 };
        2.0 * products * pairs * (self.batch * self.num_heads_q * self.head_dim) as f64
    }
}
