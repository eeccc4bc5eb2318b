//! Anything that safe programs may give to the attention backward, or do to its memory while it
//! runs: no kernel leaves its tensors, and every launch ends. Under a memory checker, these
//! programs give no report; `small_shapes` is small enough for a race checker, too.
#![forbid(unsafe_code)]

use blockflash_ops::attention_bwd::{accepts, workspace_bytes};
use blockflash_ops::{
    Attention, AttentionBackward, AttentionGradientsMut, CuSeqlens, DType, Error, Mask, Operation,
    Scores, Stream, Tensor, View, ViewMut,
};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::{AttentionBwdStep as Step, AttentionBwdTile};
use blockflash_tests::gpu::{Gpu, gpu, wait};
use blockflash_tests::number::POISON;
use half::{bf16, f16};

/// The tensors of a call, without any room around them.
struct Call {
    seqlens: [usize; 2],
    /// q, o, the gradient of o; k and v.
    inputs: [Tensor; 5],
    lse: Tensor,
    sink: Tensor,
    /// For kernels with score terms.
    slopes: Option<Tensor>,
    offsets: Option<[Tensor; 2]>,
    gradients: [Tensor; 3],
    d_sink: Tensor,
    workspace: Tensor,
}

fn numbers(dtype: DType, shape: &[usize], stream: &Stream) -> Tensor {
    let number = |at: usize| (at * 37 % 101) as f32 / 50.0 - 1.0;
    let count = shape.iter().product();
    match dtype {
        DType::F16 => {
            let values: Vec<f16> = (0..count).map(|at| f16::from_f32(number(at))).collect();
            Tensor::from_slice(stream, &values, shape).unwrap()
        }
        _ => {
            let values: Vec<bf16> = (0..count).map(|at| bf16::from_f32(number(at))).collect();
            Tensor::from_slice(stream, &values, shape).unwrap()
        }
    }
}

impl Call {
    /// Two heads on one. With offsets all sequences are packed in two.
    fn new(tile: &AttentionBwdTile, seqlens: [usize; 2], packed: bool, stream: &Stream) -> Self {
        let (dtype, d) = (tile.types.q, tile.head_dims.min());
        let shape = |length: usize, heads: usize| match packed {
            true => vec![length, heads, d],
            false => vec![1, length, heads, d],
        };
        let [of_q, of_kv] = [shape(seqlens[0], 2), shape(seqlens[1], 1)];
        let offsets = |length: usize| {
            Tensor::from_slice(stream, &[0, length as i32 / 3, length as i32], &[3]).unwrap()
        };
        let lse_shape = if packed { vec![2, seqlens[0]] } else { vec![1, 2, seqlens[0]] };
        let lse = vec![3f32; 2 * seqlens[0]];
        let poisoned = |dtype: DType, shape: &[usize]| {
            let mut tensor = Tensor::empty(stream, dtype, shape).unwrap();
            tensor.fill_bytes(stream, POISON).unwrap();
            tensor
        };
        Self {
            seqlens,
            inputs: [&of_q, &of_q, &of_q, &of_kv, &of_kv].map(|s| numbers(dtype, s, stream)),
            lse: Tensor::from_slice(stream, &lse, &lse_shape).unwrap(),
            sink: Tensor::zeros(stream, DType::F32, &[2]).unwrap(),
            slopes: tile.terms.then(|| Tensor::from_slice(stream, &[0.5f32, 0.1], &[2]).unwrap()),
            offsets: packed.then(|| seqlens.map(offsets)),
            gradients: [&of_q, &of_kv, &of_kv].map(|shape| poisoned(dtype, shape)),
            d_sink: poisoned(DType::F32, &[2]),
            workspace: Tensor::empty(stream, DType::U8, &[0]).unwrap(),
        }
    }

