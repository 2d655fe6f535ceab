//! Streams as programs and frameworks have them.

use antiphon_device::cuda::{Context, Stream, StreamRef};

/// A stream of a GPU, into which a call is put: one of this library (`&stream`), or one of a framework
/// ([`from_raw`](Self::from_raw)).
#[derive(Debug, Clone, Copy)]
pub struct GpuStream<'a> {
    device: u32,
    raw: usize,
    /// None for a framework's.
    own: Option<StreamRef<'a>>,
}

impl GpuStream<'static> {
    /// A framework's stream on a device, as a number such as `torch.cuda.current_stream().cuda_stream`; 0 is the legacy default
    /// stream.
    ///
    /// # Safety
    /// The stream is one of the device, and lives as long as what is returned is used.
    pub unsafe fn from_raw(device: u32, raw: usize) -> Self {
        Self { device, raw, own: None }
    }
}

impl<'a> GpuStream<'a> {
    /// The number of the GPU.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// The stream as calls on the GPU's context take it.
    pub(crate) fn on<'b>(&'b self, context: &'b Context) -> StreamRef<'b> {
        match self.own {
            Some(own) => own,
            // SAFETY: whoever made this has promised it.
            None => unsafe { context.borrow_stream(self.raw) },
        }
    }
}

impl<'a> From<StreamRef<'a>> for GpuStream<'a> {
    fn from(stream: StreamRef<'a>) -> Self {
        Self { device: stream.context().device().ordinal(), raw: stream.as_raw(), own: Some(stream) }
    }
}

impl<'a> From<&'a Stream> for GpuStream<'a> {
    fn from(stream: &'a Stream) -> Self {
        stream.borrow().into()
    }
}
