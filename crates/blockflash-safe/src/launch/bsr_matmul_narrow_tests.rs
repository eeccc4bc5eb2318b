use super::*;
use crate::launch::LaunchConfig;
use crate::launch::bsr_matmul_fixtures as fixtures;
use crate::launch::checked::fitted;
use crate::{DType, Device, Tensor};
use blockflash_sys::manifest;

/// 300 × 400 in blocks of 128, of which six are stored, times 400 × 8.
const M: usize = 300;
const N: usize = 8;
const K: usize = 400;
const LENGTHS: [i32; 3] = [3, 2, 1];

fn plan(ctas: u32, long_strips: i32) -> BsrMatmulNarrowPlan {
    BsrMatmulNarrowPlan { base: fixtures::params([M, N, K], N), ctas, long_strips }
}

fn fit_of(plan: &BsrMatmulNarrowPlan, blocks: u32, cluster: Option<u32>) -> Fit {
    let zeros = |dtype, shape: &[usize]| {
        Tensor::zeros(&Device::cpu().stream().unwrap(), dtype, shape).unwrap()
    };
    let (kernel, tile) = manifest::kernels()
        .iter()
        .find_map(|kernel| match kernel.variant {
            Variant::BsrMatmulNarrow(tile) if (tile.block_size, tile.block_n) == (128, 8) => {
                Some((kernel, tile))
            }
            _ => None,
        })
        .ok_or("no kernel")?;
    let indices = fixtures::pattern(&LENGTHS, false);
    let (values, b) = (zeros(tile.dtype, &[6, 128, 128]), zeros(tile.dtype, &[K, N]));
    let mut c = zeros(DType::F32, &[M, N]);
    let operands = BsrMatmulOperands {
        indices: &indices,
        values: values.view(),
        parts: None,
        b: b.view(),
        c: c.view_mut(),
        bias: None,
    };
    let cluster = cluster.map(|ctas| [ctas, 1, 1]);
    let config = LaunchConfig { cluster, ..LaunchConfig::of(kernel, blocks, true) };
    fitted::<BsrMatmulNarrow>(kernel, &config, plan, &operands).map(drop)
}

/// Two strips of each of three block rows.
#[test]
fn there_is_a_cta_for_each_strip_or_a_cluster_for_a_long_one() {
    fit_of(&plan(1, 0), 6, None).unwrap();
    // Two clusters for two strips, one for the four others.
    fit_of(&plan(8, 2), 24, Some(8)).unwrap();
    fit_of(&plan(2, 1), 8, Some(2)).unwrap();
    fit_of(&plan(8, 6), 48, Some(8)).unwrap();
    let refused = |found: Fit, what: &str| {
        let error = found.unwrap_err();
        assert!(error.contains(what), "{error}");
    };
    refused(fit_of(&plan(1, 0), 5, None), "a grid of 5x1x1 blocks, expected 6..=6");
    refused(fit_of(&plan(1, 0), 7, None), "a grid of 7x1x1 blocks");
    refused(fit_of(&plan(8, 2), 16, Some(8)), "a grid of 16x1x1 blocks");
    refused(fit_of(&plan(8, 7), 48, Some(8)), "long_strips is 7, and there are 6 strips");
    refused(fit_of(&plan(8, -1), 48, Some(8)), "long_strips is -1");
    refused(fit_of(&plan(8, 2), 24, Some(4)), "expected at least 8 CTAs");
    refused(fit_of(&plan(16, 2), 48, Some(16)), "clusters of Some([16, 1, 1])");
    let columns = blockflash_bsr_matmul_params { c_column_major: 1, ..plan(1, 0).base };
    let columns = BsrMatmulNarrowPlan { base: columns, ..plan(1, 0) };
    refused(fit_of(&columns, 6, None), "the kernel writes rows");
}
