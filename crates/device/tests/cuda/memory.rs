//! Memory of one process.

use antiphon_device::cuda::{CudaError, DeviceMemory, MemoryKind, PinnedMemory, PointerInfo, memory};
use antiphon_tensor::{DType, Device, TensorError};

use antiphon_testing::link;

use crate::gpu;

#[test]
fn bytes_go_there_and_back() {
    let Some(context) = gpu() else { return };
    let stream = context.stream().unwrap();
    let [first, second] = [(); 2].map(|()| DeviceMemory::allocate(&context, 1000).unwrap());
    let bytes: Vec<u8> = (0..1000).map(|index| index as u8).collect();
    first.write(&stream, 0, &bytes).unwrap();
    // SAFETY: both are 1000 bytes long and live until the read has waited.
    unsafe { memory::copy(stream.borrow(), second.pointer(), first.pointer().offset(10), 990) }.unwrap();
    let mut back = [0; 990];
    second.read(&stream, 0, &mut back).unwrap();
    assert_eq!(back, bytes[10..]);

    let error = first.write(&stream, 999, &[0; 2]).unwrap_err();
    assert_eq!(error, CudaError::OutOfBounds { offset: 999, len: 2, size: 1000 });
    let error = DeviceMemory::allocate(&context, 1 << 50).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(error.to_string().starts_with("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2): "), "{error}");
}

#[test]
fn views_are_of_the_memory_and_no_larger() {
    let Some(context) = gpu() else { return };
    let mut memory = DeviceMemory::allocate(&context, 100).unwrap();
    let view = memory.view(DType::F32, &[5, 5]).unwrap();
    assert_eq!(
        (view.as_ptr() as u64, view.shape(), view.num_bytes()),
        (memory.pointer().0, &[5, 5][..], 100)
    );
    assert_eq!(view.device(), Device::Cuda(context.device().ordinal()));
    assert_eq!(memory.view_mut(DType::U8, &[99]).unwrap().numel(), 99);
    let error = memory.view_mut(DType::F32, &[26]).unwrap_err();
    assert_eq!(error, TensorError::MemoryTooSmall { shape: vec![26], needed: 104, len: 100 });
    assert!(memory.view(DType::BF16, &[usize::MAX, 2]).is_err());
}

#[test]
fn pinned_memory_is_zeroed_and_reached_by_both() {
    let Some(context) = gpu() else { return };
    let stream = context.stream().unwrap();
    let pinned = PinnedMemory::allocate(&context, 4096).unwrap();
    // SAFETY: the memory is 4096 bytes long, and no device uses it at this moment.
    let host = unsafe { std::slice::from_raw_parts(pinned.host().as_ptr(), 4096) };
    assert!(host.iter().all(|&byte| byte == 0));
    // SAFETY: as above; the stream is waited for.
    unsafe { memory::fill(stream.borrow(), pinned.pointer().offset(4000), 7, 96) }.unwrap();
    stream.borrow().synchronize().unwrap();
    // SAFETY: the device is done with it.
    assert_eq!(unsafe { pinned.host().add(3999).cast::<[u8; 97]>().read_unaligned() }[..3], [0, 7, 7]);
}

#[test]
fn a_pointer_tells_its_kind_and_its_allocation() {
    let Some(context) = gpu() else { return };
    let device = DeviceMemory::allocate(&context, 1 << 20).unwrap();
    let info = PointerInfo::of(&context, device.pointer().offset(12345)).unwrap();
    assert_eq!((info.kind, info.device), (MemoryKind::Device, Some(0)));
    assert!(info.base <= device.pointer() && info.len >= 1 << 20, "{info:?}");

    let pinned = PinnedMemory::allocate(&context, 64).unwrap();
    assert_eq!(PointerInfo::of(&context, pinned.pointer()).unwrap().kind, MemoryKind::PinnedHost);
    let local = 0u8;
    let address = antiphon_device::cuda::DevicePointer(std::ptr::from_ref(&local) as u64);
    assert_eq!(PointerInfo::of(&context, address).unwrap().kind, MemoryKind::Unknown);
}

#[test]
fn bytes_go_from_one_gpu_to_another() {
    let Some([first, second]) = link() else { return };
    first.enable_peer_access(&second).unwrap();
    first.enable_peer_access(&second).unwrap();
    let (here, there) = (DeviceMemory::allocate(&first, 64), DeviceMemory::allocate(&second, 64));
    let (here, there) = (here.unwrap(), there.unwrap());
    let (stream, far_stream) = (first.stream().unwrap(), second.stream().unwrap());
    here.write(&stream, 0, &[5; 64]).unwrap();
    // SAFETY: both are 64 bytes long and live until the stream is done.
    unsafe { memory::copy(stream.borrow(), there.pointer(), here.pointer(), 64) }.unwrap();
    stream.borrow().synchronize().unwrap();
    let mut bytes = [0; 64];
    there.read(&far_stream, 0, &mut bytes).unwrap();
    assert_eq!(bytes, [5; 64]);
}
