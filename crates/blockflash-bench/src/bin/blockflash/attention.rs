//! `blockflash attention`.

use crate::args::Window;
use crate::attention_args::{Args, MaskName};
use crate::attention_operands::Operands;
use crate::attention_result::{check, details, flops};
use crate::failure::{Failure, Result};
use crate::measure;
use crate::operand::Placed;
use crate::output::{RunReport, print};
use blockflash_bench::io::Array;
use blockflash_ops::attention::{accepts, select};
use blockflash_ops::{
    Align, Attention, AttentionProblem, CuSeqlens, DType, Device, Kernel, Mask, Operation, Tensor,
    View,
};
use blockflash_sys::manifest;
use std::process::ExitCode;

/// Runs attention once, checks and times it.
pub fn run(args: Args) -> Result<ExitCode> {
    let outputs = args.outputs()?;
    let device = args.common.device.open()?;
    args.tuning.load(&device)?;
    let stream = device.stream()?;

    let operands = Operands::new(&args)?;
    let Operands { q, k, v, sink, packed } = &operands;
    let place = |array| Placed::new(array, &stream);
    let [placed_q, placed_k, placed_v] = [place(q)?, place(k)?, place(v)?];
    let placed_sink = sink.as_ref().map(place).transpose()?;
    let offsets = match packed {
        Some(packed) => {
            Some((packed.longest(), place(&packed.offsets[0])?, place(&packed.offsets[1])?))
        }
        None => None,
    };
    let cu_seqlens = match &offsets {
        Some(([max_seqlen_q, max_seqlen_kv], q, kv)) => Some(CuSeqlens {
            q: q.view()?,
            kv: kv.view()?,
            max_seqlen_q: *max_seqlen_q,
            max_seqlen_kv: *max_seqlen_kv,
        }),
        None => None,
    };
    let attention = Attention {
        sink: placed_sink.as_ref().map(Placed::view).transpose()?,
        cu_seqlens,
        ..call(&args, [placed_q.view()?, placed_k.view()?, placed_v.view()?])?
    };
    attention.check_cu_seqlens(&stream)?;
    let lengths = packed.as_ref().map(|packed| &packed.lengths);
    let block_mask = args.block_mask.load(&attention.problem()?, lengths, args.common.seed)?;
    let placed_mask = block_mask.as_ref().map(|mask| mask.to(&stream)).transpose()?;
    let attention = Attention { block_mask: placed_mask.as_ref(), ..attention };
    let with_lse = outputs.has("lse") || args.common.check;
    let problem = attention.problem()?;
    let problem = if with_lse { problem.with_lse() } else { problem };
    let kernel = kernel(args.kernel.as_deref(), &problem, &device)?;

    let mut o = Tensor::empty(&stream, problem.dtype, q.shape())?;
    let lse_shape = match *q.shape() {
        [rows, heads, _] => vec![heads, rows],
        _ => vec![problem.batch, problem.num_heads_q, problem.seqlen_q],
    };
    let mut lse = with_lse.then(|| Tensor::empty(&stream, DType::F32, &lse_shape)).transpose()?;
    let mut forward = || {
        let (o, lse) = (o.view_mut(), lse.as_mut().map(Tensor::view_mut));
        match kernel.filter(|_| args.kernel.is_some()) {
            Some(kernel) => attention.run_with(kernel, (o, lse), &stream)?,
            None => attention.forward_into(o, lse, &stream)?,
        }
        Ok(())
    };
    let first_us = measure::first("attention", &stream, &mut forward)?;
    let timing =
        measure::repeat("attention, again", &stream, first_us, args.common.repeat, forward)?;

    let (mut written, mut checks) = (Vec::new(), Vec::new());
    if outputs.has("o") || with_lse {
        let o = Array::download(&o, &stream)?;
        let lse = lse.as_ref().map(|lse| Array::download(lse, &stream)).transpose()?;
        let results = [Some(("o", &o)), lse.as_ref().map(|lse| ("lse", lse))];
        written = outputs.save(&results.into_iter().flatten().collect::<Vec<_>>())?;
        if let (Some(lse), true) = (&lse, args.common.check) {
            let (mask, seed) = (block_mask.as_ref(), args.common.seed);
            checks = check(&operands, &problem, mask, [&o, lse], seed)?;
        }
    }

    let report = RunReport {
        operation: "attention",
        device: &device,
        note: args.common.device.note(&device),
        kernel,
        tensors: [("q", q), ("k", k), ("v", v)]
            .map(|(name, array)| (name, array.shape().to_vec(), problem.dtype))
            .to_vec(),
        details: details(&operands, &problem, block_mask.as_ref()),
        flops: flops(&operands, &problem, block_mask.as_ref())?,
        timing,
        checks,
        written,
    };
    print(&report.render(args.common.json)?)?;
    Ok(report.exit_code())
}

/// The call that the options describe, without sink, sequences and block mask.
pub fn call<'a>(args: &Args, [q, k, v]: [View<'a>; 3]) -> Result<Attention<'a>> {
    Ok(Attention {
        mask: mask(args.mask, args.scores.window, args.block_mask.token_mask())?,
        softmax_scale: args.scores.scale,
        softcap: args.scores.softcap,
        ..Attention::new(q, k, v)
    })
}

/// The kernel that computes the problem, `None` on the CPU: the first one whose name contains
/// `name`, or the selected one.
fn kernel(
    name: Option<&str>,
    problem: &AttentionProblem,
    device: &Device,
) -> Result<Option<&'static Kernel>> {
    let Some(gpu) = device.cuda_properties().filter(|_| !problem.is_empty()) else {
        return match name {
            Some(_) => {
                Err(Failure::new("--kernel names a GPU kernel, but this is not computed on a GPU"))
            }
            None => Ok(None),
        };
    };
    let Some(name) = name else { return Ok(Some(select(problem, gpu)?)) };
    let mut kernels = manifest::kernels().iter().filter(|kernel| kernel.symbol().contains(name));
    kernels.find(|kernel| accepts(kernel, problem, gpu).is_ok()).map(Some).ok_or_else(|| {
        Failure::new(format!("no kernel whose name contains {name} computes this on this GPU"))
    })
}

/// The token mask; `of_words` is what the words of a block mask say of it.
pub fn mask(name: Option<MaskName>, window: Option<Window>, of_words: Mask) -> Result<Mask> {
    let name =
        name.unwrap_or(if of_words == Mask::Full { MaskName::Full } else { MaskName::Causal });
    let align = if name == MaskName::CausalTopLeft { Align::TopLeft } else { Align::BottomRight };
    Ok(match (name, window) {
        (MaskName::Full, None) => Mask::Full,
        (MaskName::Full, Some(Window { left, right })) => Mask::Window { left, right, align },
        (_, None) => Mask::Causal { align },
        (_, Some(Window { left, right: None | Some(0) })) => {
            Mask::Window { left, right: Some(0), align }
        }
        (_, Some(Window { right: Some(right), .. })) => {
            return Err(Failure::new(format!(
                "--window with {right} keys after the query contradicts a causal --mask: the \
                 right side must be 0 or -"
            )));
        }
    })
}
