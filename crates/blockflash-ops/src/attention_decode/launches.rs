//! The launches of a call, in their order.

use super::AttentionDecodeProblem;
use super::plan::{AttentionDecodePlan, plan, plan_few, workspace_bytes};
use super::prefill::{PrefillPlan, plan_prefill};
use super::select::{is_many, others, select};
use crate::Result;
use crate::kv_append::{self, AppendKvPlan, AppendKvProblem};
use blockflash_safe::{
    AttentionDecodeOperands, AttentionDecodeScalars, CodesDecode, CudaProperties, Device,
    Launch as _, LaunchConfig, Stream,
};
use blockflash_sys::manifest::{self, Variant};
use blockflash_sys::{Kernel, Target};

/// The launches of a call, for sequences with many queries and for the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned<'k> {
    pub(super) many: Option<(&'k Kernel, PrefillPlan)>,
    pub(super) few: Option<(&'k Kernel, AttentionDecodePlan)>,
}

/// All launches of a call as plain data, in their order.
#[derive(Clone, Copy, Debug)]
pub struct Launches {
    /// Bytes of workspace that they need.
    pub(super) workspace_bytes: usize,
    /// The append and the turning of queries.
    pub(super) first_step: Option<(&'static Kernel, AppendKvPlan)>,
    /// `None` if no query attends.
    pub(super) attention: Option<Planned<'static>>,
}

impl Launches {
    /// Those of a kernel and a problem that it accepts on this GPU.
    pub(super) fn of(
        kernel: &'static Kernel,
        problem: &AttentionDecodeProblem,
        gpu: &CudaProperties,
    ) -> Result<Launches> {
        let attends = !problem.attention.is_empty();
        Ok(Launches {
            workspace_bytes: workspace_bytes(kernel, problem, gpu)?,
            first_step: problem.first_step(kernel.target, gpu)?,
            attention: attends.then(|| plan_all(kernel, problem, gpu)).transpose()?,
        })
    }

    pub(super) fn kernels(&self) -> Vec<&'static Kernel> {
        let first = self.first_step.map(|(kernel, _)| kernel);
        let Some(Planned { many, few }) = self.attention else {
            return first.into_iter().collect();
        };
        let combine = many.and_then(|(_, plan)| plan.combine).map(|(kernel, _)| kernel);
        let (many, few) = (many.map(|(kernel, _)| kernel), few.map(|(kernel, _)| kernel));
        [first, many, combine, few].into_iter().flatten().collect()
    }
}

impl AttentionDecodeProblem {
    /// The append and the turning of queries, if there are any, with a kernel that is compiled for
    /// the same target as that of the attention.
    pub(super) fn first_step(
        &self,
        target: Target,
        gpu: &CudaProperties,
    ) -> Result<Option<(&'static Kernel, AppendKvPlan)>> {
        let append = self.append.filter(|append| !append.is_empty());
        let rotary = self.rotary.filter(|_| !self.attention.is_empty());
        if append.is_none() && rotary.is_none() {
            return Ok(None);
        }
        let append =
            append.unwrap_or_else(|| AppendKvProblem::nothing(self.cache, self.attention.types.q));
        let kernel = kv_append::select_for(target, &append, gpu)?;
        let queries = rotary.map(|rotary| (&self.attention, rotary));
        Ok(Some((kernel, kv_append::plan_with(kernel, &append, queries, gpu)?)))
    }

    /// Bytes of workspace on a device.
    pub(super) fn workspace_bytes(&self, device: &Device) -> Result<usize> {
        match device.cuda_properties() {
            Some(gpu) if !self.is_empty() => workspace_bytes(select(self, gpu)?, self, gpu),
            _ => Ok(0),
        }
    }
}

/// Plans the launches of a kernel and a problem that it accepts on this GPU.
///
/// # Errors
/// As [`plan_prefill`] and [`plan`](super::plan()).
pub(super) fn plan_all<'k>(
    kernel: &'k Kernel,
    problem: &AttentionDecodeProblem,
    gpu: &CudaProperties,
) -> Result<Planned<'k>> {
    if !is_many(kernel) {
        return Ok(Planned { many: None, few: Some((kernel, plan(kernel, problem, gpu)?)) });
    }
    let few = match others(kernel, problem, gpu)? {
        None => None,
        Some((kernel, most)) => Some((kernel, plan_few(kernel, problem, gpu, most)?)),
    };
    Ok(Planned { many: Some((kernel, plan_prefill(kernel, problem, gpu)?)), few })
}

/// Queues the launch of a kernel that splits keys.
pub(super) fn launch_few(
    kernel: &'static Kernel,
    config: &LaunchConfig,
    scalars: &AttentionDecodeScalars,
    operands: AttentionDecodeOperands<'_>,
    stream: &Stream,
) -> Result<()> {
    match kernel.variant {
        Variant::AttentionDecodeHopper(_) => {
            stream.launch::<manifest::AttentionDecodeHopper>(kernel, config, scalars, operands)
        }
        Variant::AttentionLatent(_) => {
            stream.launch::<manifest::AttentionLatent>(kernel, config, scalars, operands)
        }
        Variant::AttentionLatentHopper(_) => {
            stream.launch::<manifest::AttentionLatentHopper>(kernel, config, scalars, operands)
        }
        _ if CodesDecode::of(kernel).is_some() => {
            stream.launch::<CodesDecode>(kernel, config, scalars, operands)
        }
        _ => stream.launch::<manifest::AttentionDecode>(kernel, config, scalars, operands),
    }?;
    Ok(())
}
