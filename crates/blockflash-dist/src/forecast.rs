//! The time of a scheme, from what every rank does in every step.

use crate::band::Part;
use crate::grid::{Grid, Scheme};
use crate::pattern::{Pattern, check_offsets};
use crate::plan::union;
use crate::{Density, Forecast, Machine, Pass, Shard, Workload};

/// The part of a GPU's SMs that an exchange takes from attention beside it: up to 32 CTAs of NCCL
/// on 132 within a host, 8 over a network.
const EXCHANGING: [f64; 2] = [0.24, 0.06];

/// What a group does in one step: pairs of queries and keys, rows of keys, rows of gradients.
#[derive(Clone, Copy, Default)]
struct Step {
    pairs: f64,
    keys: f64,
    gradients: f64,
    sent_keys: f64,
    sent_gradients: f64,
}

/// The slowest rank; `None` for a scheme that does not take the call.
pub(crate) fn forecast(
    workload: &Workload<'_>,
    scheme: Scheme,
    machine: &Machine,
) -> Option<Forecast> {
    let Workload { seqlen, batch, .. } = *workload;
    if let Some(offsets) = workload.cu_seqlens {
        let one = batch == 1 && workload.density.is_none();
        check_offsets(offsets, seqlen).ok().filter(|()| one)?;
    }
    let pattern = Pattern::of(workload.mask, seqlen, workload.cu_seqlens)?;
    if workload.density.is_some() && scheme.keys > 1 && !pattern.band.is_simple() {
        return None;
    }
    let shard = Shard::new(seqlen, machine.ranks, 0).ok()?;
    let grid = Grid { scheme, shard };
    let density = workload.density.unwrap_or(Density { pairs: 1.0, keys: 1.0 });
    let backward = workload.pass == Pass::Backward;

    // Two products in the forward pass, five in the backward pass.
    let products = if backward { 5.0 } else { 2.0 };
    let width = (batch * workload.head_dim) as f64;
    let compute = |pairs: f64, heads: f64| {
        2.0 * products * pairs * density.pairs * width * heads / machine.flops
    };
    let whole = shard.of(1, 0);
    let all = pattern.parts(&whole, &whole).iter().map(Part::pairs).sum();
    let ranks = machine.ranks as f64;
    let ideal = compute(all, workload.num_heads_q as f64) / ranks;

    // Rows for heads, before and after attention; a copy packs what is sent, one places it.
    let (groups, members) = (scheme.keys as f64, scheme.heads as f64);
    let heads_q = workload.num_heads_q as f64 / members;
    let [q, k] = [workload.num_heads_q, workload.num_heads_kv]
        .map(|heads| width * (heads * workload.element_bytes) as f64 / members);
    let rows = seqlen as f64 / groups;
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
        let (steps, parts) = steps(&grid, &pattern, group);
        let computed: Vec<f64> = steps.iter().map(|step| compute(step.pairs, heads_q)).collect();
        let keys = |step: &Step| exchange(step.keys, step.sent_keys);
        let keys: Vec<f64> = steps.iter().map(keys).collect();
        let gradients = |step: &Step| match backward {
            true => exchange(step.gradients, step.sent_gradients),
            false => 0.0,
        };
        let gradients: Vec<f64> = steps.iter().map(gradients).collect();
        let mut copied = copied;
        if scheme.keys > 1 {
            // Parts are written in place of results, then all of them are read.
            let [queries, keys] = parts.map(|parts| 0.5 * (parts + rows) / machine.copies);
            copied += queries * q + if backward { keys * 2.0 * k } else { 0.0 };
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
    // Every group of up to 1024, and a sample of more.
    let groups = (0..scheme.keys).step_by(scheme.keys.div_ceil(1024));
    groups.map(forecast).max_by(|a, b| a.total().total_cmp(&b.total()))
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
