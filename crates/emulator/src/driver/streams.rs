//! Streams, events and graphs.
#![allow(clippy::missing_safety_doc)] // as cuda.h says

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{answer, code, current, device_count};
use crate::{
    Code,
    event::Event,
    graph::Graph,
    lock, memory,
    races::order,
    stream::{Stream, Work},
};

/// A handle is a pointer to one reference.
fn handle<T>(value: Arc<T>) -> *const T {
    Arc::into_raw(value)
}

/// The object of a handle.
unsafe fn object<T>(handle: *const T) -> Arc<T> {
    // SAFETY: made by `handle`, and not destroyed.
    unsafe {
        Arc::increment_strong_count(handle);
        Arc::from_raw(handle)
    }
}

/// The stream of a handle; null is the device's own.
pub(super) unsafe fn stream_of(handle: *const Stream) -> Arc<Stream> {
    static DEFAULT: Mutex<Vec<Arc<Stream>>> = Mutex::new(Vec::new());
    // cudaStreamLegacy and cudaStreamPerThread are numbers.
    if handle as usize > 2 {
        // SAFETY: a stream that was created here.
        return unsafe { object(handle) };
    }
    let mut all = lock(&DEFAULT);
    while all.len() < device_count() {
        let stream = Stream::new(all.len(), 0);
        all.push(stream);
    }
    all[current()].clone()
}

unsafe fn submit(stream: *const Stream, work: impl Fn() + Send + Sync + 'static) -> Code {
    let work: Work = Arc::new(work);
    // SAFETY: passed on to the caller.
    unsafe { stream_of(stream) }.submit(work);
    Code::OK
}

fn copy(to: u64, from: u64, len: usize) {
    // SAFETY: ranges that the caller keeps until the stream is done.
    unsafe { ptr::copy(from as *const u8, to as *mut u8, len) }
    order::copied(0, to, Some(from), len);
}

functions! {
    fn cuStreamCreateWithPriority(to: *mut *const Stream, _flags: c_uint, priority: c_int) {
        answer(to, Ok(handle(Stream::new(current(), priority))))
    }
    fn cuStreamDestroy_v2(stream: *const Stream) {
        let stream = Arc::from_raw(stream);
        stream.close();
        Code::OK
    }
    fn cuStreamQuery(stream: *const Stream) { code(stream_of(stream).query()) }
    fn cuStreamSynchronize(stream: *const Stream) { code(stream_of(stream).synchronize()) }
    fn cuStreamGetGreenCtx(_stream: *const Stream, green: *mut usize) { answer(green, Ok(0)) }
    fn cuGreenCtxGetDevResource(_green: usize, _resource: *mut c_void, _kind: u32) { Code::NOT_SUPPORTED }
    fn cuStreamIsCapturing(stream: *const Stream, status: *mut u32) {
        answer(status, Ok(stream_of(stream).capture().is_some().into()))
    }
    // It ends a capture, as the driver does.
    fn cuStreamGetId(stream: *const Stream, id: *mut u64) {
        let stream = stream_of(stream);
        answer(id, if stream.spoil_capture() { Err(Code::CAPTURE_UNSUPPORTED) } else { Ok(stream.id) })
    }
    fn cuStreamGetCaptureInfo_v2(stream: *const Stream, status: *mut u32, number: *mut u64,
            _graph: usize, _nodes: usize, _count: usize) {
        let capture = stream_of(stream).capture();
        number.write(capture.unwrap_or(0));
        answer(status, Ok(capture.is_some().into()))
    }
    fn cuStreamBeginCapture_v2(stream: *const Stream, _mode: u32) {
        if stream.is_null() { Code::CAPTURE_UNSUPPORTED } else { code(stream_of(stream).begin_capture()) }
    }
    fn cuStreamEndCapture(stream: *const Stream, graph: *mut *const Graph) {
        answer(graph, stream_of(stream).end_capture().map(|graph| handle(Arc::new(graph))))
    }
    fn cuStreamWaitEvent(stream: *const Stream, event: *const Event, flags: c_uint) {
        code(stream_of(stream).wait_for(&object(event), flags & 1 != 0))
    }
    fn cuEventCreate(to: *mut *const Event, flags: c_uint) { answer(to, Ok(handle(Event::new(flags & 2 == 0)))) }
    fn cuEventDestroy_v2(event: *const Event) {
        drop(Arc::from_raw(event));
        Code::OK
    }
    fn cuEventRecordWithFlags(event: *const Event, stream: *const Stream, flags: c_uint) {
        stream_of(stream).record(&object(event), flags & 1 != 0);
        Code::OK
    }
    fn cuEventQuery(event: *const Event) { code(object(event).query()) }
    fn cuEventSynchronize(event: *const Event) { code(object(event).synchronize()) }
    fn cuEventElapsedTime_v2(milliseconds: *mut f32, start: *const Event, end: *const Event) {
        answer(milliseconds, object(end).milliseconds_since(&object(start)))
    }
    fn cuGraphGetNodes(graph: *const Graph, _nodes: usize, count: *mut usize) { answer(count, Ok(object(graph).len())) }
    fn cuGraphInstantiateWithFlags(to: *mut *const Graph, graph: *const Graph, _flags: u64) {
        answer(to, Ok(handle(object(graph))))
    }
    fn cuGraphLaunch(graph: *const Graph, stream: *const Stream) {
        stream_of(stream).launch(&object(graph));
        Code::OK
    }
    fn cuGraphDestroy(graph: *const Graph) {
        drop(Arc::from_raw(graph));
        Code::OK
    }
    fn cuGraphExecDestroy(graph: *const Graph) {
        drop(Arc::from_raw(graph));
        Code::OK
    }
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        // Pageable memory is read before the call returns.
        if memory::region_of(from).is_none() {
            let bytes = std::slice::from_raw_parts(from as *const u8, len).to_vec();
            return submit(stream, move || copy(to, bytes.as_ptr() as u64, len));
        }
        submit(stream, move || copy(to, from, len))
    }
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        submit(stream, move || copy(to, from, len))
    }
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *const Stream) {
        submit(stream, move || copy(to, from, len))
    }
    fn cuStreamWriteValue64_v2(stream: *const Stream, to: u64, value: u64, _flags: c_uint) {
        submit(stream, move || {
            order::write_word(to, || AtomicU64::from_ptr(to as *mut u64).store(value, Ordering::Release));
        })
    }
    fn cuMemsetD8Async(to: u64, value: u8, len: usize, stream: *const Stream) {
        submit(stream, move || {
            ptr::write_bytes(to as *mut u8, value, len);
            order::copied(0, to, None, len);
        })
    }
    fn cuMemsetD32Async(to: u64, value: u32, count: usize, stream: *const Stream) {
        submit(stream, move || {
            std::slice::from_raw_parts_mut(to as *mut u32, count).fill(value);
            order::copied(0, to, None, 4 * count);
        })
    }
}