    /// The call, its gradients and its workspace.
    fn parts(
        &mut self,
        mask: Mask,
    ) -> (AttentionBackward<'_>, (AttentionGradientsMut<'_>, Option<ViewMut<'_>>)) {
        let Self { seqlens, inputs, lse, sink, slopes, offsets, gradients, d_sink, workspace } =
            self;
        let [q, o, d_o, k, v] = inputs.each_ref().map(Tensor::view);
        let cu_seqlens = offsets.as_ref().map(|[q, kv]| CuSeqlens {
            q: q.view(),
            kv: kv.view(),
            max_seqlen_q: seqlens[0],
            max_seqlen_kv: seqlens[1],
        });
        let sink: Option<View<'_>> = Some(sink.view());
        let alibi = slopes.as_ref().map(Tensor::view);
        let attention = Attention {
            scores: Scores { mask, sink, alibi, ..Scores::default() },
            cu_seqlens,
            ..Attention::new(q, k, v)
        };
        let [dq, dk, dv] = gradients.each_mut().map(Tensor::view_mut);
        let d_sink = Some(d_sink.view_mut());
        let gradients = AttentionGradientsMut { d_sink, ..AttentionGradientsMut::new(dq, dk, dv) };
        let call = AttentionBackward { attention, o, lse: lse.view(), d_o };
        (call, (gradients, Some(workspace.view_mut())))
    }

    /// Lends exactly the workspace that a kernel needs; says whether the kernel takes the call.
    fn lend(&mut self, mask: Mask, kernel: &Kernel, gpu: &Gpu) -> bool {
        let (call, (gradients, _)) = self.parts(mask);
        let problem = call.problem().unwrap().with_gradients(&gradients).unwrap();
        if accepts(kernel, &problem, &gpu.properties).is_err() {
            return false;
        }
        let bytes = workspace_bytes(kernel, &problem, &gpu.properties).unwrap();
        self.workspace = Tensor::empty(&gpu.stream, DType::U8, &[bytes]).unwrap();
        true
    }

    fn launch(
        &mut self,
        mask: Mask,
        kernel: &'static Kernel,
        stream: &Stream,
    ) -> Result<(), Error> {
        let (call, out) = self.parts(mask);
        call.run_with(kernel, out, stream)
    }

    fn bits(&self, stream: &Stream) -> Vec<Vec<u32>> {
        let of = |tensor| blockflash_tests::host::download(stream, tensor).unwrap();
        self.gradients.iter().chain([&self.d_sink]).map(of).collect()
    }
}

/// Calls `check` for every kernel that takes such a call.
fn of_each_kernel(
    gpu: &Gpu,
    (seqlens, packed, mask): ([usize; 2], bool, Mask),
    mut check: impl FnMut(&'static Kernel, &AttentionBwdTile, Call),
) {
    for kernel in gpu.kernels() {
        let Some(tile) = kernel.attention_bwd_tile() else { continue };
        let mut call = Call::new(&tile, seqlens, packed, &gpu.stream);
        if call.lend(mask, kernel, gpu) {
            check(kernel, &tile, call);
        }
    }
}

/// One tile, less than one, and more than one, with nothing behind the ends of the tensors.
#[test]
fn small_shapes() {
    let Some(gpu) = gpu("hostile_bwd_gpu::small_shapes") else { return };
    for (seqlens, packed) in [([70, 130], false), ([1, 1], false), ([150, 90], true)] {
        for mask in [Mask::Full, Mask::causal()] {
            of_each_kernel(&gpu, (seqlens, packed, mask), |kernel, _, mut call| {
                call.launch(mask, kernel, &gpu.stream).unwrap();
                wait(&gpu.stream, &|| format!("{} for {seqlens:?}", kernel.image_name())).unwrap();
                let poison = [DType::BF16, DType::F32].map(blockflash_tests::number::poison);
                let written = |bits: &Vec<u32>| !bits.iter().any(|bits| poison.contains(bits));
                assert!(call.bits(&gpu.stream).iter().all(written), "{}", kernel.image_name());
            });
        }
    }
}

/// A log-sum-exp of any bits leads to gradients of any bits, and leaves nothing behind.
#[test]
fn any_log_sum_exp() {
    let Some(gpu) = gpu("hostile_bwd_gpu::any_log_sum_exp") else { return };
    let stream = &gpu.stream;
    let numbers = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 3e38, -3e38, 1e-45, -0.0];
    let mask = Mask::causal();
    of_each_kernel(&gpu, ([200, 200], false, mask), |kernel, _, mut call| {
        let what = || kernel.image_name();
        call.launch(mask, kernel, stream).unwrap();
        wait(stream, &what).unwrap();
        let before = call.bits(stream);
        let right = call.lse.to_vec::<f32>(stream).unwrap();
        let any: Vec<f32> = (0..right.len()).map(|at| numbers[at % numbers.len()]).collect();
        call.lse.copy_from_slice(stream, &any).unwrap();
        call.launch(mask, kernel, stream).unwrap();
        wait(stream, &what).unwrap();
        call.lse.copy_from_slice(stream, &right).unwrap();
        call.launch(mask, kernel, stream).unwrap();
        wait(stream, &what).unwrap();
        assert_eq!(call.bits(stream), before, "{}", what());
    });
}

