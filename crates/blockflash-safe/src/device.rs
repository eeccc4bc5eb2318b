use crate::gpu::{Context, CudaProperties};
use std::fmt;
use std::hash::{Hash, Hasher};

/// The CPU or one CUDA GPU. A small value to copy; the context of the GPU lives as long as the
/// process.
///
/// As text: `cpu`, `cuda:0`, `cuda:1`, …; `cuda` is read as `cuda:0`.
#[derive(Clone, Copy)]
pub struct Device(Option<&'static Context>);

impl Device {
    /// Host memory, host threads.
    pub const fn cpu() -> Device {
        Device(None)
    }

    /// Whether this is the CPU.
    #[inline]
    pub fn is_cpu(&self) -> bool {
        self.0.is_none()
    }

    /// Properties of the GPU; `None` for the CPU.
    #[inline]
    pub fn cuda_properties(&self) -> Option<&CudaProperties> {
        self.0.map(|context| &context.properties)
    }

    pub(crate) fn with_context(context: &'static Context) -> Device {
        Device(Some(context))
    }

    pub(crate) fn context(&self) -> Option<&'static Context> {
        self.0
    }
}

impl PartialEq for Device {
    #[inline]
    fn eq(&self, other: &Device) -> bool {
        self.0.map(|context| context.ordinal) == other.0.map(|context| context.ordinal)
    }
}

impl Eq for Device {}

impl Hash for Device {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.map(|context| context.ordinal).hash(state);
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            None => f.write_str("cpu"),
            Some(context) => write!(f, "cuda:{}", context.ordinal),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
