//! Attention as a custom operator of ONNX Runtime, by ort: an operator for the CPU and one for the
//! execution provider of CUDA, which gets ONNX Runtime's memory and its stream as they are.
//!
//! ```text
//! pip install onnxruntime          # or onnxruntime-gpu
//! export ORT_DYLIB_PATH=…/site-packages/onnxruntime/capi/libonnxruntime.so.1.…
//! cargo run --release              # on the CPU, in f32
//! cargo run --release -- --cuda    # on a GPU, in f16
//! ```
//!
//! A model of one node, `blockflash:Attention`, is made, run, and compared with attention in f64.

use blockflash_foreign::{Described, Foreign, layout, views};
use blockflash_ops::{Attention, DType, Device, Mask};
use half::f16;
use ort::operator::{
    BoxedKernel, ComputeContext, KernelContext, Operator, OperatorDomain, OperatorInput,
    OperatorOutput,
};
use ort::session::Session;
use ort::value::{DynTensor, DynTensorValueType, Tensor, TensorElementType};

const DOMAIN: &str = "blockflash";
/// `[batch, seqlen, num_heads, head_dim]`
const Q: [usize; 4] = [2, 45, 4, 64];
const KV: [usize; 4] = [2, 45, 2, 64];

/// `o = softmax(q·kᵀ / √head_dim)·v` of tensors `[batch, seqlen, num_heads, head_dim]`, where heads
/// of queries may share one of keys. Attribute `causal`: 1 hides keys behind each query.
struct AttentionOperator {
    /// The execution provider whose memory it takes; the CPU's if there is none.
    provider: Option<&'static str>,
    element: TensorElementType,
}

impl Operator for AttentionOperator {
    type Kernel<'attr> = BoxedKernel<'attr>;

    fn name(&self) -> &str {
        "Attention"
    }

    fn execution_provider_type(&self) -> Option<&str> {
        self.provider
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        [self.element; 3].map(OperatorInput::required)
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        [OperatorOutput::required(self.element)]
    }

    fn create_kernel<'attr>(&self, node: &KernelContext<'attr>) -> ort::Result<BoxedKernel<'attr>> {
        let mask = match node.get::<i64>("causal") {
            None | Some(0) => Mask::Full,
            Some(1) => Mask::causal(),
            Some(other) => {
                return Err(ort::Error::new(format!("causal is {other}, expected 0 or 1")));
            }
        };
        Ok(Box::new(move |call: &ComputeContext| {
            compute(call, mask).map_err(|error| ort::Error::new(error.to_string()))
        }))
    }
}

fn compute(call: &ComputeContext, mask: Mask) -> Result<(), Box<dyn std::error::Error>> {
    let input = |at| {
        let value = call.input(at)?.ok_or_else(|| ort::Error::new("an input is missing"))?;
        value.downcast::<DynTensorValueType>()
    };
    let inputs = [input(0)?, input(1)?, input(2)?];
    let shape = inputs[0].shape().to_vec();
    let output = call.output(0, shape)?.ok_or_else(|| ort::Error::new("no output"))?;
    let output = output.downcast::<DynTensorValueType>()?;
    // Null on the CPU.
    let stream = call.stream()?.map_or(0, |stream| stream.as_ptr().expose_provenance());
    let foreign = |what, tensor: &DynTensor| {
        let described = Described { stream, ..described(what, tensor)? };
        // SAFETY: 1. and 3. ONNX Runtime keeps inputs and output during the call and, on a GPU,
        // frees and reuses them in the order of its stream. 2. The session, which is running, has
        // the stream, of the device's primary context.
        Ok::<_, Box<dyn std::error::Error>>(Some(unsafe { Foreign::new(described) }))
    };
    let (q, k) = (foreign("q", &inputs[0])?, foreign("k", &inputs[1])?);
    let (v, o) = (foreign("v", &inputs[2])?, foreign("o", &output)?);
    let stream = q.as_ref().ok_or("no q")?.stream()?;
    let ([Some(q), Some(k), Some(v)], [], [Some(o)]) = views(([&q, &k, &v], []), [o])? else {
        return Err("an operand is missing".into());
    };
    let attention = Attention { scores: mask.into(), ..Attention::new(q, k, v) };
    Ok(attention.forward_into(o, None, &stream)?)
}

