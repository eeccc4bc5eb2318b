//! The grammar of ids: parts with `_` between, most of them a prefix and a value. A shape lists its
//! fields once, for reading and for writing.

use super::mask_kind::MaskKind;
use super::pattern::Pattern;
use blockflash_sys::DType;
use std::fmt;
use std::str::FromStr;

/// A shape whose fields follow one another in its id.
pub(super) trait Fields: Clone {
    /// What an id is read into.
    const EMPTY: Self;

    /// Takes the fields from an id, or adds them to one; `None` if the id is of something else.
    fn fields(&mut self, id: &mut Id<'_>) -> Option<()>;
}

/// An id that is read, or written.
pub(super) enum Id<'a> {
    /// The parts that are left.
    Read(&'a [&'a str]),
    /// The parts so far.
    Write(Vec<String>),
}

/// The shape with these parts.
pub(super) fn read<S: Fields>(parts: &[&str]) -> Option<S> {
    let (mut shape, mut id) = (S::EMPTY, Id::Read(parts));
    shape.fields(&mut id)?;
    matches!(id, Id::Read([])).then_some(shape)
}

/// The id of a shape.
pub(super) fn write<S: Fields>(shape: &S, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let mut id = Id::Write(Vec::new());
    // Only reading can fail.
    let _ = shape.clone().fields(&mut id);
    match id {
        Id::Write(parts) => f.write_str(&parts.join("_")),
        Id::Read(_) => Ok(()),
    }
}

/// Shapes whose text is their id.
macro_rules! displayed {
    ($($shape:ty),*) => {
        $(impl std::fmt::Display for $shape {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                $crate::case::id::write(self, f)
            }
        })*
    };
}
pub(super) use displayed;

/// Values that are parts of their own.
pub(super) trait Named: Copy + PartialEq + fmt::Display + 'static {
    /// All of them.
    const ALL: &'static [Self];
}

impl Named for DType {
    const ALL: &'static [Self] = &[DType::F16, DType::BF16, DType::F32];
}

impl Named for MaskKind {
    const ALL: &'static [Self] = &[MaskKind::Full, MaskKind::Causal];
}

impl Named for Pattern {
    const ALL: &'static [Self] = &Pattern::ALL;
}

impl Id<'_> {
    /// One part, by what makes text of its value and a value of its text.
    pub(super) fn part<T>(
        &mut self,
        value: &mut T,
        text: impl FnOnce(&T) -> String,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<()> {
        match self {
            Self::Read(parts) => {
                let (first, rest) = parts.split_first()?;
                (*value, *parts) = (parse(first)?, rest);
            }
            Self::Write(parts) => parts.push(text(value)),
        }
        Some(())
    }

    /// The part that comes next, of an id that is read.
    pub(super) fn next(&self) -> Option<&str> {
        match self {
            Self::Read(parts) => parts.first().copied(),
            Self::Write(_) => None,
        }
    }

    /// A word that tells operations apart.
    pub(super) fn word(&mut self, word: &str) -> Option<()> {
        self.part(&mut (), |()| word.to_owned(), |part| (part == word).then_some(()))
    }

    /// A value after a prefix.
    pub(super) fn field<T: FromStr + fmt::Display>(
        &mut self,
        prefix: &str,
        value: &mut T,
    ) -> Option<()> {
        self.part(value, |value| format!("{prefix}{value}"), |part| number(part, prefix))
    }

    /// One of a few names, in which `-` stands for `_`.
    pub(super) fn name<T: Named>(&mut self, value: &mut T) -> Option<()> {
        let named = |part: &str| {
            let part = part.replace('-', "_");
            T::ALL.iter().copied().find(|value| value.to_string() == part)
        };
        self.part(value, T::to_string, named)
    }

    /// `s4096`, or `q1_kv8192`.
    pub(super) fn seqlens(&mut self, q: &mut usize, kv: &mut usize) -> Option<()> {
        match self.next().map_or(q == kv, |next| next.starts_with('s')) {
            true => {
                self.field("s", q)?;
                *kv = *q;
                Some(())
            }
            false => self.field("q", q).and_then(|()| self.field("kv", kv)),
        }
    }

    /// `h32`, or `h32kv8`.
    pub(super) fn heads(&mut self, q: &mut usize, kv: &mut usize) -> Option<()> {
        let mut both = [*q, *kv];
        let text = |&[q, kv]: &[usize; 2]| match q == kv {
            true => format!("h{q}"),
            false => format!("h{q}kv{kv}"),
        };
        self.part(&mut both, text, heads)?;
        [*q, *kv] = both;
        Some(())
    }
}

/// Splits an id into its parts. A pattern's name may hold the separator, and has `-` in its place.
pub(super) fn parts(id: &str) -> String {
    let join = |id: String, name: String| id.replace(&name, &name.replace('_', "-"));
    Pattern::ALL.iter().map(ToString::to_string).fold(id.to_owned(), join)
}

/// `_h32`, `_h32kv8`.
pub(super) fn shared(f: &mut fmt::Formatter<'_>, heads: [usize; 2]) -> fmt::Result {
    match heads {
        [q, kv] if q == kv => write!(f, "_h{q}"),
        [q, kv] => write!(f, "_h{q}kv{kv}"),
    }
}

pub(super) fn number<T: FromStr>(part: &str, prefix: &str) -> Option<T> {
    part.strip_prefix(prefix)?.parse().ok()
}

pub(super) fn pair(part: &str, prefix: &str) -> Option<[usize; 2]> {
    let (first, second) = part.strip_prefix(prefix)?.split_once("kv")?;
    Some([first.parse().ok()?, second.parse().ok()?])
}

/// `h32` or `h32kv8`.
pub(super) fn heads(part: &str) -> Option<[usize; 2]> {
    pair(part, "h").or_else(|| Some([number(part, "h")?; 2])).filter(|heads| heads[1] > 0)
}

pub(super) fn dtype(part: &str) -> Option<DType> {
    [DType::F16, DType::BF16, DType::F32].into_iter().find(|dtype| dtype.name() == part)
}

pub(super) fn pattern(part: &str) -> Option<Pattern> {
    Pattern::named(&part.replace('-', "_"))
}
