use super::candle_core;

/// An error of blockflash as one of candle, which keeps its type: see
/// [`candle_core::Error::Wrapped`].
pub(crate) fn refused(error: blockflash_ops::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
