//! Memory of several processes. A child process is this same binary, which an environment variable makes act as the peer.

use std::{
    env, fs,
    os::fd::{AsFd, OwnedFd},
    process::{Command, Stdio},
};

use antiphon_device::cuda::{
    Allocation, Context, CudaError, DeviceMemory, DevicePointer, Driver, IpcExport, IpcMemory, Mapping,
    MemoryKind, PointerInfo, memory,
};

use antiphon_testing::link;

use crate::gpu;

const EXPORT: &str = "ANTIPHON_TEST_IPC_EXPORT";
const LENGTH: &str = "ANTIPHON_TEST_VMM_LENGTH";

fn read(context: &Context, pointer: DevicePointer) -> [u8; 16] {
    let (stream, mut bytes) = (context.stream().unwrap(), [0; 16]);
    // SAFETY: every pointer of these tests has 16 bytes behind it; `bytes` lives until the wait is over.
    unsafe { memory::copy_to_host(stream.borrow(), bytes.as_mut_ptr(), pointer, 16) }.unwrap();
    stream.borrow().synchronize().unwrap();
    bytes
}

fn write(context: &Context, pointer: DevicePointer, value: u8) {
    let stream = context.stream().unwrap();
    // SAFETY: as for `read`.
    unsafe { memory::fill(stream.borrow(), pointer, value, 16) }.unwrap();
    stream.borrow().synchronize().unwrap();
}

/// Runs one test of this binary as a peer.
fn peer(test: &str, variable: &str, value: &str, descriptor: Option<OwnedFd>) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(variable, value);
    command.stdin(descriptor.map_or(Stdio::null(), Stdio::from));
    let output = command.output().unwrap();
    let text =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "the peer failed:\n{text}");
}

fn map(context: &Context, allocation: Allocation) -> Mapping {
    allocation.map(&[context.device()]).unwrap()
}

#[test]
fn two_mappings_of_one_allocation_see_the_same_bytes() {
    let Some(context) = gpu() else { return };
    let granularity = Allocation::granularity(&context).unwrap();
    let allocation = Allocation::create(&context, granularity + 1).unwrap();
    assert_eq!(allocation.len(), 2 * granularity);
    let descriptor = allocation.export().unwrap();
    let first = map(&context, allocation);
    let imported = Allocation::import(&context, descriptor.as_fd(), first.len()).unwrap();
    drop(descriptor);
    let second = map(&context, imported);
    assert_ne!(first.pointer(), second.pointer());
    let last = first.len() as u64 - 16;
    write(&context, first.pointer().offset(last), 3);
    assert_eq!(read(&context, second.pointer().offset(last)), [3; 16]);

    let info = PointerInfo::of(&context, first.pointer()).unwrap();
    assert_eq!(info.kind, MemoryKind::Mapped { posix_fd: true }, "{info:?}");
    let error = IpcExport::of(&context, first.pointer()).unwrap_err().to_string();
    assert!(error.contains("cannot be shared by CUDA IPC: it was made by cuMemCreate"), "{error}");
    let retained = Allocation::retain(&context, first.pointer(), first.len()).unwrap();
    retained.export().unwrap();

    // The memory lives as long as anybody maps it.
    drop((first, retained));
    assert_eq!(read(&context, second.pointer().offset(last)), [3; 16]);
}

#[test]
fn a_mapping_gives_its_memory_back_and_keeps_its_address() {
    let Some(context) = gpu() else { return };
    let len = context.device().properties().unwrap().memory_bytes as usize / 8;
    let mut mapping = map(&context, Allocation::create(&context, len).unwrap());
    let (pointer, len) = (mapping.pointer(), mapping.len());
    let free = || context.memory().unwrap().free_bytes as usize;
    let before = free();
    for _ in 0..2 {
        mapping.release().unwrap();
        assert!(mapping.allocation().is_none());
    }
    // Other tests of this process take and give some too, but much less.
    assert!(free() > before + len / 2, "{before} free bytes became {} when {len} were given back", free());
    mapping.restore(Allocation::create(&context, len).unwrap()).unwrap();
    assert_eq!((mapping.pointer(), mapping.len()), (pointer, len));
    write(&context, pointer.offset(len as u64 - 16), 5);
    assert_eq!(read(&context, pointer.offset(len as u64 - 16)), [5; 16]);
}

