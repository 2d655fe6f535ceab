//! Relocatable code and its linking, without a GPU: what kernels call of NVSHMEM is found in its device library.

use antiphon_device::cuda::{
    Architecture, CudaError, DeviceLibrary, KernelCache, Nvshmem, Origin, PUT_SIGNAL, Program,
};
use antiphon_testing::{Need, is_emulated, need, nvjitlink, nvrtc, nvshmem};

use crate::compile::ARCHITECTURES;

const SOURCE: &str = "
extern \"C\" __global__ void __launch_bounds__(128, 8) put(u8* to, u8* from, u64* signal, int pe) {
    nvshmemi_transfer_put_signal<nvshmemi_threadgroup_warp>(to, from, 1024, signal, 1, NVSHMEMI_AMO_SIGNAL_ADD, pe, true);
    nvshmemi_transfer_put_signal<nvshmemi_threadgroup_thread>(to, from, 8, signal, 2, NVSHMEMI_AMO_SIGNAL_SET, pe, false);
    nvshmemi_transfer_put_signal<nvshmemi_threadgroup_block>(to, from, 8, signal, 2, NVSHMEMI_AMO_SIGNAL_SET, pe, false);
}
";

fn program(source: &str, architecture: Architecture) -> Program {
    Program::new("put.cu", "", architecture)
        .include("put_signal.cuh", PUT_SIGNAL)
        .include("put.cu", source)
        .relocatable()
}

#[test]
fn a_put_with_its_signal_links_for_every_architecture() {
    let (Some(nvrtc), Some(linker), Some(nvshmem)) = (nvrtc(), nvjitlink(), nvshmem()) else { return };
    let library = nvshmem.device_library().unwrap();
    for architecture in ARCHITECTURES {
        let program = program(SOURCE, architecture);
        let compiled = nvrtc.compile(&program).unwrap();
        assert_eq!(compiled.log, "", "{architecture}");
        let linked = linker.link(&program, &compiled.cubin, library).unwrap();
        assert_eq!(&linked[..4], b"\x7FELF", "{architecture}");
        let has = |name: &str| linked.windows(name.len()).any(|bytes| bytes == name.as_bytes());
        // What the host's library fills when the module is initialised.
        let is_linked = has("nvshmemi_device_state_d") && has("nvshmemi_device_lib_version_d");
        assert!(is_linked || is_emulated(), "{architecture}");
    }
}

#[test]
fn a_function_that_the_library_lacks_is_named() {
    let (Some(nvrtc), Some(linker), Some(nvshmem)) = (nvrtc(), nvjitlink(), nvshmem()) else { return };
    let links = if is_emulated() { Err("the emulator finds functions when it loads them") } else { Ok(()) };
    if need(Need::Hardware("what is linked"), links).is_none() {
        return;
    }
    let source = "extern __device__ void nowhere(); extern \"C\" __global__ void call() { nowhere(); }";
    let program = program(source, Architecture::SM_90A);
    let object = nvrtc.compile(&program).unwrap().cubin;
    let error = linker.link(&program, &object, nvshmem.device_library().unwrap()).unwrap_err();
    assert!(matches!(error, CudaError::Link { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("cannot link put.cu with") && text.contains("for sm_90a"), "{text}");
    assert!(text.contains("nowhere"), "{text}");
}

#[test]
fn linked_code_is_kept_for_the_library_that_it_was_linked_with() {
    let (Some(nvrtc), Some(linker), Some(nvshmem)) = (nvrtc(), nvjitlink(), nvshmem()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let (cache, program) = (KernelCache::at(folder.path()), program(SOURCE, Architecture::SM_90A));
    let library = nvshmem.device_library().unwrap();
    let [first, second] = [(); 2].map(|()| cache.link((nvrtc, linker), &program, library).unwrap());
    assert_eq!((first.origin, &second.origin), (Origin::Compiled, &Origin::Cached));
    assert_eq!(first.bytes, second.bytes);
    // The same library with another time in its first header is another one.
    let copy = folder.path().join("libnvshmem_device.a");
    let mut bytes = std::fs::read(library.path()).unwrap();
    assert!(bytes.starts_with(b"!<arch>\n"));
    bytes[8 + 16] ^= 1;
    std::fs::write(&copy, bytes).unwrap();
    let other = DeviceLibrary::read(copy, "a copy", "nothing").unwrap();
    assert_eq!(cache.link((nvrtc, linker), &program, &other).unwrap().origin, Origin::Compiled);
}

#[test]
fn the_wheels_library_is_the_tested_one() {
    let Some(nvshmem) = nvshmem() else { return };
    assert_eq!(nvshmem.version(), Nvshmem::TESTED);
    assert!(!nvshmem.is_initialized());
}
