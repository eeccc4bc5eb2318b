//! The options of the operators that front ends offer, each named once.
//!
//! A table is the only list of its options: the schema of an operator, the defaults, the order of
//! arguments and how they are read all follow from it.

/// An option of an operator.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Argument {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub kind: Kind,
    /// What it is if it is not given.
    pub default: Value,
}

/// The type of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A tensor that may be missing.
    Tensor,
    /// A number that may stand for the length of a dimension: a symbol in traces of torch.
    Size,
    /// A number.
    Int,
    /// A truth value.
    Bool,
    /// A number with a fraction.
    Float,
    /// The same, which may be missing.
    OptionalFloat,
}

impl Kind {
    /// The name of the type in schemas of torch.
    pub const fn in_torch(self) -> &'static str {
        match self {
            Self::Tensor => "Tensor?",
            Self::Size => "SymInt",
            Self::Int => "int",
            Self::Bool => "bool",
            Self::Float => "float",
            Self::OptionalFloat => "float?",
        }
    }
}

/// The default of an option.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value {
    /// No tensor, or no number.
    Missing,
    /// Of [`Kind::Size`] and [`Kind::Int`].
    Int(i64),
    /// Of [`Kind::Bool`].
    Bool(bool),
    /// Of [`Kind::Float`].
    Float(f64),
}

/// The arguments of a call, one after another in the order of its table.
pub trait Arguments {
    /// A tensor of the library.
    type Tensor;
    /// Why an argument cannot be read.
    type Error;

