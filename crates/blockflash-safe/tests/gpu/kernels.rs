use crate::{gpu, ramp, required, say};
use blockflash_safe::manifest::{self, AttentionFwd, Variant};
use blockflash_safe::params::{
    BLOCKFLASH_WINDOW_UNBOUNDED, blockflash_attention_fwd_params, blockflash_block_mask,
};
use blockflash_safe::{
    AttentionFwdOperands, DType, Device, Error, Kernel, LaunchConfig, Result, Stream, Tensor,
    param_bytes,
};
use half::f16;
use std::ptr;

const HEAD_DIM: usize = 64;

/// Rows that this GPU can run and whose image is there.
fn rows(device: &Device) -> impl Iterator<Item = &'static Kernel> {
    let gpu = device.cuda_properties().cloned().unwrap();
    manifest::kernels().iter().filter(move |row| {
        row.target.runs_on(gpu.compute_capability)
            && row.smem_bytes() <= gpu.smem_per_block
            && blockflash_sys::image::load(row).is_ok()
    })
}

#[test]
fn every_embedded_kernel_loads() -> Result<()> {
    let Some(device) = gpu("every_embedded_kernel_loads") else { return Ok(()) };
    for row in rows(&device) {
        let info = device.preload(row)?;
        assert_eq!(Some(info.param_bytes), param_bytes(row), "{}", row.symbol());
        assert!(info.max_threads >= row.threads(), "{}: {info:?}", row.symbol());
        assert!(
            info.registers > 0 && info.static_smem_bytes + info.dynamic_smem_bytes <= 227 * 1024,
            "{info:?}"
        );
        assert_eq!(device.preload(row)?, info);
    }
    Ok(())
}

#[test]
fn images_for_other_gpus_are_refused() {
    let Some(device) = gpu("images_for_other_gpus_are_refused") else { return };
    let capability = device.cuda_properties().unwrap().compute_capability;
    for row in manifest::kernels().iter().filter(|row| !row.target.runs_on(capability)) {
        assert!(matches!(device.preload(row), Err(Error::Unsupported { .. })), "{}", row.symbol());
    }
}

/// Attention of one query to one key: the output is the value, the lse the score.
struct Single {
    row: &'static Kernel,
    config: LaunchConfig,
    params: blockflash_attention_fwd_params,
    qkv: [Tensor; 3],
    o: Tensor,
    lse: Tensor,
}

impl Single {
    fn new(stream: &Stream) -> Result<Option<Single>> {
        let row = rows(stream.device()).find(|row| {
            let wide = |tile: AttentionFwd| tile.head_dim as usize >= HEAD_DIM;
            matches!(row.variant, Variant::AttentionFwd(t) if wide(t) && t.dtype == DType::F16)
        });
        let Some(row) = row else {
            assert!(!required(), "no image of attention forward runs on this GPU");
            say("SKIPPED (no image): attention");
            return Ok(None);
        };
        let shape = [1, 1, 1, HEAD_DIM];
        let stride = HEAD_DIM as i64;
        let input = |value: f32| {
            let data: Vec<f16> =
                ramp(HEAD_DIM).into_iter().map(|x| f16::from_f32(x / 64.0 * value)).collect();
            Tensor::from_slice(stream, &data, &shape)
        };
        let params = blockflash_attention_fwd_params {
            q: ptr::null(),
            k: ptr::null(),
            v: ptr::null(),
            o: ptr::null_mut(),
            lse: ptr::null_mut(),
            sink: ptr::null(),
            cu_seqlens_q: ptr::null(),
            cu_seqlens_kv: ptr::null(),
            q_stride_batch: stride,
            q_stride_seq: stride,
            q_stride_head: stride,
            k_stride_batch: stride,
            k_stride_seq: stride,
            k_stride_head: stride,
            v_stride_batch: stride,
            v_stride_seq: stride,
            v_stride_head: stride,
            o_stride_batch: stride,
            o_stride_seq: stride,
            o_stride_head: stride,
            lse_stride_batch: 1,
            lse_stride_head: 1,
            batch: 1,
            num_heads_q: 1,
            num_heads_kv: 1,
            seqlen_q: 1,
            seqlen_kv: 1,
            total_q: 0,
            total_kv: 0,
            head_dim: HEAD_DIM as i32,
            window_left: BLOCKFLASH_WINDOW_UNBOUNDED,
            window_right: BLOCKFLASH_WINDOW_UNBOUNDED,
            align_bottom_right: 0,
            softmax_scale: 0.125,
            softcap: 0.0,
            block_mask: blockflash_block_mask {
                row_ptr: ptr::null(),
                col_idx: ptr::null(),
                row_order: ptr::null(),
                cu_rows: ptr::null(),
                rows: 0,
                block_q: 0,
                block_kv: 0,
                groups_per_batch: 0,
                heads_per_group: 0,
            },
        };
        let config = LaunchConfig::of(row, 1, false);
        let qkv = [input(1.0)?, input(1.0)?, input(-2.0)?];
        let o = Tensor::zeros(stream, DType::F16, &shape)?;
        let lse = Tensor::zeros(stream, DType::F32, &[1, 1, 1])?;
        Ok(Some(Single { row, config, params, qkv, o, lse }))
    }

