//! Attention of the last queries of each sequence to a cache of keys and values.

use super::decode_data::{CacheValues, DecodeData, drawn_pages, shuffled};
use super::decode_operands::DecodeOperands;
use super::decode_pages::Chosen;
use super::id::{Fields, Id, named, optional};
use super::limits;
use super::mask_kind::MaskKind;
use super::operands::{Operands, normal};
use super::peer::{PeerCase, PeerCaseError};
use super::shape::{Shape, head_dim_of_all};
use super::work::{TILE_ROWS, Work};
use crate::error::{Error, Result};
use crate::io::Array;
use crate::random;
use blockflash_ops::{Mask, Stream};
use blockflash_sys::{DType, HeadDims};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Queries `[batch, seqlen_q, num_heads_q, head_dim]`, the last ones of their sequences, under a
/// causal mask or a window that ends at the diagonal, and a cache of at most `seqlen_kv` keys for
/// each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct DecodeShape {
    /// Number of sequences.
    pub batch: usize,
    /// Queries of each sequence.
    pub seqlen_q: usize,
    /// Most keys of a sequence.
    pub seqlen_kv: usize,
    /// Heads of q and o.
    pub num_heads_q: usize,
    /// Heads of k and v.
    pub num_heads_kv: usize,
    /// Elements of a row of q and k, and of v and o. Competitors are told one.
    #[serde(rename = "head_dim", serialize_with = "head_dim_of_all")]
    pub head_dims: HeadDims,
    /// Keys of a page, whose order in memory is random; `None` is a contiguous cache.
    pub page_size: Option<usize>,
    /// Pages of a sequence that its queries visit, the last one among them; `None` is all. All
    /// heads visit the same.
    pub chosen: Option<usize>,
    /// How many keys each sequence has.
    pub fill: Fill,
    /// Keys that a query sees, the last ones up to the diagonal; `None`: all of them.
    pub window: Option<usize>,
    /// Whether the values are the first columns of the keys.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub latent: bool,
    /// Element type of q, the cache and o.
    pub dtype: DType,
    /// Element type of the cache if that holds codes, with a scale for each sequence and head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_dtype: Option<DType>,
}

/// How many of its `seqlen_kv` keys each sequence has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fill {
    /// All of them, and the call is given no lengths.
    #[default]
    Full,
    /// All of them, by a length on the device for each sequence.
    Equal,
    /// By lengths on the device: the longest sequence has all, and the one of rank r a part of 1/r.
    /// The longest is the last.
    Power,
}

named!(Fill: Full = "full", Equal = "equal", Power = "power");

impl DecodeShape {
    /// Keys of each sequence.
    pub fn lengths(&self) -> Vec<usize> {
        let length = |entry: usize| match self.fill {
            Fill::Full | Fill::Equal => self.seqlen_kv,
            Fill::Power => (self.seqlen_kv / (self.batch - entry)).max(self.seqlen_q),
        };
        (0..self.batch).map(length).collect()
    }

    /// Keys of each sequence without what the window hides.
    pub fn visited(&self) -> Vec<usize> {
        match (self.chosen, self.page_size) {
            (Some(chosen), Some(size)) => vec![chosen * size; self.batch],
            _ => self.lengths(),
        }
    }

    /// The mask as the library takes it.
    pub fn mask(&self) -> Mask {
        self.window.map_or(MaskKind::Causal, MaskKind::Window).into()
    }

    /// Keys of each sequence that its queries see.
    fn seen(&self) -> impl Iterator<Item = usize> {
        let most = self.window.map_or(usize::MAX, |keys| keys.saturating_add(self.seqlen_q - 1));
        self.visited().into_iter().map(move |keys| keys.min(most))
    }

    /// Bytes of a key and its value of all heads.
    fn pair_bytes(&self) -> usize {
        let row = if self.latent { self.head_dims.qk } else { self.head_dims.sum() };
        self.num_heads_kv * row * self.kv_dtype.unwrap_or(self.dtype).size()
    }

