//! The time of a scheme, from what every rank does in every step.

use crate::band::Part;
use crate::grid::Grid;
use crate::pattern::{Pattern, check_offsets};
use crate::plan::{PARTS, is_worth_gathering, union};
use crate::planner::{Density, Forecast, Machine, Pass, Workload};
use crate::{Scheme, Shard};

/// The part of a GPU's SMs that an exchange takes from attention beside it: up to 32 CTAs of NCCL
/// on 132 within a host, 8 over a network.
const EXCHANGING: [f64; 2] = [0.24, 0.06];

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

/// What a group does in one step: pairs of queries and keys, rows of keys, rows of gradients.
#[derive(Clone, Copy, Default)]
struct Step {
    pairs: f64,
    keys: f64,
    gradients: f64,
    sent_keys: f64,
    sent_gradients: f64,
}

/// A call, and how it is divided.
struct Divided<'a> {
    workload: &'a Workload<'a>,
    machine: &'a Machine,
    grid: Grid,
    pattern: Pattern<'a>,
    density: Density,
}

impl<'a> Divided<'a> {
    /// `None` for a scheme that does not take the call.
    fn new(workload: &'a Workload<'a>, scheme: Scheme, machine: &'a Machine) -> Option<Self> {
        let Workload { seqlen, batch, .. } = *workload;
        if let Some(offsets) = workload.cu_seqlens {
            let one = batch == 1 && workload.density.is_none();
            check_offsets(offsets, seqlen).ok().filter(|()| one)?;
        }
        let pattern = Pattern::of(workload.mask, seqlen, workload.cu_seqlens)?;
        if workload.density.is_some() && scheme.keys > 1 && !pattern.band.is_simple() {
            return None;
        }
        let grid = Grid { scheme, shard: Shard::new(seqlen, machine.ranks, 0).ok()? };
        let density = workload.density.unwrap_or(Density { pairs: 1.0, keys: 1.0 });
        Some(Divided { workload, machine, grid, pattern, density })
    }

    fn is_backward(&self) -> bool {
        self.workload.pass == Pass::Backward
    }

    /// Seconds of attention: two products in the forward pass, five in the backward pass.
    fn attention(&self, pairs: f64, heads: f64) -> f64 {
        let products = if self.is_backward() { 5.0 } else { 2.0 };
        let width = (self.workload.batch * self.workload.head_dim) as f64;
        2.0 * products * pairs * self.density.pairs * width * heads / self.machine.flops
    }

    /// Attention on one device, divided by the number of ranks.
    fn ideal(&self) -> f64 {
        let whole = self.grid.shard.of(1, 0);
        let pairs = self.pattern.parts(&whole, &whole).iter().map(Part::pairs).sum();
        self.attention(pairs, self.workload.num_heads_q as f64) / self.machine.ranks as f64
    }

    /// Bytes of a row, of all entries of the batch, of this many heads.
    fn row(&self, heads: usize) -> f64 {
        let Workload { batch, head_dim, element_bytes, .. } = *self.workload;
        (batch * head_dim) as f64 * (heads * element_bytes) as f64
    }

    /// Seconds in which rows of parts are written in place of results, and then all of them read.
    fn merge(&self, parts: f64, row: f64) -> f64 {
        let rows = self.workload.seqlen as f64 / self.grid.scheme.keys as f64;
        0.5 * (parts + rows) * row / self.machine.copies
    }

    /// The slowest one of the groups: of every one of up to 1024, and of a sample of more.
    fn slowest(&self, forecast: impl Fn(usize) -> Forecast) -> Option<Forecast> {
        let groups = self.grid.scheme.keys;
        let groups = (0..groups).step_by(groups.div_ceil(1024));
        groups.map(forecast).max_by(|a, b| a.total().total_cmp(&b.total()))
    }
}