#[test]
fn memory_comes_and_goes_without_leaks() {
    let Some(context) = gpu() else { return };
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    drop(map(&context, Allocation::create(&context, 1).unwrap()));
    let before = descriptors();
    let eighth = context.device().properties().unwrap().memory_bytes as usize / 8;
    for _ in 0..50 {
        // Six times the device's memory, if none were released.
        let allocation = Allocation::create(&context, eighth).unwrap();
        drop(allocation.export().unwrap());
        drop(map(&context, allocation));
    }
    // Other tests of this process open some too.
    assert!(descriptors() < before + 25, "{before} descriptors became {}", descriptors());
}

#[test]
fn a_descriptor_that_is_not_memory_is_refused() {
    let Some(context) = gpu() else { return };
    let file = fs::File::open("/dev/null").unwrap();
    let error = Allocation::import(&context, file.as_fd(), 1 << 21).unwrap_err();
    assert!(matches!(error, CudaError::Call { function: "cuMemImportFromShareableHandle", .. }), "{error}");
}

#[test]
fn a_peer_maps_what_a_descriptor_brings() {
    if let Ok(len) = env::var(LENGTH) {
        let context = Context::primary(Driver::load().unwrap().device(0).unwrap()).unwrap();
        let allocation =
            Allocation::import(&context, std::io::stdin().as_fd(), len.parse().unwrap()).unwrap();
        let mapping = map(&context, allocation);
        assert_eq!(read(&context, mapping.pointer()), [0xA1; 16]);
        write(&context, mapping.pointer(), 0xB2);
        return;
    }
    let Some(context) = gpu() else { return };
    let mapping = map(&context, Allocation::create(&context, 1 << 20).unwrap());
    write(&context, mapping.pointer(), 0xA1);
    let descriptor = mapping.allocation().unwrap().export().unwrap();
    let test = "sharing::a_peer_maps_what_a_descriptor_brings";
    peer(test, LENGTH, &mapping.len().to_string(), Some(descriptor));
    assert_eq!(read(&context, mapping.pointer()), [0xB2; 16]);
}

#[test]
fn a_peer_opens_the_middle_of_an_allocation() {
    if let Ok(hex) = env::var(EXPORT) {
        let digit = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(digit).collect();
        let export = IpcExport::from_bytes(&bytes).unwrap();
        let context = Context::primary(Driver::load().unwrap().device(0).unwrap()).unwrap();
        let opened = IpcMemory::open(&context, export).unwrap();
        // Opened twice, as two tensors of one segment are; the first close leaves it open.
        drop(IpcMemory::open(&context, export).unwrap());
        assert!(opened.len() >= (1 << 20) - 4096);
        assert_eq!(read(&context, opened.pointer()), [0xC3; 16]);
        write(&context, opened.pointer(), 0xD4);
        return;
    }
    let Some(context) = gpu() else { return };
    let memory = DeviceMemory::allocate(&context, 1 << 20).unwrap();
    let middle = memory.pointer().offset(4096);
    write(&context, middle, 0xC3);
    let export = IpcExport::of(&context, middle).unwrap();
    assert!(export.offset >= 4096, "{export:?}");
    let hex: String = export.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    peer("sharing::a_peer_opens_the_middle_of_an_allocation", EXPORT, &hex, None);
    assert_eq!(read(&context, middle), [0xD4; 16]);
}

#[test]
fn two_gpus_map_one_allocation() {
    let Some([first, second]) = link() else { return };
    let devices = [first.device(), second.device()];
    let mapping = Allocation::create(&second, 1 << 20).unwrap().map(&devices).unwrap();
    write(&first, mapping.pointer(), 6);
    assert_eq!(read(&second, mapping.pointer()), [6; 16]);
}