    /// Bytes of the keys and values that a launch reads.
    pub fn cache_bytes(&self) -> usize {
        self.pair_bytes() * self.seen().sum::<usize>()
    }

    /// The data of a case: arrays by `draw`, from a name, a shape, an element type and the random
    /// stream of the seed.
    ///
    /// # Errors
    /// Those of `draw`.
    pub fn data<E: From<Error>>(
        &self,
        seed: u64,
        draw: impl Fn(&'static str, &[usize], DType, u64) -> Result<Array, E>,
    ) -> Result<DecodeData, E> {
        let Self { batch, seqlen_q, seqlen_kv, num_heads_q, num_heads_kv, head_dims, .. } = *self;
        let page_size = self.page_size.unwrap_or(seqlen_kv);
        let columns = self.page_size.map_or(1, |size| seqlen_kv / size.max(1));
        let pages = batch * columns;
        let drawn = drawn_pages(pages, page_size * num_heads_kv * head_dims.max());
        let kv = |head_dim| [drawn, page_size, num_heads_kv, head_dim];
        let no_table = || Error::Option("the block table is no matrix".to_owned());
        let table = || Array::new(&[batch, columns], shuffled(pages, seed)).ok_or_else(no_table);
        let chosen = |entry: usize, chosen: usize| {
            let mut some = random::choose(chosen - 1, columns - 1, seed, 3 + entry as u64);
            some.push(columns - 1);
            some
        };
        let lengths = || self.lengths().into_iter().map(|length| length as i32).collect::<Vec<_>>();
        let of_kv = self.kv_dtype.unwrap_or(self.dtype);
        let unit = if of_kv == DType::I8 { 1.0 / random::I8_STEPS } else { 1.0 };
        let scale = |lane: u64| {
            let normals = random::normals(batch * num_heads_kv, seed.wrapping_add(lane));
            let scales = normals.into_iter().map(|x| unit * (x / 4.0).exp()).collect();
            Array::new::<f32>(&[batch, num_heads_kv], scales)
        };
        Ok(DecodeData {
            q: draw("q", &[batch, seqlen_q, num_heads_q, head_dims.qk], self.dtype, 0)?,
            k: draw("k", &kv(head_dims.qk), of_kv, 1)?,
            v: match self.latent {
                true => CacheValues::FirstColumns(head_dims.v),
                false => CacheValues::Own(draw("v", &kv(head_dims.v), of_kv, 2)?),
            },
            scales: [1, 2].map(|lane| self.kv_dtype.and_then(|_| scale(lane))),
            pages,
            block_table: self.page_size.map(|_| table()).transpose()?,
            seqused_kv: (self.fill != Fill::Full).then(|| lengths().into()),
            chosen: self.chosen.map_or(Chosen::All, |count| {
                Chosen::Columns((0..batch).map(|at| chosen(at, count)).collect())
            }),
            seed,
        })
    }
}

impl Fields for DecodeShape {
    const EMPTY: Self = Self {
        batch: 0,
        seqlen_q: 0,
        seqlen_kv: 0,
        num_heads_q: 0,
        num_heads_kv: 0,
        head_dims: HeadDims::all(0),
        page_size: None,
        chosen: None,
        fill: Fill::Full,
        window: None,
        latent: false,
        dtype: DType::F16,
        kv_dtype: None,
    };

