use crate::Scheme;
use crate::forecast::{forecast, forecast_gathered};
use blockflash_ops::Mask;
use std::fmt;

/// A call over several ranks, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload<'a> {
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
    /// What a block mask leaves, if there is one: see
    /// [`DistributedBlockMask::density`](crate::DistributedBlockMask::density).
    pub density: Option<Density>,
    /// Where the sequences of a packed batch begin and end in its `seqlen` rows: see
    /// [`DistributedAttention::cu_seqlens`](crate::DistributedAttention::cu_seqlens).
    pub cu_seqlens: Option<&'a [i32]>,
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

/// How long a scheme is expected to take, in seconds, and what it sends: on the slowest rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Forecast {
    /// The scheme.
    pub scheme: Scheme,
    /// Attention, and the work in memory that one device would not have.
    pub compute: f64,
    /// Bytes that a rank sends.
    pub sent_bytes: f64,
    /// All exchanges one after another.
    pub exchange: f64,
    /// The part of the exchanges that no computation hides, and what the others take from the SMs
    /// of computation beside them.
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
            "{}: compute {:.2} ms, exchange {:.2} MB in {:.2} ms of which {:.2} ms are exposed, \
             scaling {:.2}",
            self.scheme,
            ms(self.compute),
            self.sent_bytes * 1e-6,
            ms(self.exchange),
            ms(self.exposed),
            self.scaling()
        )
    }
}

impl Workload<'_> {
    /// Every scheme that takes the call, the fastest one first; of equally fast ones the one with
    /// more heads. None for a sequence that no [`Shard`](crate::Shard) has, and for a packed batch
    /// that is refused.
    ///
    /// The work and the exchanges of each step are counted from what every rank does under the
    /// mask. Printed, a forecast says why it comes where it does.
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
    ///     density: None,
    ///     cu_seqlens: None,
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
    /// // Heads within a host, keys between both.
    /// assert_eq!(forecasts[0].scheme.to_string(), "heads over 8, keys over 2");
    /// ```
    pub fn forecasts(&self, machine: &Machine) -> Vec<Forecast> {
        let schemes = Scheme::all(machine.ranks, self.num_heads_kv).into_iter();
        let fits = |scheme: &Scheme| self.num_heads_q.is_multiple_of(scheme.heads);
        let forecast = |scheme| forecast(self, scheme, machine);
        let mut forecasts: Vec<_> = schemes.filter(fits).filter_map(forecast).collect();
        forecasts.sort_by(|a, b| a.total().total_cmp(&b.total()));
        forecasts
    }

    /// Keys over all ranks of one host, which [`Nccl::gathering`](crate::Nccl::gathering) gathers
    /// in the forward pass. `None` where it would not: over several hosts, for gradients, where
    /// less than half of the keys would travel otherwise, and where
    /// [`forecasts`](Self::forecasts) has no such scheme.
    ///
    /// This is a model. Copy engines gather the heads in two parts, one after another, at the rate
    /// and with the latency of [`Machine`], and take no SM. Attention of a rank's own keys hides
    /// the first part, that of the keys in the first part the second one; the rest is exposed.
    /// Before that, a rank copies its keys within its memory. As in the other forecasts, attention
    /// has one rate in calls of any size, and launches take no time.
    ///
    /// Measured on four H100 with NVLink (32 heads of q and k, head_dim 128, bf16, causal), beside
    /// what follows from the rates of those runs (copies at 1.48 TB/s, which their forecasts of
    /// steps imply): 32768 rows took 4.09 ms, repeated 3.78, forecast 3.4, and by steps 4.42 and
    /// 4.15, forecast 3.5; 131072 rows 54.9 and 54.5, forecast 52.4, and by steps 55.6 and 55.1,
    /// forecast 54.1.
    pub fn gathered(&self, machine: &Machine) -> Option<Forecast> {
        forecast_gathered(self, machine)
    }
}
