//! Graphs: work recorded once and launched many times.

use std::ptr;

use cudarc::driver::sys;

use super::{Context, CudaError, StreamRef, driver::call};

/// Work that was recorded; destroyed on drop.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    raw: sys::CUgraph,
}

// SAFETY: a graph is not tied to a thread. It is not Sync, as the driver does not lock graphs.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` submits to the stream, and to streams that it makes wait for it and join it again. Nothing
    /// runs. Only this thread's calls are held to what a capture allows.
    ///
    /// # Errors
    /// What `work` returns; [`CudaError::Call`] when something in it cannot be recorded. The legacy default stream
    /// cannot.
    pub fn capture<'a, E: From<CudaError>>(
        stream: impl Into<StreamRef<'a>>,
        work: impl FnOnce(StreamRef<'a>) -> Result<(), E>,
    ) -> Result<Self, E> {
        let stream = stream.into();
        let context = stream.context();
        let _current = context.current()?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives; the capture is ended by `recording`.
        unsafe { call!(cuStreamBeginCapture_v2(stream.raw(), mode)) }?;
        let recording = Recording { stream };
        let done = work(stream);
        let graph = recording.end();
        // An error inside is the cause of the error at the end of the capture.
        done?;
        Ok(graph?)
    }

    /// How many nodes were recorded.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn node_count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: the graph lives; without room for nodes only their number is written.
        unsafe { call!(cuGraphGetNodes(self.raw, ptr::null_mut(), &mut count)) }?;
        Ok(count)
    }

    /// Makes the graph ready to launch, which takes a while: microseconds for every node.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn instantiate(&self) -> Result<GraphExec, CudaError> {
        let _current = self.context.current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the graph lives; writes one handle, which is destroyed in drop.
        unsafe { call!(cuGraphInstantiateWithFlags(&mut raw, self.raw, 0)) }?;
        Ok(GraphExec { context: self.context.clone(), raw })
    }
}

/// Runs `work`, which sets things up (memory, modules), whether or not a stream is being captured: this thread's calls are
/// not held meanwhile to what a capture allows. What it submits to a stream that is being captured is recorded as always.
///
/// # Errors
/// [`CudaError::Call`].
pub fn relaxed<T>(work: impl FnOnce() -> T) -> Result<T, CudaError> {
    // SAFETY: exchanges this thread's mode with the one that is given.
    with_mode(|mode| unsafe { call!(cuThreadExchangeStreamCaptureMode(mode)) }, work)
}

/// Runs `work` in the relaxed mode; `exchange` exchanges the thread's mode with the one that it is given. The mode comes back
/// also when `work` panics.
fn with_mode<T>(
    exchange: impl Fn(&mut sys::CUstreamCaptureMode) -> Result<(), CudaError>,
    work: impl FnOnce() -> T,
) -> Result<T, CudaError> {
    struct Back<E: Fn(&mut sys::CUstreamCaptureMode) -> Result<(), CudaError>> {
        exchange: E,
        mode: sys::CUstreamCaptureMode,
    }
    impl<E: Fn(&mut sys::CUstreamCaptureMode) -> Result<(), CudaError>> Drop for Back<E> {
        fn drop(&mut self) {
            // The thread had this mode before, so there is nothing in it to refuse.
            let _ = (self.exchange)(&mut self.mode);
        }
    }
    let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    exchange(&mut mode)?;
    let _back = Back { exchange, mode };
    Ok(work())
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by one capture and destroyed once.
        let _ = unsafe { call!(cuGraphDestroy(self.raw)) };
    }
}

/// A capture in progress. A panic in the work ends it too.
struct Recording<'a> {
    stream: StreamRef<'a>,
}

impl Recording<'_> {
    fn end(self) -> Result<Graph, CudaError> {
        let context = self.stream.context().clone();
        let raw = self.end_capture();
        std::mem::forget(self);
        Ok(Graph { context, raw: raw? })
    }

    fn end_capture(&self) -> Result<sys::CUgraph, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the stream lives and is being captured by this thread; writes one handle, or null with an error.
        unsafe { call!(cuStreamEndCapture(self.stream.raw(), &mut raw)) }?;
        Ok(raw)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if let Ok(raw) = self.end_capture() {
            // SAFETY: just made; no other code has the handle.
            let _ = unsafe { call!(cuGraphDestroy(raw)) };
        }
    }
}

/// A graph ready to launch; destroyed on drop, after which runs that were launched still complete.
#[derive(Debug)]
pub struct GraphExec {
    context: Context,
    raw: sys::CUgraphExec,
}

// SAFETY: an executable graph is not tied to a thread. It is not Sync, as the driver does not lock graphs.
unsafe impl Send for GraphExec {}

impl GraphExec {
    /// Puts a run of the whole graph into a stream. Runs of one graph follow each other, in any streams.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    ///
    /// # Safety
    /// The recorded work is still sound to run: the memory that it uses, the events and the kernels are alive.
    pub unsafe fn launch<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<(), CudaError> {
        let stream = stream.into();
        let _current = stream.context().current()?;
        // SAFETY: the graph and the stream live; the rest is passed on to the caller.
        unsafe { call!(cuGraphLaunch(self.raw, stream.raw())) }
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        let _current = self.context.current();
        // SAFETY: instantiated once and destroyed once.
        let _ = unsafe { call!(cuGraphExecDestroy(self.raw)) };
    }
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        panic::{AssertUnwindSafe, catch_unwind},
    };

    use sys::CUstreamCaptureMode as Mode;

    use super::*;

    #[test]
    fn the_mode_of_captures_comes_back_also_after_a_panic() {
        let current = Cell::new(Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let exchange = |mode: &mut Mode| {
            *mode = current.replace(*mode);
            Ok(())
        };
        let seen = with_mode(exchange, || current.get()).unwrap();
        assert_eq!(seen, Mode::CU_STREAM_CAPTURE_MODE_RELAXED);
        assert_eq!(current.get(), Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        let panicked = catch_unwind(AssertUnwindSafe(|| with_mode(exchange, || panic!("work fails"))));
        assert!(panicked.is_err());
        assert_eq!(current.get(), Mode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    }
}