    /// `decode_b8_q1_kv8192_h32kv8_d128_contiguous_full_bf16`,
    /// `decode_b1_q1_kv131072_h32kv8_d128_page64top32_equal_bf16`,
    /// `decode_b8_q1_kv8192_h64kv8_d64_contiguous_full_window128_bf16`,
    /// `decode_b8_q1_kv8192_h32kv8_d128_page64_equal_bf16_e4m3_bf16`,
    /// `decode_b64_q1_kv8192_h16kv1_d576v512_page64_equal_latent_bf16`.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()> {
        id.word("decode")?;
        id.field("b", &mut self.batch)?;
        id.field("q", &mut self.seqlen_q)?;
        id.field("kv", &mut self.seqlen_kv)?;
        let mut heads = [self.num_heads_q, self.num_heads_kv, self.num_heads_q];
        id.heads(&mut heads)?;
        [self.num_heads_q, self.num_heads_kv, _] = heads;
        id.field("d", &mut self.head_dims)?;
        let mut layout = (self.page_size, self.chosen);
        id.part(&mut layout, layout_text, layout_of)?;
        (self.page_size, self.chosen) = layout;
        id.name(&mut self.fill)?;
        if id.has("window", self.window.is_some()) {
            id.field("window", self.window.get_or_insert(0))?;
        }
        self.latent = id.has("latent", self.latent);
        if self.latent {
            id.word("latent")?;
        }
        id.name(&mut self.dtype)?;
        if id.has_value(self.kv_dtype.is_some(), |part| code_of(part).is_some()) {
            let (name, of) =
                (|code: &Option<DType>| code.map_or("", DType::name).to_owned(), code_of);
            id.part(&mut self.kv_dtype, name, |part| of(part).map(Some))?;
            let mut of_o = self.dtype;
            id.name(&mut of_o)?;
            return (of_o == self.dtype).then_some(());
        }
        Some(())
    }
}

/// The type of codes with this name.
pub(super) fn code_of(part: &str) -> Option<DType> {
    [DType::E4M3, DType::E5M2, DType::I8].into_iter().find(|code| code.name() == part)
}

/// `contiguous`, `page64` or `page64top32`.
fn layout_text(layout: &(Option<usize>, Option<usize>)) -> String {
    match layout {
        (None, _) => "contiguous".to_owned(),
        (Some(size), None) => format!("page{size}"),
        (Some(size), Some(chosen)) => format!("page{size}top{chosen}"),
    }
}

fn layout_of(part: &str) -> Option<(Option<usize>, Option<usize>)> {
    if part == "contiguous" {
        return Some((None, None));
    }
    let (size, chosen) = optional(part.strip_prefix("page")?, "top");
    let chosen = chosen.map(str::parse).transpose().ok()?;
    Some((Some(size.parse().ok()?), chosen))
}

/// What competitors are told besides the shape.
#[derive(Serialize)]
struct ForPeers<'a> {
    #[serde(flatten)]
    shape: &'a DecodeShape,
    lengths: Option<Vec<usize>>,
    /// Columns of a latent row that are values.
    #[serde(skip_serializing_if = "Option::is_none")]
    head_dim_v: Option<usize>,
}

impl Shape for DecodeShape {
    fn check(&self) -> Result<(), String> {
        let Self { batch, seqlen_q, seqlen_kv, .. } = *self;
        let heads = [self.num_heads_q, self.num_heads_kv];
        limits::attention(batch, [seqlen_q, seqlen_kv], heads, self.head_dims)?;
        if self.lengths().iter().any(|&length| length < seqlen_q) {
            return Err(format!("a sequence has fewer keys than {seqlen_q} queries"));
        }
        let pages = match self.page_size {
            Some(size) if size == 0 || !seqlen_kv.is_multiple_of(size) => {
                return Err(format!("{seqlen_kv} keys are no pages of {size}"));
            }
            size => size.map(|size| seqlen_kv / size),
        };
        if let Some(dtype) = self.kv_dtype.filter(|dtype| !dtype.is_code()) {
            return Err(format!("kv_dtype is {dtype}, expected e4m3, e5m2 or i8"));
        }
        if self.latent && (self.head_dims.v > self.head_dims.qk || self.kv_dtype.is_some()) {
            return Err(format!(
                "the values of a latent cache are {} columns of {}, and no codes",
                self.head_dims.v, self.head_dims.qk
            ));
        }
        if self.window == Some(0) || self.window.and(self.chosen).is_some() {
            return Err("a window has at least one key, and no pages are chosen in it".to_owned());
        }
        match (self.chosen, pages) {
            (None, _) => Ok(()),
            (Some(_), None) => Err("a contiguous cache has no pages to choose".to_owned()),
            (Some(chosen), Some(pages)) if chosen == 0 || chosen > pages => {
                Err(format!("{chosen} of {pages} pages cannot be chosen"))
            }
            // Queries see the keys before them by their rank among the chosen ones.
            (Some(_), _) if self.fill == Fill::Power || Some(seqlen_q) > self.page_size => {
                Err("chosen pages need full sequences and queries within a page".to_owned())
            }
            _ => Ok(()),
        }
    }