    /// The next argument, a tensor.
    ///
    /// # Errors
    /// The argument is something else.
    fn tensor(&mut self, name: &'static str) -> Result<Option<Self::Tensor>, Self::Error>;

    /// The next argument; `None` stands for the default.
    ///
    /// # Errors
    /// The argument is something else.
    fn int(&mut self, name: &'static str) -> Result<Option<i64>, Self::Error>;

    /// As [`int`](Self::int).
    ///
    /// # Errors
    /// The argument is something else.
    fn bool(&mut self, name: &'static str) -> Result<Option<bool>, Self::Error>;

    /// As [`int`](Self::int).
    ///
    /// # Errors
    /// The argument is something else.
    fn float(&mut self, name: &'static str) -> Result<Option<f64>, Self::Error>;

    /// As [`float`](Self::float); a number that is missing has no other default.
    ///
    /// # Errors
    /// The argument is something else.
    fn optional_float(&mut self, name: &'static str) -> Result<Option<f64>, Self::Error>;
}

/// The type, the default and the reading of an option, by its [`Kind`].
macro_rules! kind {
    (type Size) => { i64 };
    (type Int) => { i64 };
    (type Bool) => { bool };
    (type Float) => { f64 };
    (type OptionalFloat) => { Option<f64> };
    (value Size $default:expr) => { Value::Int($default) };
    (value Int $default:expr) => { Value::Int($default) };
    (value Bool $default:expr) => { Value::Bool($default) };
    (value Float $default:expr) => { Value::Float($default) };
    (value OptionalFloat None) => { Value::Missing };
    (read Size $from:ident $name:expr, $default:expr) => { $from.int($name)?.unwrap_or($default) };
    (read Int $from:ident $name:expr, $default:expr) => { $from.int($name)?.unwrap_or($default) };
    (read Bool $from:ident $name:expr, $default:expr) => { $from.bool($name)?.unwrap_or($default) };
    (read Float $from:ident $name:expr, $default:expr) => {
        $from.float($name)?.unwrap_or($default)
    };
    (read OptionalFloat $from:ident $name:expr, None) => { $from.optional_float($name)? };
}

/// Makes the types of a table.
macro_rules! options {
    (
        $(#[$about:meta])* $options:ident
        $(#[$about_tensors:meta])* $tensors:ident { $($(#[$of_tensor:meta])* $tensor:ident,)* }
        $(#[$about_numbers:meta])* $numbers:ident {
            $($(#[$of_number:meta])* $number:ident: $kind:ident = $default:tt,)*
        }
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug)]
        pub struct $options<T> {
            /// Tensors.
            pub tensors: $tensors<Option<T>>,
            /// Everything else.
            pub numbers: $numbers,
        }

        $(#[$about_tensors])*
        #[derive(Clone, Copy, Debug)]
        pub struct $tensors<T> {
            $($(#[$of_tensor])* pub $tensor: T,)*
        }

        $(#[$about_numbers])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        pub struct $numbers {
            $($(#[$of_number])* pub $number: kind!(type $kind),)*
        }

        impl Default for $numbers {
            fn default() -> Self {
                Self { $($number: $default,)* }
            }
        }

        impl $options<()> {
            /// The options in the order in which operators take them: tensors first.
            pub const TABLE: &[Argument] = &[
                $(Argument {
                    name: stringify!($tensor),
                    kind: Kind::Tensor,
                    default: Value::Missing,
                },)*
                $(Argument {
                    name: stringify!($number),
                    kind: Kind::$kind,
                    default: kind!(value $kind $default),
                },)*
            ];
        }

        impl<T> $options<T> {
            /// The options of a call.
            ///
            /// # Errors
            /// Those of the arguments.
            pub fn read<A: Arguments<Tensor = T>>(from: &mut A) -> Result<Self, A::Error> {
                let tensors = $tensors { $($tensor: from.tensor(stringify!($tensor))?,)* };
                let numbers = $numbers {
                    $($number: kind!(read $kind from stringify!($number), $default),)*
                };
                Ok(Self { tensors, numbers })
            }
        }

        impl $tensors<()> {
            /// How many there are.
            pub const COUNT: usize = [$(stringify!($tensor)),*].len();
        }

        impl<T> $tensors<T> {
            /// The same tensors, borrowed.
            pub fn each_ref(&self) -> $tensors<&T> {
                $tensors { $($tensor: &self.$tensor,)* }
            }

            /// What is made of each of them and its name.
            ///
            /// # Errors
            /// The first error of `make`.
            pub fn try_map<U, E>(
                self,
                mut make: impl FnMut(&'static str, T) -> Result<U, E>,
            ) -> Result<$tensors<U>, E> {
                Ok($tensors { $($tensor: make(stringify!($tensor), self.$tensor)?,)* })
            }
        }

        impl<T> From<$tensors<T>> for [T; $tensors::COUNT] {
            fn from(tensors: $tensors<T>) -> Self {
                [$(tensors.$tensor),*]
            }
        }

        impl<T> From<[T; $tensors::COUNT]> for $tensors<T> {
            fn from([$($tensor),*]: [T; $tensors::COUNT]) -> Self {
                Self { $($tensor),* }
            }
        }
    };
}

options! {
    /// What attention takes besides q, k and v.
    AttentionOptions
    /// The tensors among them.
    AttentionTensors {
        /// f32 `[heads_q]`: a logit per head that joins the denominator of the softmax.
        sink,
        /// i32 `[batch + 1]`: where the queries of each sequence of a packed batch start.
        cu_seqlens_q,
        /// i32 `[batch + 1]`: the same for keys and values.
        cu_seqlens_k,
        /// f16, bf16 or f32 `[batch | 1, heads_q | 1, seqlen_q | 1, seqlen_k | 1]`: what is added
        /// to the scores.
        bias,
        /// f32 `[heads_q]` or `[batch, heads_q]`: slopes of ALiBi.
        alibi_slopes,
        /// f32 `[1]` or `[batch | 1, heads_q | heads_k | 1]`: what the codes of queries of 8 bits
        /// are multiplied with.
        q_scale,
        /// f32 `[1]` or `[batch | 1, heads_k | 1]`: the same of keys.
        k_scale,
        /// The same of values.
        v_scale,
    }
    /// The numbers among them.
    AttentionNumbers {
        /// The most queries of a sequence, of a packed batch.
        max_q: Size = 0,
        /// The most keys of a sequence.
        max_k: Size = 0,
        /// Keys before a query's own; -1 does not limit them.
        left: Int = (-1),
        /// Keys after a query's own; -1 does not limit them.
        right: Int = (-1),
        /// Whether query 0 stands at key 0, rather than the last query at the last key.
        top_left: Bool = false,
        /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
        scale: OptionalFloat = None,
        /// Scores become `softcap * tanh(score / softcap)`; 0 is none.
        softcap: Float = 0.0,
        /// The number of a block mask; 0 is none.
        block_mask: Size = 0,
        /// Element type of the output: 1 is f16, 2 is bf16, 3 is f32, 0 is that of q, and bf16
        /// beside codes of 8 bits.
        out_dtype: Int = 0,
    }
}

options! {
    /// What attention over a cache takes besides q, the cache, and new keys and values.
    DecodeOptions
    /// The tensors among them.
    DecodeTensors {
        /// i32 `[batch]`: how many keys each sequence has.
        seqused_k,
        /// i32 `[batch, max_pages]`: the pages of each sequence.
        block_table,
        /// i32 `[batch + 1]`: where the queries of each sequence of a packed batch start.
        cu_seqlens_q,
        /// i32 `[batch + 1]`: the same for new keys and values.
        cu_seqlens_k,
        /// f32 `[heads_q]`: a logit per head that joins the denominator of the softmax.
        sink,
        /// `[positions, rotary_dim / 2]`: cosines by which queries and new keys are rotated.
        rotary_cos,
        /// As `rotary_cos`: sines.
        rotary_sin,
        /// i32 `[batch, heads_k, room]`: the visited columns of the block table.
        page_lists,
        /// i32 `[batch]`: how many entries of its lists each sequence visits.
        page_counts,
        /// f16, bf16 or f32 `[batch | 1, heads_q | 1, seqlen_q | 1, capacity | 1]`: what is added
        /// to the scores.
        bias,
        /// f32 `[heads_q]` or `[batch, heads_q]`: slopes of ALiBi.
        alibi_slopes,
        /// f32 `[1]`, `[batch | 1, heads_k | 1]` or `[pages | 1, page_size | 1, heads_k | 1]`: what
        /// the codes of a cache of 8-bit keys are multiplied with.
        k_scale,
        /// The same of the values.
        v_scale,
        /// u8 `[batch | 1, seqlen_q, tail]` or `[total_q, tail]`: 0 where a query does not see one
        /// of the last keys of its sequence.
        tail_mask,
    }
    /// The numbers among them.
    DecodeNumbers {
        /// The most queries of a sequence, of a packed batch.
        max_q: Size = 0,
        /// Keys before a query's own; -1 does not limit them.
        left: Int = (-1),
        /// Keys after a query's own; -1 does not limit them.
        right: Int = (-1),
        /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
        scale: OptionalFloat = None,
        /// Scores become `softcap * tanh(score / softcap)`; 0 is none.
        softcap: Float = 0.0,
        /// Whether elements 2 i and 2 i + 1 are rotated together, rather than i and
        /// i + rotary_dim / 2.
        interleaved: Bool = false,
        /// Whether the bits of a sequence depend on no other sequence of the batch.
        batch_invariant: Bool = false,
    }
}

/// The numbers of an operator that say what happens to a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreNumbers {
    /// Keys before a query's own; -1 does not limit them.
    pub left: i64,
    /// Keys after a query's own; -1 does not limit them.
    pub right: i64,
    /// Whether query 0 stands at key 0, rather than the last query at the last key.
    pub top_left: bool,
    /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Scores become `softcap * tanh(score / softcap)`; 0 is none.
    pub softcap: f64,
}

impl From<&AttentionNumbers> for ScoreNumbers {
    fn from(numbers: &AttentionNumbers) -> Self {
        let &AttentionNumbers { left, right, top_left, scale, softcap, .. } = numbers;
        Self { left, right, top_left, scale, softcap }
    }
}

impl From<&DecodeNumbers> for ScoreNumbers {
    fn from(numbers: &DecodeNumbers) -> Self {
        let &DecodeNumbers { left, right, scale, softcap, .. } = numbers;
        Self { left, right, top_left: false, scale, softcap }
    }
}

/// The tensors of an operator that say what happens to a score.
#[derive(Clone, Copy, Debug)]
pub struct ScoreTensors<T> {
    /// f32 `[heads_q]`: a logit per head that joins the denominator of the softmax.
    pub sink: T,
    /// What is added to the scores.
    pub bias: T,
    /// Slopes of ALiBi.
    pub alibi: T,
}

impl<T> From<AttentionTensors<T>> for ScoreTensors<T> {
    fn from(tensors: AttentionTensors<T>) -> Self {
        let AttentionTensors { sink, bias, alibi_slopes: alibi, .. } = tensors;
        Self { sink, bias, alibi }
    }
}

impl<T> From<DecodeTensors<T>> for ScoreTensors<T> {
    fn from(tensors: DecodeTensors<T>) -> Self {
        let DecodeTensors { sink, bias, alibi_slopes: alibi, .. } = tensors;
        Self { sink, bias, alibi }
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