/// A tensor of ONNX Runtime: row-major, on the CPU or on the GPU of its number.
fn described(
    what: &'static str,
    tensor: &DynTensor,
) -> Result<Described, Box<dyn std::error::Error>> {
    let memory = tensor.memory_info();
    let device = match memory.is_cpu_accessible() {
        true => Device::cpu(),
        false => Device::cuda(memory.device_id().try_into()?)?,
    };
    let dtype = match tensor.data_type() {
        TensorElementType::Float32 => DType::F32,
        TensorElementType::Float16 => DType::F16,
        TensorElementType::Bfloat16 => DType::BF16,
        other => return Err(format!("{what} is {other}, expected f32, f16 or bf16").into()),
    };
    let (shape, mut strides) = (tensor.shape(), vec![1; tensor.shape().len()]);
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at] * shape[at].max(1);
    }
    let layout = layout(what, shape, &strides)?;
    let address = tensor.data_ptr().expose_provenance();
    Ok(Described { address, ..Described::new(what, device, dtype, layout) })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cuda = match std::env::args().nth(1).as_deref() {
        None => false,
        Some("--cuda") => true,
        Some(other) => return Err(format!("{other} is given, expected --cuda or nothing").into()),
    };
    let of_cpu = AttentionOperator { provider: None, element: TensorElementType::Float32 };
    let provider = Some("CUDAExecutionProvider");
    let of_gpu = AttentionOperator { provider, element: TensorElementType::Float16 };
    let domain = OperatorDomain::new(DOMAIN)?;
    let domain = if cuda { domain.add(of_gpu)? } else { domain.add(of_cpu)? };
    let mut session = Session::builder()?.with_operators(domain)?;
    if cuda {
        let provider = ort::ep::CUDA::default().build().error_on_failure();
        session = session.with_execution_providers([provider])?;
    }
    let element = if cuda { 10 } else { 1 }; // of ONNX: f16, f32
    let mut session = session.commit_from_memory(&model(element))?;

    let rows = [(Q, 1), (KV, 2), (KV, 3)].map(|(shape, seed)| values(shape, seed));
    let input = |at: usize, shape: [usize; 4]| -> ort::Result<DynTensor> {
        match cuda {
            true => Ok(Tensor::from_array((shape, rows[at].clone()))?.upcast()),
            false => {
                let wide: Vec<f32> = rows[at].iter().map(|x| x.to_f32()).collect();
                Ok(Tensor::from_array((shape, wide))?.upcast())
            }
        }
    };
    let outputs = session.run(ort::inputs![input(0, Q)?, input(1, KV)?, input(2, KV)?])?;
    let o: Vec<f32> = match cuda {
        true => outputs["o"].try_extract_tensor::<f16>()?.1.iter().map(|x| x.to_f32()).collect(),
        false => outputs["o"].try_extract_tensor::<f32>()?.1.to_vec(),
    };
    let distance = |(o, expected): (&f32, f64)| (f64::from(*o) - expected).abs();
    let worst = o.iter().zip(expected(&rows)).map(distance).fold(0.0, f64::max);
    let limit = if cuda { 2e-3 } else { 1e-5 };
    println!("{} values, error at most {worst:.1e}", o.len());
    if o.len() == Q.iter().product() && worst < limit {
        Ok(())
    } else {
        Err(format!("the error is {worst}, expected {limit}").into())
    }
}

/// An ONNX model of one node, in the encoding of protocol buffers.
fn model(element: u64) -> Vec<u8> {
    let tensor = |name: &str, shape: [usize; 4]| {
        let dims = shape.map(|size| field(1, &number(1, size as u64))).concat();
        let of_tensor = [number(1, element), field(2, &dims)].concat();
        [field(1, name.as_bytes()), field(2, &field(1, &of_tensor))].concat()
    };
    const INT: u64 = 2;
    let causal = [field(1, b"causal"), number(3, 1), number(20, INT)].concat();
    let names = [field(1, b"q"), field(1, b"k"), field(1, b"v"), field(2, b"o")].concat();
    let kind = [field(4, b"Attention"), field(5, &causal), field(7, DOMAIN.as_bytes())].concat();
    let inputs = [("q", Q), ("k", KV), ("v", KV)].map(|(is, of)| field(11, &tensor(is, of)));
    let graph = [
        field(1, &[names, kind].concat()),
        field(2, b"attention"),
        inputs.concat(),
        field(12, &tensor("o", Q)),
    ];
    let opset = |domain: &str, version| {
        field(8, &[field(1, domain.as_bytes()), number(2, version)].concat())
    };
    [number(1, 8), field(7, &graph.concat()), opset("", 17), opset(DOMAIN, 1)].concat()
}

/// A field that is a number.
fn number(field: u64, value: u64) -> Vec<u8> {
    [varint(field << 3), varint(value)].concat()
}

/// A field that is text or a message.
fn field(field: u64, content: &[u8]) -> Vec<u8> {
    [varint(field << 3 | 2), varint(content.len() as u64), content.to_vec()].concat()
}

/// Seven bits a byte, the lowest ones first.
fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while value > 127 {
        bytes.push(value as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Made-up values between -1 and 1.
fn values(shape: [usize; 4], seed: u32) -> Vec<f16> {
    let value = |at: usize| {
        let hash = (at as u32 ^ seed << 20).wrapping_mul(0x9e37_79b1);
        f16::from_f32((hash >> 8) as f32 / 8_388_608.0 - 1.0)
    };
    (0..shape.iter().product()).map(value).collect()
}

/// Causal attention in f64.
fn expected([q, k, v]: &[Vec<f16>; 3]) -> Vec<f64> {
    let ([batch, seqlen, heads, dim], heads_kv) = (Q, KV[2]);
    let row = |of: &[f16], heads: usize, [sequence, token, head]: [usize; 3]| -> Vec<f64> {
        let at = ((sequence * seqlen + token) * heads + head) * dim;
        of[at..at + dim].iter().map(|x| x.to_f64()).collect()
    };
    let mut o = Vec::with_capacity(batch * seqlen * heads * dim);
    for at in 0..batch * seqlen * heads {
        let (sequence, token, head) = (at / heads / seqlen, at / heads % seqlen, at % heads);
        let q = row(q, heads, [sequence, token, head]);
        let of = |at| [sequence, at, head * heads_kv / heads];
        let weight = |key| {
            let products = q.iter().zip(row(k, heads_kv, of(key))).map(|(q, k)| q * k);
            (products.sum::<f64>() / (dim as f64).sqrt()).exp()
        };
        let weights: Vec<f64> = (0..=token).map(weight).collect();
        let (sum, mut mean) = (weights.iter().sum::<f64>(), vec![0.0; dim]);
        for (key, weight) in weights.into_iter().enumerate() {
            let v = row(v, heads_kv, of(key));
            mean.iter_mut().zip(v).for_each(|(mean, v)| *mean += weight / sum * v);
        }
        o.extend(mean);
    }
    o
}