/// The slowest rank; `None` for a scheme that does not take the call.
fn forecast(workload: &Workload<'_>, scheme: Scheme, machine: &Machine) -> Option<Forecast> {
    let call = Divided::new(workload, scheme, machine)?;
    let (backward, density, ideal) = (call.is_backward(), call.density, call.ideal());

    // Rows for heads, before and after attention; a copy packs what is sent, one places it.
    let (groups, members) = (scheme.keys as f64, scheme.heads as f64);
    let heads_q = workload.num_heads_q as f64 / members;
    let [q, k] =
        [workload.num_heads_q, workload.num_heads_kv].map(|heads| call.row(heads) / members);
    let rows = workload.seqlen as f64 / groups;
    let moved = (if backward { 4.0 } else { 2.0 }) * rows * (q + k);
    let inside = members.min(machine.ranks_per_host as f64);
    let [near, far] = [inside - 1.0, members - inside].map(|peers| moved * peers / members);
    let mut heads = (near / machine.link).max(far / machine.network);
    let mut copied = 0.0;
    if scheme.heads > 1 {
        heads += 2.0 * machine.latency;
        copied = 2.0 * moved / machine.copies;
    }

    // Keys and values, and in the backward pass their gradients, once for each other group.
    let (link, taken) = match machine.ranks > machine.ranks_per_host {
        false => (machine.link, EXCHANGING[0]),
        true => (machine.network, EXCHANGING[1]),
    };
    let exchange = |received: f64, sent: f64| match received.max(sent) {
        0.0 => 0.0,
        rows => rows * density.keys * 2.0 * k / link + machine.latency,
    };
    let forecast = |group: usize| {
        let (steps, parts) = steps(&call.grid, &call.pattern, group);
        let computed: Vec<f64> =
            steps.iter().map(|step| call.attention(step.pairs, heads_q)).collect();
        let keys = |step: &Step| exchange(step.keys, step.sent_keys);
        let keys: Vec<f64> = steps.iter().map(keys).collect();
        let gradients = |step: &Step| match backward {
            true => exchange(step.gradients, step.sent_gradients),
            false => 0.0,
        };
        let gradients: Vec<f64> = steps.iter().map(gradients).collect();
        let mut copied = copied;
        if scheme.keys > 1 {
            let [queries, keys] = parts;
            copied += call.merge(queries, q);
            copied += if backward { call.merge(keys, 2.0 * k) } else { 0.0 };
        }
        let sent: f64 = steps
            .iter()
            .map(|step| step.sent_keys + if backward { step.sent_gradients } else { 0.0 })
            .sum();
        let attention: f64 = computed.iter().sum();
        Forecast {
            scheme,
            compute: attention + copied,
            sent_bytes: moved * (members - 1.0) / members + sent * density.keys * 2.0 * k,
            exchange: heads + keys.iter().sum::<f64>() + gradients.iter().sum::<f64>(),
            exposed: heads + (end(&computed, &keys, &gradients, taken) - attention).max(0.0),
            ideal,
        }
    };
    call.slowest(forecast)
}

