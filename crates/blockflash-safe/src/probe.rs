use crate::operands::{Fit, fits, pointer, pointer_mut, require};
use crate::{DType, Error, LaunchConfig, Result, Row, Stream, View, ViewMut};
use blockflash_sys::Probe;
use blockflash_sys::manifest::Variant;
use blockflash_sys::params::blockflash_probe_params;

/// The input of a probe holds a multiple of so many bytes, at least four of them.
pub const PROBE_CHUNK_BYTES: usize = 16384;

impl Stream {
    /// Launches a kernel of [`Variant::Probe`] with so many blocks. The input is i32 `[words]`, the
    /// output i32 with one word per thread, or for a copy as many as the input; both are
    /// contiguous. `iterations` is how often the inner loop runs.
    ///
    /// # Errors
    /// [`Error::Launch`] when the operands do not fit; as
    /// [`launch_attention_fwd`](Stream::launch_attention_fwd).
    pub fn launch_probe(
        &self,
        row: &Row,
        blocks: u32,
        iterations: u32,
        input: View<'_>,
        output: ViewMut<'_>,
    ) -> Result<()> {
        let failed = |what: String| Error::Launch { symbol: row.symbol(), what };
        let Variant::Probe(probe) = row.variant else {
            return Err(failed("not a probe".to_owned()));
        };
        let views = [Some(input), Some(output.as_view())];
        self.expect_all(&views)?;
        let iterations =
            i32::try_from(iterations).map_err(|_| failed("too many iterations".to_owned()))?;
        fit(row, probe, blocks, &input, &output).map_err(failed)?;
        let params = blockflash_probe_params {
            input: pointer(&input),
            output: pointer_mut(&output),
            bytes: 4 * input.shape().first().map_or(0, |&words| words as i64),
            iterations,
        };
        let config = LaunchConfig {
            grid: [blocks, 1, 1],
            block: row.threads(),
            smem_bytes: row.smem_bytes(),
            cluster: None,
            programmatic_dependent_launch: false,
        };
        // SAFETY:
        // 1. The row is a probe, whose parameter struct this is.
        // 2. Both pointers come from views of this device. A probe reads `bytes` from the first, of
        //    which `fit` found enough, and writes a word per thread, or `bytes`, to the second,
        //    whose length `fit` found to be just that.
        // 3. The output is borrowed exclusively.
        unsafe {
            self.launch_with(
                row,
                &config,
                |_| params,
                views.iter().flatten().filter_map(View::owner),
            )
        }
    }
}

fn fit(row: &Row, probe: Probe, blocks: u32, input: &View<'_>, output: &ViewMut<'_>) -> Fit {
    let words = input.shape().first().map_or(0, |&words| words as i64);
    fits("input", input, DType::I32, [(words, 1)])?;
    let chunk = PROBE_CHUNK_BYTES as i64 / 4;
    require(
        words % chunk == 0 && words >= 4 * chunk,
        "the input is no multiple of 16384 bytes from 65536 on",
    )?;
    require(blocks > 0, "a grid without blocks")?;
    require(
        input.is_aligned(16) && output.as_view().is_aligned(16),
        "an address is no multiple of 16",
    )?;
    let threads = i64::from(blocks) * i64::from(row.threads());
    fits(
        "output",
        &output.as_view(),
        DType::I32,
        [(if probe == Probe::Copy { words } else { threads }, 1)],
    )
}
