//! The smallest launch of attention.

use crate::common::{ramp, required, say};
use blockflash_safe::manifest::{self, AttentionFwd, Variant};
use blockflash_safe::params::{BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_scores, blockflash_window};
use blockflash_safe::{
    AttentionFwdOperands, AttentionFwdPlan, AttentionScalars, DType, Device, Kernel, LaunchConfig,
    Result, ScoreTerms, Stream, Tensor,
};
use half::f16;
use std::f32::consts::{LN_2, LOG2_E};
use std::ptr;

const HEAD_DIM: usize = 64;

/// Rows that this GPU can run and whose image is there.
pub(crate) fn rows(device: &Device) -> impl Iterator<Item = &'static Kernel> {
    let gpu = device.cuda_properties().cloned().unwrap();
    manifest::kernels().iter().filter(move |row| {
        row.target.runs_on(gpu.compute_capability)
            && row.smem_bytes() <= gpu.smem_per_block
            && blockflash_sys::image::load(row).is_ok()
    })
}

/// Attention of one query to one key: the output is the value, the lse the score.
pub(crate) struct Single {
    row: &'static Kernel,
    pub(crate) config: LaunchConfig,
    plan: AttentionFwdPlan,
    pub(crate) qkv: [Tensor; 3],
    pub(crate) o: Tensor,
    lse: Tensor,
}

impl Single {
    pub(crate) fn new(stream: &Stream) -> Result<Option<Single>> {
        let row = rows(stream.device()).find(|row| {
            let wide = |tile: AttentionFwd| tile.head_dims.qk >= HEAD_DIM;
            matches!(row.variant, Variant::AttentionFwd(t) if wide(t) && t.types.q == DType::F16)
        });
        let Some(row) = row else {
            assert!(!required(), "no image of attention forward runs on this GPU");
            say("SKIPPED (no image): attention");
            return Ok(None);
        };
        let shape = [1, 1, 1, HEAD_DIM];
        let input = |value: f32| {
            let data: Vec<f16> =
                ramp(HEAD_DIM).into_iter().map(|x| f16::from_f32(x / 64.0 * value)).collect();
            Tensor::from_slice(stream, &data, &shape)
        };
        let scores = blockflash_scores {
            sink: ptr::null(),
            scale: 0.125,
            softcap: 0.0,
            scale_log2: 0.125 * LOG2_E,
            inverse_scale_log2: 8.0 * LN_2,
            scale_over_cap: 0.0,
            window: blockflash_window {
                left: BLOCKFLASH_WINDOW_UNBOUNDED,
                right: BLOCKFLASH_WINDOW_UNBOUNDED,
                align_bottom_right: 0,
            },
        };
        let scalars = AttentionScalars { scores, longest: [0; 2], blocks: [0; 2] };
        let plan = AttentionFwdPlan { scalars, heads_per_section: 0 };
        let config = LaunchConfig::of(row, 1, false);
        let qkv = [input(1.0)?, input(1.0)?, input(-2.0)?];
        let o = Tensor::zeros(stream, DType::F16, &shape)?;
        let lse = Tensor::zeros(stream, DType::F32, &[1, 1, 1])?;
        Ok(Some(Single { row, config, plan, qkv, o, lse }))
    }

    pub(crate) fn launch(&mut self, stream: &Stream) -> Result<()> {
        let [q, k, v] = &self.qkv;
        let operands = AttentionFwdOperands {
            q: q.view(),
            k: k.view(),
            v: v.view(),
            o: self.o.view_mut(),
            lse: Some(self.lse.view_mut()),
            sink: None,
            cu_seqlens: None,
            block_mask: None,
            terms: ScoreTerms::default(),
            scales: [None; 3],
        };
        stream.launch::<AttentionFwd>(self.row, &self.config, &self.plan, operands)
    }

    pub(crate) fn check(&self, stream: &Stream) -> Result<()> {
        let [q, k, v] = &self.qkv;
        assert_eq!(self.o.to_vec::<f16>(stream)?, v.to_vec::<f16>(stream)?);
        let (q, k) = (q.to_vec::<f16>(stream)?, k.to_vec::<f16>(stream)?);
        let score: f32 =
            0.125 * q.iter().zip(&k).map(|(q, k)| q.to_f32() * k.to_f32()).sum::<f32>();
        let lse = self.lse.to_vec::<f32>(stream)?[0];
        approx::assert_abs_diff_eq!(lse, score, epsilon = 1e-3);
        Ok(())
    }
}