    fn op(&self) -> &'static str {
        "attention_decode"
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn peer_op(&self) -> &'static str {
        if self.latent { "mla_decode" } else { self.op() }
    }

    /// The cache is read once, for all the heads of a group and as many queries as fit into a tile.
    fn work(&self) -> Work {
        let Self { seqlen_q, num_heads_q, num_heads_kv, head_dims, .. } = *self;
        // The last query of a sequence sees all of its keys, the one before it one less, and each
        // no more than the window.
        let most = self.window.unwrap_or(usize::MAX);
        let pairs = |keys: usize| (0..seqlen_q).map(|before| (keys - before).min(most)).sum();
        let pairs: usize = self.visited().into_iter().map::<usize, _>(pairs).sum();
        let pairs = num_heads_q * pairs;
        let row = self.batch * seqlen_q * num_heads_q * self.dtype.size();
        let tiles = (seqlen_q * num_heads_q).div_ceil(num_heads_kv.max(1) * TILE_ROWS);
        let cache = self.cache_bytes() as f64;
        Work {
            flops: 2.0 * pairs as f64 * head_dims.sum() as f64,
            exps: pairs as f64,
            bytes: cache + (row * head_dims.sum()) as f64,
            l2_bytes: tiles as f64 * cache + (row * head_dims.qk) as f64,
        }
    }

    fn group(&self) -> String {
        let queries = match self.seqlen_q {
            1 => "one query".to_owned(),
            queries => format!("{queries} queries"),
        };
        let heads = format!("{} heads on {}", self.num_heads_q, self.num_heads_kv);
        let layout = match (self.page_size, self.chosen) {
            (None, _) => "contiguous".to_owned(),
            (Some(size), None) => format!("pages of {size}"),
            (Some(size), Some(_)) => format!("chosen pages of {size}"),
        };
        let fill = match self.fill {
            Fill::Full => "",
            Fill::Equal => ", with lengths",
            Fill::Power => ", unequal lengths",
        };
        let window = self.window.map_or(String::new(), |keys| format!(", window {keys}"));
        let codes = self.kv_dtype.map_or(String::new(), |dtype| format!(", {dtype} cache"));
        let rows = if self.latent { "latent rows, " } else { "" };
        let dims = self.head_dims;
        format!("{rows}head_dim {dims}, {heads}, {queries}, {layout}{fill}{window}{codes}")
    }

    fn peer_case(&self, seed: u64, _folder: &Path) -> Result<PeerCase, PeerCaseError> {
        if self.head_dims.single().is_none() && !self.latent {
            return Err(PeerCaseError::OneHeadDim);
        }
        if self.kv_dtype.is_some() {
            return Err(PeerCaseError::OneDType);
        }
        let lengths = (self.fill != Fill::Full).then(|| self.lengths());
        let head_dim_v = self.latent.then_some(self.head_dims.v);
        PeerCase::new(self.peer_op(), &ForPeers { shape: self, lengths, head_dim_v }, seed)
    }

    fn operands(&self, stream: &Stream, seed: u64) -> Result<Box<dyn Operands>> {
        let draw = |_: &str, shape: &[usize], dtype, lane| normal(shape, dtype, seed, lane);
        let data = self.data(seed, draw)?;
        Ok(Box::new(DecodeOperands::new(self.mask().into(), data, false, stream)?))
    }
}