/// The same where keys of all ranks are gathered; `None` where they are not.
fn forecast_gathered(workload: &Workload<'_>, machine: &Machine) -> Option<Forecast> {
    let scheme = Scheme { heads: 1, keys: machine.ranks };
    let call = Divided::new(workload, scheme, machine)?;
    let Workload { num_heads_q, num_heads_kv, seqlen, .. } = *workload;
    let one_host = (2..=machine.ranks_per_host).contains(&machine.ranks);
    if !one_host || call.is_backward() || num_heads_kv == 0 {
        return None;
    }
    let (ranks, ideal) = (machine.ranks as f64, call.ideal());
    // All ranks have as much room as the one with the most rows, and all parts as the first one.
    let room = (0..machine.ranks).map(|rank| call.grid.rows_of(rank).rows()).max()? as f64;
    let parts = num_heads_kv.min(PARTS);
    let heads = num_heads_kv.div_ceil(parts);
    let sent = (ranks - 1.0) * room * 2.0 * call.row(heads);
    let gather = sent / machine.link + machine.latency;
    let groups: Vec<_> =
        (0..machine.ranks).map(|group| steps(&call.grid, &call.pattern, group)).collect();
    let coming = groups.iter().flat_map(|(steps, _)| steps).map(|step| step.keys).sum::<f64>();
    if !is_worth_gathering(coming * call.density.keys, ranks * (ranks - 1.0) * room) {
        return None;
    }
    let forecast = |group: usize| {
        let (steps, [merged, _]) = &groups[group];
        let attention = |steps: &[Step]| {
            let pairs = steps.iter().map(|step| step.pairs).sum();
            call.attention(pairs, num_heads_q as f64)
        };
        let (own, others) = steps.split_at(1);
        let (own, others) = (attention(own), attention(others));
        // Keys of this rank are copied to the window, as if that came before attention. On GPUs it
        // takes few SMs beside it, so the forecast is a little too long.
        let place = seqlen as f64 / ranks * 2.0 * call.row(num_heads_kv) / machine.copies;
        let mut end = own;
        for part in 0..parts {
            let heads = heads.min(num_heads_kv - part * heads) as f64;
            end = end.max((part + 1) as f64 * gather) + others * heads / num_heads_kv as f64;
        }
        Forecast {
            scheme,
            compute: own + others + call.merge(*merged, call.row(num_heads_q)) + place,
            sent_bytes: parts as f64 * sent,
            exchange: parts as f64 * gather,
            exposed: (end - own - others).max(0.0),
            ideal,
        }
    };
    call.slowest(forecast)
}

/// The steps of a group, and how many rows the parts of its outputs and of the gradients of its
/// keys have.
fn steps(grid: &Grid, pattern: &Pattern<'_>, group: usize) -> (Vec<Step>, [f64; 2]) {
    let (own, groups) = (grid.rows_of(group), grid.scheme.keys);
    let mut parts = [0.0; 2];
    let attended = |parts: &[Part]| parts.iter().map(|part| part.keys.len() as f64).sum::<f64>();
    let come = |parts: &[Part]| {
        let keys = union(parts.iter().map(|part| part.keys.clone()).collect());
        keys.iter().map(|rows| rows.len() as f64).sum::<f64>()
    };
    let step = |t: usize| {
        let received = pattern.parts(&own, &grid.rows_of((group + groups - t) % groups));
        let sent = pattern.parts(&grid.rows_of((group + t) % groups), &own);
        parts[0] += received.iter().map(|part| part.queries.len() as f64).sum::<f64>();
        parts[1] += attended(&sent);
        let pairs = received.iter().map(Part::pairs).sum();
        match t {
            0 => Step { pairs, ..Step::default() },
            _ => Step {
                pairs,
                keys: come(&received),
                gradients: attended(&sent),
                sent_keys: come(&sent),
                sent_gradients: attended(&received),
            },
        }
    };
    let is_used = |(t, step): &(usize, Step)| {
        *t == 0 || step.pairs + step.sent_keys + step.sent_gradients > 0.0
    };
    let steps = (0..groups).map(step).enumerate().filter(is_used);
    (steps.map(|(_, step)| step).collect(), parts)
}

/// When the last computation and the last exchange end. The keys of a step come while the one
/// before it is computed, with the gradients of the one before that.
fn end(computed: &[f64], keys: &[f64], gradients: &[f64], taken: f64) -> f64 {
    let of = |times: &[f64], t: usize| times.get(t).copied().unwrap_or(0.0);
    let mut ended = 0.0;
    for t in 0..=computed.len() {
        let computing = of(computed, t);
        let exchanging = of(keys, t + 1) + t.checked_sub(1).map_or(0.0, |t| of(gradients, t));
        ended += exchanging.max(computing + taken * exchanging.min(computing));
    }
    ended
}
