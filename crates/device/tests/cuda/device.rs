//! The driver, devices, contexts, streams, events.

use std::time::Duration;

use antiphon_device::{
    DeviceError,
    cuda::{Context, CudaError, CudaVersion, Device, DeviceMemory, Driver, Event, memory},
    library::LibraryError,
};

use crate::gpu;

#[test]
fn without_a_driver_the_error_names_it_and_says_what_to_install() {
    match Driver::load() {
        Ok(driver) => assert!(driver.version() >= CudaVersion::new(12, 0)),
        Err(error @ CudaError::Library(LibraryError::Missing { .. })) => {
            let text = DeviceError::from(error.clone()).to_string();
            assert!(text.starts_with("no CUDA driver (libcuda): install the NVIDIA driver"), "{text}");
            assert!(text.contains("libcuda.so.1"), "{text}");
            assert_eq!(Driver::load().unwrap_err(), error, "the answer stays the same");
        }
        // A driver without a device.
        Err(error) => assert!(error.code().is_some(), "{error}"),
    }
}

#[test]
fn a_device_says_what_it_is() {
    let Some(context) = gpu() else { return };
    let device = context.device();
    let properties = device.properties().unwrap();
    eprintln!("{properties:#?}");
    assert!(properties.uuid.starts_with("GPU-") && properties.uuid.len() == 40, "{}", properties.uuid);
    assert!(
        properties.multiprocessors > 0 && properties.memory_bytes > 1 << 30 && properties.l2_bytes > 1 << 20
    );
    assert_eq!(properties.compute_capability, device.compute_capability().unwrap());
    assert_eq!(device.to_string(), "cuda:0");
    assert_eq!(antiphon_tensor::Device::from(device), antiphon_tensor::Device::Cuda(0));

    let devices = device.driver().devices().unwrap();
    let links = Device::links(&devices).unwrap();
    eprintln!("{links:?}");
    assert!((0..devices.len()).all(|index| links[index][index].access));
    let error = device.driver().device(1000).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "there is no CUDA device 1000: this process sees {} (see CUDA_VISIBLE_DEVICES)",
            devices.len()
        )
    );
}

#[test]
fn a_context_is_current_for_a_call_and_no_longer() {
    let Some(context) = gpu() else { return };
    // A thread that never used CUDA.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let clone = Context::primary(context.device()).unwrap();
            assert_eq!(clone, context);
            let outer = clone.current().unwrap();
            let inner = context.current().unwrap();
            drop(inner);
            drop(outer);
            // Works with nothing current.
            DeviceMemory::allocate(&context, 16).unwrap();
            context.synchronize().unwrap();
            context.enable_peer_access(&context).unwrap();
        });
    });
}

#[test]
fn events_order_streams_and_measure_time() {
    let Some(context) = gpu() else { return };
    let (first, second) = (context.stream().unwrap(), context.stream().unwrap());
    let memory = DeviceMemory::allocate(&context, 64 << 20).unwrap();
    let [start, end] = [(); 2].map(|()| Event::with_time(&context).unwrap());
    let ordering = Event::new(&context).unwrap();
    assert!(ordering.is_passed().unwrap(), "an event that was never recorded counts as passed");

    start.record(&first).unwrap();
    // SAFETY: the memory is 64 MiB, and lives until the streams are done.
    unsafe { memory::fill(first.borrow(), memory.pointer(), 1, memory.len()) }.unwrap();
    ordering.record(&first).unwrap();
    second.borrow().wait(&ordering).unwrap();
    // SAFETY: as above; the second fill waits for the first.
    unsafe { memory::fill_words(second.borrow(), memory.pointer(), 0x0202_0202, 1) }.unwrap();
    end.record(&second).unwrap();
    second.borrow().synchronize_within(Duration::from_secs(10)).unwrap();
    assert!(second.borrow().is_done().unwrap() && end.is_passed().unwrap());
    end.synchronize().unwrap();

    let mut bytes = [0; 8];
    memory.read(&second, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [2, 2, 2, 2, 1, 1, 1, 1]);
    match end.elapsed_since(&start) {
        Ok(time) => assert!(time > Duration::ZERO && time < Duration::from_secs(5), "{time:?}"),
        Err(error) => assert!(matches!(error, CudaError::DriverTooOld { .. }), "{error}"),
    }
    assert!(ordering.elapsed_since(&start).is_err(), "it has no time");
}

#[test]
fn the_default_streams_can_be_borrowed() {
    let Some(context) = gpu() else { return };
    let memory = DeviceMemory::allocate(&context, 4).unwrap();
    for raw in [0, 1, 2] {
        // SAFETY: the default streams always live.
        let stream = unsafe { context.borrow_stream(raw) };
        assert_eq!(stream.as_raw(), raw);
        assert!(!stream.is_capturing().unwrap());
        memory.write(stream, 0, &[raw as u8; 4]).unwrap();
        let mut bytes = [9; 4];
        memory.read(stream, 0, &mut bytes).unwrap();
        assert_eq!(bytes, [raw as u8; 4]);
    }
    let own = context.stream().unwrap();
    // SAFETY: the stream lives until the end of the test.
    let borrowed = unsafe { context.borrow_stream(own.borrow().as_raw()) };
    borrowed.synchronize().unwrap();
}
