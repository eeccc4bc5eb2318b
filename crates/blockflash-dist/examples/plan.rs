//! Prints how attention over 8 to 1024 GPUs is divided best, and what remains of the time of one
//! GPU: a table of Markdown, by length of the sequence.
//!
//! ```sh
//! cargo run --release -p blockflash-dist --example plan -- [heads of q] [heads of k] [backward]
//! ```
//!
//! The rates are those of hosts with eight H200: NVLink as NCCL was measured between GPUs of one
//! host (252 to 266 GB/s per direction for messages of 256 MB), 400 Gb/s per GPU between hosts at
//! nine tenths of it, and attention at 550 TFLOP/s.

use blockflash_dist::{Machine, Pass, Workload};
use blockflash_ops::Mask;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| match arguments.next() {
        None => default,
        Some(text) => text.parse().expect("a number of heads"),
    };
    let (num_heads_q, num_heads_kv) = (number(32), number(8));
    let pass = match arguments.next().as_deref() {
        None => Pass::Forward,
        Some("backward") => Pass::Backward,
        Some(other) => panic!("{other} is no pass"),
    };
    println!("{num_heads_q} heads of q, {num_heads_kv} of k, head_dim 128, causal, {pass:?}\n");
    println!("| rows | GPUs | scheme | compute ms | exchange ms | exposed ms | scaling |");
    println!("|---:|---:|---|---:|---:|---:|---:|");
    for seqlen in (15..=23).step_by(2).map(|power| 1 << power) {
        for ranks in [8, 16, 64, 256, 1024] {
            let workload = Workload {
                batch: 1,
                seqlen,
                num_heads_q,
                num_heads_kv,
                head_dim: 128,
                element_bytes: 2,
                mask: Mask::causal(),
                density: None,
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
            println!(
                "| {seqlen} | {ranks} | {} | {:.2} | {:.2} | {:.2} | {:.2} |",
                best.scheme,
                best.compute * 1e3,
                best.exchange * 1e3,
                best.exposed * 1e3,
                best.scaling()
            );
        }
    }
}
