//! Anything that safe programs may do with graphs, streams and workspaces, any number of times and
//! in any order.
#![forbid(unsafe_code)]

use blockflash_ops::bsr_matmul::{BsrMatmul, BsrMatrix, BsrWorkspace};
use blockflash_ops::{DType, Error, Operation, Stream, Tensor};
use blockflash_safe::{Error as SafeError, Graph};
use blockflash_sys::Kernel;
use blockflash_sys::manifest::Variant;
use blockflash_tests::gpu::{Gpu, gpu, wait};
use half::bf16;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// More than the number of tile counters.
const MANY: usize = 10_000;

/// Tile counters belong to the whole process, and some tests take all of them: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A block row of this many blocks of 64 × 64 and a short one, times a matrix of `value`. All sums
/// are small integers.
struct Product {
    a: BsrMatrix,
    b: Tensor,
    c: Tensor,
    expected: Vec<f32>,
}

const COLUMNS: usize = 128;

/// In all elements of a block.
fn value_of(block: usize) -> f32 {
    (block % 5) as f32 - 1.0
}

impl Product {
    fn new(blocks: usize, value: f32, stream: &Stream) -> Product {
        let places: Vec<(usize, usize)> = (0..blocks).map(|col| (0, col)).chain([(1, 0)]).collect();
        let values: Vec<f32> = (0..places.len() * 4096).map(|at| value_of(at / 4096)).collect();
        let a =
            BsrMatrix::from_blocks(128, blocks * 64, 64, DType::BF16, &places, &values).unwrap();
        let sums = [(0..blocks).map(value_of).sum(), value_of(blocks)];
        let expected =
            (0..128 * COLUMNS).map(|at| value * 64.0 * sums[at / COLUMNS / 64]).collect();
        let b = vec![bf16::from_f32(value); blocks * 64 * COLUMNS];
        Product {
            a: a.to(stream).unwrap(),
            b: Tensor::from_slice(stream, &b, &[blocks * 64, COLUMNS]).unwrap(),
            c: Tensor::empty(stream, DType::F32, &[128, COLUMNS]).unwrap(),
            expected,
        }
    }

    fn queue(
        &mut self,
        kernel: Option<&'static Kernel>,
        workspace: Option<&BsrWorkspace>,
        stream: &Stream,
    ) -> Result<(), Error> {
        let product = BsrMatmul { workspace, ..BsrMatmul::new(&self.a, self.b.view()) };
        match kernel {
            None => product.matmul_into(self.c.view_mut(), stream),
            Some(kernel) => product.run_with(kernel, self.c.view_mut(), stream),
        }
    }

    fn capture(
        &mut self,
        kernel: Option<&'static Kernel>,
        workspace: Option<&BsrWorkspace>,
        stream: &Stream,
    ) -> Graph {
        stream.capture(|stream| self.queue(kernel, workspace, stream)).unwrap()
    }

    fn check(&self, stream: &Stream, what: &str) {
        wait(stream, &|| what.to_owned()).unwrap();
        assert!(self.c.to_vec::<f32>(stream).unwrap() == self.expected, "{what}");
    }
}

/// Persistent kernels for the product, which compute long tiles in parts; only Hopper has them.
fn counting(gpu: &Gpu, product: &mut Product) -> Vec<&'static Kernel> {
    let splits =
        |kernel: &&Kernel| matches!(&kernel.variant, Variant::BsrMatmulHopper(t) if t.splits());
    let kernels: Vec<&Kernel> = gpu.kernels().filter(splits).collect();
    let takes = |kernel: &&'static Kernel| match product.queue(Some(kernel), None, &gpu.stream) {
        Ok(()) => true,
        Err(Error::Unsupported { .. }) => false,
        Err(error) => panic!("{}: {error}", kernel.image_name()),
    };
    let kernels: Vec<&Kernel> = kernels.into_iter().filter(takes).collect();
    assert!(
        gpu.properties.compute_capability.major != 9 || !kernels.is_empty(),
        "no kernel counts tiles"
    );
    kernels
}

#[test]
fn captures_without_end() {
    let Some(gpu) = gpu("soundness_gpu::captures_without_end") else { return };
    let _alone = alone();
    let stream = &gpu.stream;
    let mut product = Product::new(4, 2.0, stream);
    let Some(&kernel) = counting(&gpu, &mut product).first() else { return };
    for number in 0..MANY {
        // Dropped while it runs, or without having run.
        let graph = product.capture(Some(kernel), None, stream);
        if number % 3 > 0 {
            graph.launch(stream).unwrap();
        }
        if number % 1000 == 1 {
            product.check(stream, &format!("capture {number}"));
        }
    }
    product.queue(Some(kernel), None, stream).unwrap();
    product.check(stream, "after all captures");
}

#[test]
fn streams_without_end() {
    let Some(gpu) = gpu("soundness_gpu::streams_without_end") else { return };
    let _alone = alone();
    let mut product = Product::new(4, 2.0, &gpu.stream);
    let Some(&kernel) = counting(&gpu, &mut product).first() else { return };
    let mut last = gpu.stream.clone();
    for number in 0..MANY {
        // The tensors outlive the streams that they are used on, and the work on these.
        let stream = gpu.device.stream().unwrap();
        stream.wait_for(&last).unwrap();
        product.queue(Some(kernel), None, &stream).unwrap();
        if number % 500 == 0 {
            product.check(&stream, &format!("stream {number}"));
        }
        last = stream;
    }
    product.check(&last, "the last stream");
    gpu.stream.wait_for(&last).unwrap();
}

