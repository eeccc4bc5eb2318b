//! Masks of full and partial blocks from sources of token pairs: cases as plain data, with the
//! definition of what each shows.

use blockflash_ops::{
    Align, BlockGeometry, BlockMask, BlockMaskBuffer, Mask, Stream, Tensor, TokenChoice,
    TokenSource,
};

/// A source, with its numbers.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// Booleans of pairs.
    Bool,
    /// Ranges of a query.
    Ranges(usize),
    /// Ids of documents.
    Documents,
    /// How far before a node its parent is, at most; 0: any number, also of a later node.
    Tree(usize),
    /// Stride, and where query 0 stands.
    Strided(usize, Align),
    /// Grid, window and dilation.
    Grid([&'static [usize]; 3]),
}

/// A mask that is built from pairs of tokens.
#[derive(Clone, Copy, Debug)]
pub struct TokenCase {
    /// Queries and keys.
    pub lengths: [usize; 2],
    /// Queries and keys of a block.
    pub blocks: [usize; 2],
    /// Batch entries and heads.
    pub groups: [usize; 2],
    /// Queries and keys of squares in which all pairs are alike, or tokens of documents.
    pub scale: usize,
    /// The source.
    pub kind: Kind,
    /// Hides pairs outside of it.
    pub within: Mask,
    /// The token mask of the calls, which leaves out blocks.
    pub mask: Mask,
}

/// What a source holds: bytes, or numbers of queries and keys.
#[derive(Clone, Debug, Default)]
pub struct TokenData {
    /// Booleans.
    pub bytes: Vec<u8>,
    /// Ranges, ids or parents, and ids of the keys.
    pub numbers: [Vec<i32>; 2],
}

const WINDOW: Mask = Mask::Window { left: Some(90), right: Some(30), align: Align::TopLeft };

/// Grids of 300, 300, 960 and 840 tokens.
const GRIDS: [[&[usize]; 3]; 4] = [
    [&[300], &[70], &[1]],
    [&[15, 20], &[4, 7], &[1, 2]],
    [&[8, 10, 12], &[3, 4, 5], &[2, 2, 1]],
    [&[4, 5, 6, 7], &[2, 2, 3, 3], &[1, 2, 2, 1]],
];

/// Cases of every source, with odd lengths, all sizes of blocks, several heads and windows.
pub fn token_cases() -> Vec<TokenCase> {
    let all_blocks = [[64, 64], [128, 128], [64, 128], [128, 64], [256, 256]];
    let kinds = [
        Kind::Bool,
        Kind::Ranges(1),
        Kind::Ranges(2),
        Kind::Ranges(5),
        Kind::Documents,
        Kind::Tree(0),
        Kind::Tree(1),
        Kind::Tree(6),
        Kind::Strided(1, Align::TopLeft),
        Kind::Strided(3, Align::BottomRight),
        Kind::Strided(77, Align::TopLeft),
    ];
    let all_lengths = [[64, 64], [1, 500], [500, 1], [300, 333], [640, 512], [1000, 1001]];
    let mut cases = Vec::new();
    for (at, lengths) in all_lengths.into_iter().enumerate() {
        for (i, blocks) in all_blocks.into_iter().enumerate() {
            for (k, &kind) in kinds.iter().enumerate() {
                if matches!(kind, Kind::Tree(_)) && lengths[0] > lengths[1] {
                    continue;
                }
                cases.push(TokenCase {
                    lengths,
                    blocks,
                    groups: [[1, 1], [2, 3], [1, 4]][(at + i + k) % 3],
                    scale: [1, 70, 200][(at + i) % 3],
                    kind,
                    within: [Mask::Full, Mask::Full, Mask::causal(), WINDOW][(at + i + k) % 4],
                    mask: if i % 2 == 0 { Mask::Full } else { Mask::causal() },
                });
            }
        }
    }
    for (i, blocks) in all_blocks.into_iter().enumerate() {
        for grid in GRIDS {
            let tokens = grid[0].iter().product();
            let within = [Mask::Full, WINDOW][i % 2];
            let (kind, groups, mask) = (Kind::Grid(grid), [1 + i % 2, 1 + i % 3], Mask::Full);
            cases.push(TokenCase {
                lengths: [tokens; 2],
                blocks,
                groups,
                scale: 1,
                kind,
                within,
                mask,
            });
        }
        // Paths of more than a thousand nodes.
        cases.push(TokenCase {
            lengths: [2500, 2600],
            blocks,
            groups: [1, 1],
            scale: 1,
            kind: Kind::Tree([1, 3, 40][i % 3]),
            within: Mask::Full,
            mask: Mask::Full,
        });
    }
    cases
}

fn noise(numbers: [usize; 4]) -> usize {
    let mix = |hash: u64, &number: &usize| {
        (hash ^ number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31)
    };
    numbers.iter().fold(7, mix) as usize
}

impl TokenCase {
    /// The blocks.
    pub fn geometry(&self) -> BlockGeometry {
        let ([q, kv], [block_q, block_kv]) = (self.lengths, self.blocks);
        BlockGeometry::new(q, kv, block_q, block_kv).unwrap()
    }

    /// A buffer with room for all blocks.
    pub fn buffer(&self, transposed: bool, stream: &Stream) -> BlockMaskBuffer {
        let geometry = self.geometry();
        let blocks = self.groups[0] * self.groups[1] * geometry.rows() * geometry.cols();
        let buffer =
            BlockMaskBuffer::new(geometry, self.groups[0], self.groups[1], blocks, stream).unwrap();
        let buffer = if transposed { buffer.with_transpose(stream).unwrap() } else { buffer };
        buffer.with_bits(blocks, stream).unwrap()
    }

    /// Data that looks random, with values that no well-behaved caller passes.
    pub fn data(&self, seed: usize) -> TokenData {
        let ([batch, heads], [queries, keys]) = (self.groups, self.lengths);
        let rows = (0..batch * heads * queries).map(|row| (row / queries, row % queries));
        let mut data = TokenData::default();
        match self.kind {
            Kind::Bool => data.bytes.extend(rows.flat_map(|(group, query)| {
                (0..keys).map(move |key| {
                    let random = noise([group + seed, query / self.scale, key / self.scale, 1]);
                    if random.is_multiple_of(3) { 1 + (random >> 8) as u8 % 255 } else { 0 }
                })
            })),
            Kind::Ranges(count) => data.numbers[0].extend(rows.flat_map(|(group, query)| {
                (0..count).flat_map(move |range| {
                    let random = noise([group + seed, query / self.scale, range, 0]);
                    let start = (random % (keys + 40)) as i32 - 20;
                    let end = start + (random >> 32) as i32 % 200 - 10;
                    match random >> 20 & 7 {
                        0 => [i32::MIN, end],
                        1 => [i32::MAX, end],
                        2 => [start, i32::MIN],
                        3 => [start, i32::MAX],
                        _ => [start, end],
                    }
                })
            })),
            Kind::Documents => {
                for (which, length) in self.lengths.into_iter().enumerate() {
                    data.numbers[which].extend((0..batch * length).map(|at| {
                        let (entry, token) = (at / length, at % length);
                        let random = noise([entry + seed, token, which, 2]);
                        match noise([entry + seed, token / self.scale, 0, 3]) % 5 {
                            // Padding, and the highest id, of documents far from each other.
                            0 => [-1, i32::MIN][random % 2],
                            1 => i32::MAX,
                            _ if random.is_multiple_of(150) => 0,
                            _ => (token / self.scale) as i32,
                        }
                    }));
                }
            }
            Kind::Tree(far) => data.numbers[0].extend((0..batch * queries).map(|at| {
                let (entry, node) = (at / queries, at % queries);
                let random = noise([entry + seed, node, 0, 4]);
                match far {
                    0 if random.is_multiple_of(9) => (random >> 20) as i32,
                    0 => (random % (queries + 20)) as i32 - 10,
                    _ => node as i32 - 1 - (random % far) as i32,
                }
            })),
            Kind::Strided(..) | Kind::Grid(_) => {}
        }
        data
    }

    /// The tensors of the source; those that it has not are empty.
    pub fn tensors(&self, data: &TokenData, stream: &Stream) -> [Tensor; 2] {
        let ([batch, heads], [queries, keys]) = (self.groups, self.lengths);
        let numbers = |which: usize, shape: &[usize]| {
            Tensor::from_slice(stream, &data.numbers[which], shape).unwrap()
        };
        let nothing = numbers(1, &[data.numbers[1].len()]);
        match self.kind {
            Kind::Bool => {
                let shape = [batch, heads, queries, keys];
                [Tensor::from_slice(stream, &data.bytes, &shape).unwrap(), nothing]
            }
            Kind::Ranges(count) => [numbers(0, &[batch, heads, queries, 2 * count]), nothing],
            Kind::Documents => [numbers(0, &[batch, queries]), numbers(1, &[batch, keys])],
            Kind::Tree(_) => [numbers(0, &[batch, queries]), nothing],
            Kind::Strided(..) | Kind::Grid(_) => [numbers(0, &[0]), nothing],
        }
    }

    /// What a buffer is built from.
    pub fn choice<'a>(&self, [first, second]: &'a [Tensor; 2]) -> TokenChoice<'a> {
        let source = match self.kind {
            Kind::Bool => TokenSource::Bool(first.view()),
            Kind::Ranges(_) => TokenSource::Ranges(first.view()),
            Kind::Documents => {
                TokenSource::Documents { ids_q: first.view(), ids_kv: second.view() }
            }
            Kind::Tree(_) => TokenSource::Tree(first.view()),
            Kind::Strided(stride, align) => TokenSource::Strided { stride, align },
            Kind::Grid([grid, window, dilation]) => {
                TokenSource::Neighborhood { grid, window, dilation }
            }
        };
        TokenChoice { source, within: self.within, mask: self.mask }
    }

    /// What the CPU makes of the data.
    pub fn on_host(&self, data: &TokenData, transposed: bool) -> BlockMask {
        let host = blockflash_ops::Device::cpu().stream().unwrap();
        let mut buffer = self.buffer(transposed, &host);
        buffer.build_tokens(&self.choice(&self.tensors(data, &host)), &host).unwrap();
        buffer.to_host(&host).unwrap()
    }

    /// The definition: whether the source shows a query a key within the window.
    pub fn shows(&self, data: &TokenData, [batch, head, query, key]: [usize; 4]) -> bool {
        let [queries, keys] = self.lengths;
        let row = (batch * self.groups[1] + head) * queries + query;
        let [numbers, ids_kv] = &data.numbers;
        let shown = match self.kind {
            Kind::Bool => data.bytes[row * keys + key] != 0,
            Kind::Ranges(count) => numbers[row * 2 * count..][..2 * count]
                .chunks(2)
                .any(|ends| (ends[0].into()..ends[1].into()).contains(&(key as i64))),
            Kind::Documents => {
                let id = numbers[batch * queries + query];
                id >= 0 && id == ids_kv[batch * keys + key]
            }
            Kind::Tree(_) => {
                let before = keys - queries;
                let parent = |&node: &usize| {
                    let parent = numbers[batch * queries + node];
                    usize::try_from(parent).ok().filter(|&parent| parent < node)
                };
                key < before
                    || std::iter::successors(Some(query), parent).any(|node| node == key - before)
            }
            Kind::Strided(stride, align) => {
                let diagonal = match align {
                    Align::TopLeft => 0,
                    Align::BottomRight => keys as i64 - queries as i64,
                };
                (query as i64 + diagonal - key as i64) % stride as i64 == 0
            }
            Kind::Grid([grid, window, dilation]) => {
                let (mut own, mut other) = (query, key);
                (0..grid.len()).rev().all(|axis| {
                    let (size, count, step) = (grid[axis], window[axis], dilation[axis]);
                    let [at, to] = [own % size, other % size];
                    (own, other) = (own / size, other / size);
                    // Of the positions with the same remainder those around the own one.
                    let all = (size - at % step).div_ceil(step);
                    let start = (at / step).saturating_sub(count / 2).min(all - count);
                    to % step == at % step && (start..start + count).contains(&(to / step))
                })
            }
        };
        shown && self.within.visible(query, queries, keys).contains(&key)
    }
}
