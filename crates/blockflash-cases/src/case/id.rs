//! The grammar of ids: parts with `_` between, most of them a prefix and a value. A shape lists its
//! fields once, for reading and for writing.

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

/// Values that are parts of their own.
pub(super) trait Named: Copy + PartialEq + fmt::Display + 'static {
    /// All of them.
    const ALL: &'static [Self];
}

impl Named for DType {
    const ALL: &'static [Self] = &[DType::F16, DType::BF16, DType::F32];
}

/// Names of the values of a type that has no others.
macro_rules! named {
    ($type:ident: $($value:ident = $name:literal),+) => {
        impl $crate::case::id::Named for $type {
            const ALL: &'static [Self] = &[$(Self::$value),+];
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$value => $name,)+
                })
            }
        }
    };
}
pub(super) use named;

/// The value with this name.
pub(super) fn with_name<T: Named>(name: &str) -> Option<T> {
    T::ALL.iter().copied().find(|value| value.to_string() == name)
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

    /// Whether the next part of an id that is read begins with this, or what is `written`.
    pub(super) fn has(&self, prefix: &str, written: bool) -> bool {
        match self {
            Self::Read(parts) => parts.first().is_some_and(|part| part.starts_with(prefix)),
            Self::Write(_) => written,
        }
    }

    /// Whether the next part of an id that is read is a value of this kind, or what is `written`.
    pub(super) fn has_value(&self, written: bool, is_value: impl Fn(&str) -> bool) -> bool {
        match self {
            Self::Read(parts) => parts.first().is_some_and(|part| is_value(part)),
            Self::Write(_) => written,
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
        self.part(value, T::to_string, |part| with_name(&part.replace('-', "_")))
    }

    /// `s4096`, or `q1_kv8192`.
    pub(super) fn seqlens(&mut self, q: &mut usize, kv: &mut usize) -> Option<()> {
        if self.has("s", q == kv) {
            self.field("s", q)?;
            *kv = *q;
            return Some(());
        }
        self.field("q", q)?;
        self.field("kv", kv)
    }

    /// Query heads, key-value heads and heads that have lists: `h32`, `h32kv8m8`. Equal numbers
    /// are not repeated.
    pub(super) fn heads(&mut self, heads: &mut [usize; 3]) -> Option<()> {
        let text = |&[q, kv, mask]: &[usize; 3]| {
            let other = |prefix: &str, heads: usize| match heads == q {
                true => String::new(),
                false => format!("{prefix}{heads}"),
            };
            format!("h{q}{}{}", other("kv", kv), other("m", mask))
        };
        self.part(heads, text, |part| {
            let (part, mask) = optional(part, "m");
            let (part, kv) = optional(part, "kv");
            let q = number(part, "h")?;
            let or_q = |part: Option<&str>| part.map_or(Some(q), |part| part.parse().ok());
            Some([q, or_q(kv)?, or_q(mask)?])
        })
    }
}

/// What is before a separator, and after it if there is one.
pub(super) fn optional<'a>(part: &'a str, separator: &str) -> (&'a str, Option<&'a str>) {
    part.split_once(separator).map_or((part, None), |(before, after)| (before, Some(after)))
}

pub(super) fn number<T: FromStr>(part: &str, prefix: &str) -> Option<T> {
    part.strip_prefix(prefix)?.parse().ok()
}

pub(super) fn pair(part: &str, prefix: &str) -> Option<[usize; 2]> {
    let (first, second) = part.strip_prefix(prefix)?.split_once("kv")?;
    Some([first.parse().ok()?, second.parse().ok()?])
}
