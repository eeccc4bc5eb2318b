//! The table itself: the tiles of every kernel, and the targets that they are compiled for.

use crate::manifest::{
    AttentionFwd, AttentionFwdHopper, BsrMatmul, BsrMatmulHopper, BsrSddmm, BsrSddmmHopper, Row,
    Variant,
};
use crate::{BlockMaskKernel, DType, Major, Probe, Target};
use std::sync::LazyLock;

/// Every portable target: the tile fits into 99 KB of shared memory.
const ALL: &[Target] = &[Target::Sm90, Target::Sm89, Target::Sm80, Target::Sm120, Target::Ptx80];
/// GPUs with at least 163 KB of shared memory per block.
const LARGE_SMEM: &[Target] = &[Target::Sm90, Target::Sm80];
/// GPUs with 99 KB of shared memory per block, and whatever is not known yet.
const SMALL_SMEM: &[Target] = &[Target::Sm89, Target::Sm120, Target::Ptx80];

const fn attention(
    head_dim: u32,
    block_q: u32,
    block_kv: u32,
    warps: u32,
    stages: u32,
    min_blocks: u32,
) -> AttentionFwd {
    AttentionFwd { dtype: DType::F16, head_dim, block_q, block_kv, warps, stages, min_blocks }
}

/// Attention tiles by head dimension: 32 query rows per warp halve the shared-memory reads of K and
/// V where the accumulators fit into registers (head_dim ≤ 128), else 16. At 128 the tile that is
/// fastest on Hopper leaves room for one block per multiprocessor on GPUs with 100 KB of shared
/// memory, so those take half the keys per step and run two. The narrower tiles of 64 and 128 are
/// for block masks with 64 queries per block: dense problems take the first of a head dimension.
const ATTENTION_FWD: &[(&[Target], AttentionFwd)] = &[
    (ALL, attention(64, 128, 64, 4, 1, 2)),
    (ALL, attention(64, 64, 64, 4, 1, 2)),
    (ALL, attention(96, 128, 64, 4, 1, 2)),
    (LARGE_SMEM, attention(128, 128, 64, 4, 1, 2)),
    (SMALL_SMEM, attention(128, 128, 32, 4, 1, 2)),
    (ALL, attention(128, 64, 64, 4, 1, 2)),
    (ALL, attention(192, 64, 64, 4, 1, 2)),
    (ALL, attention(256, 64, 64, 4, 1, 2)),
];

const fn hopper(
    head_dim: u32,
    block_kv: u32,
    warpgroups: u32,
    [stages, q_stages]: [u32; 2],
    q_in_registers: bool,
    blocks_per_multiprocessor: u32,
    cost_ns: [u32; 2],
) -> AttentionFwdHopper {
    let dtype = DType::F16;
    AttentionFwdHopper {
        dtype,
        head_dim,
        block_kv,
        warpgroups,
        heads: 1,
        stages,
        q_stages,
        q_in_registers,
        blocks_per_multiprocessor,
        lse: false,
        cost_ns,
    }
}

/// Attention tiles of Hopper by head dimension. Three warpgroups where registers allow it (outputs,
/// scores and probabilities take at most 132 of 160 per thread); with two or one, Q is in registers
/// where some are free. Narrower blocks are for few queries: a grid that does not fill the
/// multiprocessors costs more than they do. Those with 64 keys are for block masks; at 192 and 256
/// they are the faster ones without, too, as wider ones straddle the diagonal of a causal mask.
/// Blocks of 64 queries share a multiprocessor, since warpgroups with lists of their own cannot
/// share keys; three at head_dim 64, where they change tiles of queries at different times, which
/// short causal sequences gain from. Where heads of q share keys and a block mask, two of them
/// share a tile.
const ATTENTION_FWD_HOPPER: &[AttentionFwdHopper] = &[
    hopper(64, 128, 3, [2, 2], false, 1, [1364, 1900]),
    hopper(64, 128, 2, [2, 1], true, 1, [1073, 2100]),
    hopper(64, 128, 1, [2, 1], true, 1, [737, 1700]),
    hopper(64, 64, 2, [4, 1], true, 1, [583, 2100]),
    hopper(64, 64, 1, [2, 1], true, 3, [774, 2500]),
    hopper(96, 96, 3, [2, 1], false, 1, [1356, 3000]),
    hopper(96, 128, 2, [2, 1], true, 1, [1310, 2800]),
    hopper(128, 128, 2, [2, 1], true, 1, [1340, 3000]),
    hopper(128, 128, 1, [2, 1], true, 1, [988, 2200]),
    hopper(128, 64, 2, [3, 1], true, 1, [729, 2800]),
    hopper(128, 64, 1, [2, 1], true, 2, [794, 3200]),
    AttentionFwdHopper { heads: 2, ..hopper(128, 64, 2, [3, 1], true, 1, [729, 2800]) },
    hopper(192, 64, 2, [3, 1], false, 1, [983, 4000]),
    hopper(256, 64, 2, [2, 1], false, 1, [1300, 4300]),
    hopper(256, 64, 1, [2, 1], false, 1, [851, 2860]),
];