    fn launch(&mut self, stream: &Stream) -> Result<()> {
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
        };
        stream.launch::<AttentionFwd>(self.row, &self.config, &self.params, operands)
    }

    fn check(&self, stream: &Stream) -> Result<()> {
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

#[test]
fn a_kernel_runs_also_in_a_graph_and_on_other_streams() -> Result<()> {
    let Some(device) = gpu("a_kernel_runs_also_in_a_graph_and_on_other_streams") else {
        return Ok(());
    };
    let stream = device.stream()?;
    let Some(mut single) = Single::new(&stream)? else { return Ok(()) };
    single.launch(&stream)?;
    single.check(&stream)?;
    // Captured: nothing runs until the graph is launched.
    single.o.fill_bytes(&stream, 0)?;
    let graph = stream.capture(|stream| single.launch(stream))?;
    single.o.fill_bytes(&stream, 0)?;
    graph.launch(&stream)?;
    single.check(&stream)?;
    let other = device.stream()?;
    single.o.fill_bytes(&stream, 0)?;
    other.wait_for(&stream)?;
    single.launch(&other)?;
    single.check(&other)
}

#[test]
fn launches_that_do_not_fit_are_refused() -> Result<()> {
    let Some(device) = gpu("launches_that_do_not_fit_are_refused") else { return Ok(()) };
    let (stream, host) = (device.stream()?, Device::cpu().stream()?);
    let Some(mut single) = Single::new(&stream)? else { return Ok(()) };
    let refused = |single: &mut Single, change: &dyn Fn(&mut Single), expected: &str| {
        let (config, params) = (single.config, single.params);
        change(single);
        let error = single.launch(&stream).expect_err(expected);
        assert!(matches!(error, Error::Launch { .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error} does not say {expected}");
        (single.config, single.params) = (config, params);
    };
    refused(&mut single, &|s| s.config.grid = [2, 1, 1], "2x1x1 blocks");
    refused(&mut single, &|s| s.config.grid = [1, 1, 2], "1x1x2 blocks");
    refused(&mut single, &|s| s.config.block = 32, "threads");
    refused(&mut single, &|s| s.config.smem_bytes = 0, "shared memory");
    refused(&mut single, &|s| s.config.cluster = Some([2, 1, 1]), "clusters");
    refused(&mut single, &|s| s.params.seqlen_kv = 2, "k is f16");
    refused(&mut single, &|s| s.params.batch = 0, "not positive");
    refused(&mut single, &|s| s.params.head_dim = 60, "head dimension");
    refused(&mut single, &|s| s.params.seqlen_q = -1, "not positive");
    assert!(matches!(single.launch(&host), Err(Error::NotOnGpu { .. })));
    let moved = single.qkv[1].copy_to(&host)?;
    let original = std::mem::replace(&mut single.qkv[1], moved);
    assert!(matches!(single.launch(&stream), Err(Error::DeviceMismatch { .. })));
    single.qkv[1] = original;
    single.launch(&stream)?;
    single.check(&stream)
}
