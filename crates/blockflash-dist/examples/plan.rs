//! Prints how attention over 8 to 1024 GPUs is divided best, and what remains of the time of one
//! GPU: a table of Markdown, by length of the sequence.
//!
//! ```sh
//! cargo run --release -p blockflash-dist --example plan -- [heads of q] [heads of k] \
//!     [backward] [window=4096] [blocks=0.1,0.3]
//! ```
//!
//! `window` is the number of keys that a query sees, `blocks` the density of a block mask: visited
//! pairs, and keys of other ranks that come.
//!
//! The last column is what keys over all GPUs of one host take that copy engines gather
//! (`Nccl::gathering`), in the forward pass. All of it is a model and not measured.
//!
//! The rates are those of hosts with eight H200: NVLink as NCCL was measured between GPUs of one
//! host (252 to 266 GB/s per direction for messages of 256 MB), 400 Gb/s per GPU between hosts at
//! nine tenths of it, and attention at 550 TFLOP/s.

use blockflash_dist::{Density, Machine, Pass, Workload};
use blockflash_ops::{Align, Mask};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| match arguments.next() {
        None => default,
        Some(text) => text.parse().expect("a number of heads"),
    };
    let (num_heads_q, num_heads_kv) = (number(32), number(8));
    let (mut pass, mut mask, mut density) = (Pass::Forward, Mask::causal(), None);
    for argument in arguments {
        match argument.split_once('=') {
            None if argument == "backward" => pass = Pass::Backward,
            Some(("window", keys)) => {
                let left = Some(keys.parse::<usize>().expect("a number of keys") - 1);
                mask = Mask::Window { left, right: Some(0), align: Align::TopLeft };
            }
            Some(("blocks", shares)) => {
                let share = |text: &str| text.parse().expect("a share of 0 to 1");
                let (pairs, keys) = shares.split_once(',').expect("two shares");
                density = Some(Density { pairs: share(pairs), keys: share(keys) });
            }
            _ => panic!("{argument} is no pass, window or density"),
        }
    }
    println!("{num_heads_q} heads of q, {num_heads_kv} of k, head_dim 128, {mask:?}, {pass:?}\n");
    println!(
        "| rows | GPUs | scheme | compute ms | sent MB | exchange ms | exposed ms | scaling | \
         gathered: exposed ms, scaling |"
    );
    println!("|---:|---:|---|---:|---:|---:|---:|---:|---|");
    for seqlen in (15..=23).step_by(2).map(|power| 1 << power) {
        for ranks in [8, 16, 64, 256, 1024] {
            let workload = Workload {
                batch: 1,
                seqlen,
                num_heads_q,
                num_heads_kv,
                head_dim: 128,
                element_bytes: 2,
                mask,
                density,
                cu_seqlens: None,
                pass,
            };
            let machine = Machine {
                ranks,
                ranks_per_host: 8,
                flops: 550e12,
                copies: 1.9e12,
                link: 260e9,
                network: 45e9,
                latency: 50e-6,
            };
            let best = workload.forecasts(&machine)[0];
            let gathered = workload.gathered(&machine).map_or("–".into(), |gathered| {
                format!("{:.2}, {:.2}", gathered.exposed * 1e3, gathered.scaling())
            });
            println!(
                "| {seqlen} | {ranks} | {} | {:.2} | {:.1} | {:.2} | {:.2} | {:.2} | {gathered} |",
                best.scheme,
                best.compute * 1e3,
                best.sent_bytes * 1e-6,
                best.exchange * 1e3,
                best.exposed * 1e3,
                best.scaling()
            );
        }
    }
}
