//! Lists that are on the GPU make the mask that they make on the CPU.

use blockflash_ops::{
    Align, BlockColumns, BlockGeometry, BlockMask, Device, Error, Result, Stream, Tensor,
};
use blockflash_tests::gpu::gpu;

#[test]
fn lists_on_the_gpu() -> Result<()> {
    let Some(gpu) = gpu("block_mask_lists_gpu::lists_on_the_gpu") else { return Ok(()) };
    check(&gpu.stream)
}

#[test]
fn lists_on_the_cpu() -> Result<()> {
    check(&Device::cpu().stream()?)
}

fn check(stream: &Stream) -> Result<()> {
    let host = Device::cpu().stream()?;
    let geometry = BlockGeometry::new(1000, 900, 128, 64)?;
    let expected = BlockMask::window(geometry, Some(2), Some(0), Align::BottomRight)?;
    let there = expected.to(stream)?;
    let mask = BlockMask::from_tensors(geometry, there.row_ptr(), there.col_idx(), stream)?;
    assert_eq!((mask.device(), mask.to(&host)?.to_bool()?), (there.device(), expected.to_bool()?));
    let (mut counts, mut columns) = (Vec::new(), Vec::new());
    for row in 0..geometry.rows() {
        columns.extend(expected.row(0, 0, row)?.map(|col| col as i32));
        counts.push(columns.len() as i32 - (row * geometry.cols()) as i32);
        columns.resize((row + 1) * geometry.cols(), -7);
    }
    let shape = [1, 1, geometry.rows(), geometry.cols()];
    let counts = Tensor::from_slice(stream, &counts, &shape[..3])?;
    let columns = Tensor::from_slice(stream, &columns, &shape)?;
    let lists = [BlockColumns { counts: &counts, columns: &columns }];
    let mask = BlockMask::from_columns(geometry, &lists, stream)?;
    assert_eq!((mask.device(), mask.to(&host)?.to_bool()?), (there.device(), expected.to_bool()?));
    if !stream.device().is_cpu() {
        let elsewhere = BlockMask::from_columns(geometry, &lists, &host).unwrap_err();
        assert!(matches!(elsewhere, Error::DeviceMismatch { what: "counts", .. }), "{elsewhere}");
    }
    Ok(())
}