#[test]
fn graphs_that_share_a_workspace() {
    let Some(gpu) = gpu("soundness_gpu::graphs_that_share_a_workspace") else { return };
    let _alone = alone();
    let [first, second, third] = [0; 3].map(|_| gpu.device.stream().unwrap());
    let home = &gpu.stream;
    let [mut one, mut two, mut three] =
        [(64, 2.0), (97, -1.0), (40, 3.0)].map(|(blocks, value)| Product::new(blocks, value, home));
    let kernels = counting(&gpu, &mut one);
    let workspaces =
        [2, 5].map(|parts| BsrWorkspace::new(home).unwrap().with_parts(parts).unwrap());
    wait(home, &|| "uploads".to_owned()).unwrap();
    for kernel in kernels.into_iter().map(Some).chain([None]) {
        let what = kernel.map_or("selected".to_owned(), Kernel::image_name);
        // Both use both workspaces, in opposite order.
        let [a, b] = [&workspaces[0], &workspaces[1]];
        let both = |product: &mut Product, stream: &Stream, order: [&BsrWorkspace; 2]| {
            let capture = |stream: &Stream| {
                order
                    .into_iter()
                    .try_for_each(|workspace| product.queue(kernel, Some(workspace), stream))
            };
            stream.capture(capture).unwrap()
        };
        let graphs = [both(&mut one, &first, [a, b]), both(&mut two, &second, [b, a])];
        std::thread::scope(|scope| {
            for (graph, stream) in graphs.iter().zip([&first, &second]) {
                scope.spawn(move || (0..500).for_each(|_| graph.launch(stream).unwrap()));
            }
            let (three, third) = (&mut three, &third);
            scope
                .spawn(move || (0..500).for_each(|_| three.queue(kernel, Some(a), third).unwrap()));
        });
        one.check(&first, &what);
        two.check(&second, &what);
        three.check(&third, &what);
        // The same graphs with their streams exchanged, in the order of one thread.
        for _ in 0..200 {
            graphs[0].launch(&second).unwrap();
            graphs[1].launch(&first).unwrap();
        }
        one.check(&second, &what);
        two.check(&first, &what);
        for stream in [&first, &second, &third] {
            wait(stream, &|| what.clone()).unwrap();
        }
    }
}

#[test]
fn a_graph_is_not_launched_into_a_capture() {
    let Some(gpu) = gpu("soundness_gpu::a_graph_is_not_launched_into_a_capture") else { return };
    let _alone = alone();
    let stream = &gpu.stream;
    let workspace = BsrWorkspace::new(stream).unwrap();
    let mut product = Product::new(64, 2.0, stream);
    let graph = product.capture(None, Some(&workspace), stream);
    let outer = stream.capture(|stream| {
        let refused = graph.launch(stream);
        assert!(matches!(refused, Err(SafeError::InCapture { .. })), "{refused:?}");
        Ok::<(), SafeError>(())
    });
    outer.unwrap().launch(stream).unwrap();
    graph.launch(stream).unwrap();
    product.check(stream, "after the refusal");
}

/// Another stream cannot wait for a stream that is being captured: this is an error, and neither an
/// endless wait nor a broken capture.
#[test]
fn a_workspace_that_a_captured_stream_used_last() {
    let Some(gpu) = gpu("soundness_gpu::a_workspace_that_a_captured_stream_used_last") else {
        return;
    };
    let _alone = alone();
    let (stream, other) = (&gpu.stream, gpu.device.stream().unwrap());
    let workspace = BsrWorkspace::new(stream).unwrap().with_parts(4).unwrap();
    let [mut product, mut elsewhere] = [2.0, 3.0].map(|value| Product::new(64, value, stream));
    let Some(&kernel) = counting(&gpu, &mut product).first() else { return };
    wait(stream, &|| "uploads".to_owned()).unwrap();
    elsewhere.queue(Some(kernel), None, &other).unwrap();
    product.queue(Some(kernel), Some(&workspace), stream).unwrap();
    let graph = stream.capture(|stream| {
        product.queue(Some(kernel), Some(&workspace), stream)?;
        let refused = elsewhere.queue(Some(kernel), Some(&workspace), &other);
        assert!(matches!(refused, Err(Error::Safe(SafeError::InCapture { .. }))), "{refused:?}");
        Ok::<(), Error>(())
    });
    let graph = graph.unwrap();
    elsewhere.queue(Some(kernel), Some(&workspace), &other).unwrap();
    graph.launch(stream).unwrap();
    product.check(stream, "the graph");
    elsewhere.check(&other, "the other stream");
}

#[test]
fn counters_that_are_all_taken_are_an_error() {
    let Some(gpu) = gpu("soundness_gpu::counters_that_are_all_taken_are_an_error") else { return };
    let _alone = alone();
    let stream = &gpu.stream;
    let mut product = Product::new(4, 2.0, stream);
    let Some(&kernel) = counting(&gpu, &mut product).first() else { return };
    let mut graphs = Vec::new();
    let refused = loop {
        match stream.capture(|stream| product.queue(Some(kernel), None, stream)) {
            Ok(graph) => graphs.push(graph),
            Err(error) => break error,
        }
        assert!(graphs.len() < MANY, "nothing is ever refused");
    };
    assert!(matches!(refused, Error::Safe(SafeError::TileCounters { .. })), "{refused}");
    assert!(graphs.len() > 8000, "refused after {}", graphs.len());
    // A stream that has counters keeps them.
    graphs[0].launch(stream).unwrap();
    product.queue(Some(kernel), None, stream).unwrap();
    product.check(stream, "while none is left");
    drop(graphs);
    // The driver returns them in a thread of its own.
    let begun = Instant::now();
    while let Err(error) = stream.capture(|stream| product.queue(Some(kernel), None, stream)) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