/// Offsets that change after a graph was captured.
#[test]
fn a_captured_graph_takes_any_offsets() {
    let Some(gpu) = gpu("hostile_bwd_gpu::a_captured_graph_takes_any_offsets") else { return };
    let (stream, mask) = (&gpu.stream, Mask::causal());
    let garbage = [
        [i32::MAX, i32::MIN, -1],
        [1 << 30, 0, 1 << 24],
        [-5, 300, 301],
        [299, 300, 0],
        [0, 300, 300],
    ];
    of_each_kernel(&gpu, ([300, 280], true, mask), |kernel, _, mut call| {
        let graph = stream.capture(|stream| call.launch(mask, kernel, stream)).unwrap();
        for (turn, entries) in garbage.iter().enumerate() {
            let others = &garbage[(turn + 2) % garbage.len()];
            let [q, kv] = call.offsets.as_mut().unwrap();
            q.copy_from_slice(stream, entries).unwrap();
            kv.copy_from_slice(stream, others).unwrap();
            graph.launch(stream).unwrap();
            wait(stream, &|| format!("{} with {entries:?}", kernel.image_name())).unwrap();
        }
    });
}

/// A forward pass whose CTAs take tiles from the counter of the stream, as the CTAs of the backward
/// pass that takes turns do.
fn attend(stream: &Stream) -> Vec<u32> {
    let q = numbers(DType::BF16, &[1, 4096, 8, 64], stream);
    let causal = Mask::causal();
    let call = Attention { scores: causal.into(), ..Attention::new(q.view(), q.view(), q.view()) };
    let output = call.forward(stream).unwrap();
    wait(stream, &|| "a forward pass behind a workspace that changed".into()).unwrap();
    blockflash_tests::host::download(stream, &output.o).unwrap()
}

/// Another stream writes to the workspace while kernels use it. A turn that never comes ends the
/// wait for it, and later calls, also of other kernels, compute what they should. With few queries
/// CTAs have announced all tiles before they wait for a turn.
#[test]
fn a_workspace_that_changes() {
    let Some(gpu) = gpu("hostile_bwd_gpu::a_workspace_that_changes") else { return };
    let (stream, other) = (&gpu.stream, gpu.device.stream().unwrap());
    let forward = attend(stream);
    let mask = Mask::Full;
    let check = |kernel: &'static Kernel, mut call: Call| {
        let what = || format!("{} with a workspace that changes", kernel.image_name());
        call.launch(mask, kernel, stream).unwrap();
        wait(stream, &what).unwrap();
        let before = call.bits(stream);
        // The first use on a stream waits for the others, later ones do not.
        call.workspace.fill_bytes(&other, 0).unwrap();
        for byte in [0xFF, 0] {
            call.launch(mask, kernel, stream).unwrap();
            (0..50).for_each(|_| call.workspace.fill_bytes(&other, byte).unwrap());
            wait(stream, &what).unwrap();
            wait(&other, &what).unwrap();
        }
        for _ in 0..2 {
            assert!(attend(stream) == forward, "a forward pass behind {}", what());
            call.launch(mask, kernel, stream).unwrap();
            wait(stream, &what).unwrap();
            assert!(call.bits(stream) == before, "{}", what());
        }
    };
    for seqlens in [[600, 600], [200, 600]] {
        of_each_kernel(&gpu, (seqlens, false, mask), |kernel, tile, call| {
            // Only this step waits for what is in the workspace; it is slow where it waits in
            // vain.
            if tile.step == Step::KeysAndSums {
                check(kernel, call);
            }
        });
    }
}
