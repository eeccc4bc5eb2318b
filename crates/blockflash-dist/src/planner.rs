use crate::Scheme;
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