const fn bsr(
    block_size: u32,
    [block_n, block_k]: [u32; 2],
    [warps_m, warps_n]: [u32; 2],
    stages: u32,
    min_blocks: u32,
) -> BsrMatmul {
    BsrMatmul {
        dtype: DType::F16,
        block_size,
        block_n,
        block_k,
        warps_m,
        warps_n,
        stages,
        min_blocks,
    }
}

/// BSR tiles by block size: a wide one, and a narrow one for few columns.
const BSR_MATMUL: &[(&[Target], BsrMatmul)] = &[
    (ALL, bsr(16, [256, 32], [1, 4], 3, 4)),
    (ALL, bsr(16, [64, 64], [1, 2], 4, 4)),
    (ALL, bsr(32, [256, 32], [1, 4], 3, 4)),
    (ALL, bsr(32, [64, 64], [1, 2], 4, 4)),
    (ALL, bsr(64, [128, 64], [2, 2], 2, 4)),
    (ALL, bsr(64, [64, 64], [2, 2], 3, 4)),
    (ALL, bsr(128, [128, 64], [2, 2], 3, 2)),
    (ALL, bsr(128, [64, 64], [2, 2], 3, 3)),
];

/// BSR tiles by block size for whatever layout A, B and C have: one of each, as such products are
/// rarer.
const BSR_MATMUL_ANY: &[(&[Target], BsrMatmul)] = &[
    (ALL, bsr(16, [128, 64], [1, 4], 2, 4)),
    (ALL, bsr(32, [128, 64], [1, 4], 2, 4)),
    (ALL, bsr(64, [128, 64], [2, 2], 2, 3)),
    (ALL, bsr(128, [128, 64], [2, 2], 3, 2)),
];

const fn bsr_hopper(
    block_size: u32,
    block_rows: u32,
    block_n: u32,
    stages: u32,
) -> BsrMatmulHopper {
    let (dtype, filled, cluster) = (DType::F16, false, 1);
    let (a_transposed, b_column_major) = (false, false);
    BsrMatmulHopper {
        dtype,
        block_size,
        block_rows,
        block_n,
        stages,
        filled,
        cluster,
        a_transposed,
        b_column_major,
    }
}

/// Small blocks filled up with zeros, in clusters that share B.
const fn bsr_filled(tile: BsrMatmulHopper) -> BsrMatmulHopper {
    BsrMatmulHopper { filled: true, ..bsr_pair(tile) }
}

/// The same in clusters of two blocks of threads.
const fn bsr_pair(tile: BsrMatmulHopper) -> BsrMatmulHopper {
    BsrMatmulHopper { cluster: 2, ..tile }
}

/// BSR tiles of Hopper by block size: as many accumulators as two warpgroups have, and fewer for
/// few columns. What flows into shared memory binds all of them: blocks of 64 take two block rows
/// that share B, small ones 256 rows, the group of a pattern's plan. Stages are as many as fit.
/// Pairs share A where that was seen to gain, or B where small blocks are filled with zeros.
const BSR_MATMUL_HOPPER: &[BsrMatmulHopper] = &[
    bsr_hopper(16, 16, 128, 4),
    bsr_hopper(16, 16, 64, 6),
    bsr_hopper(32, 8, 128, 4),
    bsr_hopper(32, 8, 64, 6),
    bsr_hopper(64, 2, 256, 4),
    bsr_hopper(64, 1, 256, 5),
    bsr_hopper(64, 1, 128, 8),
    bsr_hopper(128, 1, 256, 4),
    bsr_hopper(128, 1, 128, 6),
    bsr_hopper(128, 1, 64, 8),
    bsr_pair(bsr_hopper(16, 16, 128, 4)),
    bsr_pair(bsr_hopper(16, 16, 64, 6)),
    bsr_pair(bsr_hopper(32, 8, 128, 4)),
    bsr_pair(bsr_hopper(64, 2, 256, 4)),
    bsr_pair(bsr_hopper(128, 1, 64, 8)),
    bsr_filled(bsr_hopper(32, 8, 128, 8)),
];

/// Those of them that there are also for a transposed A, a column-major B, and both.
const BSR_MATMUL_HOPPER_TRANSPOSED: &[BsrMatmulHopper] = &[
    bsr_hopper(64, 2, 256, 4),
    bsr_hopper(64, 1, 256, 5),
    bsr_hopper(64, 1, 128, 8),
    bsr_hopper(128, 1, 256, 4),
    bsr_hopper(128, 1, 128, 6),
];

const fn sddmm(
    block_size: u32,
    [warps_m, warps_n]: [u32; 2],
    stages: u32,
    min_blocks: u32,
) -> BsrSddmm {
    let (dtype, columns, block_k) = (DType::F16, 128, 64);
    BsrSddmm { dtype, block_size, columns, block_k, warps_m, warps_n, stages, min_blocks }
}

/// Tiles of the sampled product by block size, for all layouts of A and B: two stages where several
/// blocks of threads share a multiprocessor and hide each other's copies, three where registers
/// leave room for one or two.
const BSR_SDDMM: &[BsrSddmm] = &[
    sddmm(16, [1, 4], 2, 4),
    sddmm(32, [1, 4], 2, 4),
    sddmm(64, [2, 2], 2, 3),
    sddmm(128, [2, 2], 3, 2),
];

/// Tiles of the sampled product on Hopper by block size, for every layout of A and B: as many
/// stages as fit.
const BSR_SDDMM_HOPPER: &[(u32, u32)] = &[(64, 5), (128, 4)];

/// All rows, the preferred targets first. Of rows that suit a problem equally well the first is
/// taken. Each has a committed image, a line in `kernels.lock` and a recorded GPU pass.
pub fn rows() -> &'static [Row] {
    static ROWS: LazyLock<Vec<Row>> = LazyLock::new(|| {
        let mut rows = Vec::new();
        for target in Target::ALL {
            let mut push = |variant| rows.push(Row { variant, target });
            for dtype in [DType::F16, DType::BF16] {
                for &tile in ATTENTION_FWD_HOPPER.iter().filter(|_| target == Target::Sm90a) {
                    for lse in [false, true] {
                        push(Variant::AttentionFwdHopper(AttentionFwdHopper {
                            dtype,
                            lse,
                            ..tile
                        }));
                    }
                }
                for &(_, tile) in
                    ATTENTION_FWD.iter().filter(|(targets, _)| targets.contains(&target))
                {
                    push(Variant::AttentionFwd(AttentionFwd { dtype, ..tile }));
                }
                for &tile in BSR_MATMUL_HOPPER.iter().filter(|_| target == Target::Sm90a) {
                    push(Variant::BsrMatmulHopper(BsrMatmulHopper { dtype, ..tile }));
                }
                for &tile in BSR_MATMUL_HOPPER_TRANSPOSED.iter().filter(|_| target == Target::Sm90a)
                {
                    for [a_transposed, b_column_major] in
                        [[true, false], [false, true], [true, true]]
                    {
                        let tile = BsrMatmulHopper { dtype, a_transposed, b_column_major, ..tile };
                        push(Variant::BsrMatmulHopper(tile));
                    }
                }
                for &(block_size, stages) in
                    BSR_SDDMM_HOPPER.iter().filter(|_| target == Target::Sm90a)
                {
                    for [a, b] in Major::ALL.into_iter().flat_map(|a| Major::ALL.map(|b| [a, b])) {
                        push(Variant::BsrSddmmHopper(BsrSddmmHopper {
                            dtype,
                            block_size,
                            a,
                            b,
                            stages,
                        }));
                    }
                }
                for &tile in BSR_SDDMM.iter().filter(|_| ALL.contains(&target)) {
                    push(Variant::BsrSddmm(BsrSddmm { dtype, ..tile }));
                }
                for &(_, tile) in BSR_MATMUL.iter().filter(|(targets, _)| targets.contains(&target))
                {
                    push(Variant::BsrMatmul(BsrMatmul { dtype, ..tile }));
                }
                for &(_, tile) in
                    BSR_MATMUL_ANY.iter().filter(|(targets, _)| targets.contains(&target))
                {
                    push(Variant::BsrMatmulAny(BsrMatmul { dtype, ..tile }));
                }
            }
            let kernels = BlockMaskKernel::ALL.into_iter().filter(|_| ALL.contains(&target));
            kernels.for_each(|kernel| push(Variant::BlockMask(kernel)));
            let probes = Probe::ALL.into_iter().filter(|probe| probe.targets().contains(&target));
            probes.for_each(|probe| push(Variant::Probe(probe)));
        }
        rows
    });
    &ROWS
}
