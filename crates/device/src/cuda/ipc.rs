//! Memory that a framework allocated, opened by peers: CUDA IPC.
//!
//! A handle stands for a whole allocation, and a tensor may begin anywhere inside it (PyTorch makes many tensors from one segment).
//! So a rank sends the handle and the offset: [`IpcExport`]. Memory of [`Allocation`](super::Allocation) has no such
//! handle and is sent as a descriptor; [`PointerInfo`] tells the two kinds apart.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUpointer_attribute as Attribute};

use super::{Context, CudaError, DevicePointer, driver::call};

/// The allocation into which a pointer points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Nothing that CUDA knows: ordinary host memory, or an address that is not mapped.
    Unknown,
    /// Host memory that CUDA pinned.
    PinnedHost,
    /// Managed memory, which moves between host and devices.
    Managed,
    /// Device memory that [`IpcExport::of`] can share: of cuMemAlloc, and PyTorch's by default.
    Device,
    /// Device memory made by cuMemCreate, which [`Allocation::export`](super::Allocation::export) can share if it was
    /// made for that: ours, and PyTorch's expandable segments.
    Mapped {
        /// Whether it was made to be exported as a file descriptor.
        posix_fd: bool,
    },
    /// Device memory of a stream-ordered pool (cudaMallocAsync), which is shared only by sharing the pool.
    Pool,
}

/// A pointer's allocation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PointerInfo {
    /// What kind of memory it is.
    pub kind: MemoryKind,
    /// The ordinal of the device that holds the memory; none for memory that CUDA does not know.
    pub device: Option<u32>,
    /// Where the allocation begins; the pointer itself where that is unknown.
    pub base: DevicePointer,
    /// How many bytes the allocation has; 0 where that is unknown.
    pub len: u64,
}

impl PointerInfo {
    /// Looks a pointer up; any number will do.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn of(context: &Context, pointer: DevicePointer) -> Result<Self, CudaError> {
        const ASKED: [Attribute; 8] = [
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
        ];
        let _current = context.current()?;
        // None of these attributes is larger than 8 bytes; a smaller one leaves the upper bytes zero.
        let mut answers = [0u64; ASKED.len()];
        let mut places: [*mut c_void; ASKED.len()] = [std::ptr::null_mut(); ASKED.len()];
        for (place, answer) in places.iter_mut().zip(&mut answers) {
            *place = (answer as *mut u64).cast();
        }
        let mut asked = ASKED;
        let count = ASKED.len() as u32;
        // SAFETY: `count` attributes, and as many places of 8 bytes for the answers, which live until the call is over.
        unsafe { call!(cuPointerGetAttributes(count, asked.as_mut_ptr(), places.as_mut_ptr(), pointer.0)) }?;
        Ok(Self::interpret(pointer, answers))
    }

    fn interpret(pointer: DevicePointer, answers: [u64; 8]) -> Self {
        const HOST: u32 = sys::CUmemorytype::CU_MEMORYTYPE_HOST as u32;
        const DEVICE: u32 = sys::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32;
        let [memory, managed, ordinal, ipc, handle_types, pool, base, len] = answers;
        let posix_fd = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.0;
        let kind = match memory as u32 {
            _ if managed as u32 != 0 => MemoryKind::Managed,
            HOST => MemoryKind::PinnedHost,
            DEVICE if ipc as u32 != 0 => MemoryKind::Device,
            DEVICE if pool != 0 => MemoryKind::Pool,
            DEVICE => MemoryKind::Mapped { posix_fd: handle_types as u32 & posix_fd != 0 },
            _ => MemoryKind::Unknown,
        };
        let known = kind != MemoryKind::Unknown;
        Self {
            kind,
            device: known.then_some(ordinal as u32),
            base: if base == 0 { pointer } else { DevicePointer(base) },
            len,
        }
    }
}

/// The handle of an allocation: 64 bytes that mean something to every process of this machine that sees the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcHandle(pub [u8; 64]);

/// The description by which a peer opens a piece of memory: the handle of its allocation and the offset inside it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IpcExport {
    /// The allocation.
    pub handle: IpcHandle,
    /// Where in the allocation the pointer points, in bytes.
    pub offset: u64,
    /// How many bytes of the allocation follow the offset.
    pub len: u64,
}

impl IpcExport {
    /// The size of [`to_bytes`](Self::to_bytes).
    pub const BYTES: usize = 64 + 8 + 8;

    /// Exports the memory that a pointer, anywhere inside an allocation, points to. The memory must not be freed while
    /// a peer has the memory open.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] for memory of another kind, saying which; [`CudaError::Call`].
    pub fn of(context: &Context, pointer: DevicePointer) -> Result<Self, CudaError> {
        let info = PointerInfo::of(context, pointer)?;
        if let Some(reason) = refusal(info.kind) {
            return Err(CudaError::NotShareable { pointer: pointer.0, way: "CUDA IPC", reason });
        }
        let _current = context.current()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes an address and a size; the driver looks the pointer up in its tables.
        unsafe { call!(cuMemGetAddressRange_v2(&mut base, &mut size, pointer.0)) }?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: writes 64 bytes.
        unsafe { call!(cuIpcGetMemHandle(&mut handle, base)) }?;
        let offset = pointer.0 - base;
        let handle = IpcHandle(handle.reserved.map(|byte| byte as u8));
        Ok(Self { handle, offset, len: size as u64 - offset })
    }

    /// The handle, the offset and the length, the numbers in little-endian order.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..64].copy_from_slice(&self.handle.0);
        bytes[64..72].copy_from_slice(&self.offset.to_le_bytes());
        bytes[72..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// The description from the bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// [`CudaError::Encoding`] for another number of bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, CudaError> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().map_err(|_| CudaError::Encoding {
            what: "an IPC export",
            found: bytes.len(),
            expected: Self::BYTES,
        })?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        let handle = IpcHandle(std::array::from_fn(|index| bytes[index]));
        Ok(Self { handle, offset: number(64), len: number(72) })
    }
}

/// Another process's memory, open in this one; closed on drop, for which all work that uses it must be done.
#[derive(Debug)]
pub struct IpcMemory {
    context: Context,
    base: DevicePointer,
    export: IpcExport,
}

impl IpcMemory {
    /// Opens memory that another process exported, for kernels of this context's device, with peer access where it is
    /// another device's. The process that exported it cannot open it itself.
    ///
    /// # Errors
    /// [`CudaError::Call`], for instance when this process does not see the device, or has no link to it.
    pub fn open(context: &Context, export: IpcExport) -> Result<Self, CudaError> {
        let _current = context.current()?;
        let handle = sys::CUipcMemHandle { reserved: export.handle.0.map(|byte| byte as _) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: writes one address, which is closed in drop; a handle that is none is refused.
        unsafe { call!(cuIpcOpenMemHandle_v2(&mut base, handle, flags)) }?;
        Ok(Self { context: context.clone(), base: DevicePointer(base), export })
    }

    /// The address of the byte that was exported.
    pub fn pointer(&self) -> DevicePointer {
        self.base.offset(self.export.offset)
    }

    /// How many bytes of the allocation follow it.
    #[allow(clippy::len_without_is_empty)] // never empty: it has the byte that was exported
    pub fn len(&self) -> u64 {
        self.export.len
    }
}

impl Drop for IpcMemory {
    fn drop(&mut self) {
        let _current = self.context.current();
        // SAFETY: opened in `open` and closed once; the driver counts openings of the same allocation.
        let _ = unsafe { call!(cuIpcCloseMemHandle(self.base.0)) };
    }
}

/// Why memory of a kind has no IPC handle.
fn refusal(kind: MemoryKind) -> Option<&'static str> {
    match kind {
        MemoryKind::Device => None,
        MemoryKind::Unknown => Some("CUDA does not know this address: it must be device memory"),
        MemoryKind::PinnedHost => Some("it is pinned host memory; device memory would do"),
        MemoryKind::Managed => Some("it is managed memory; allocate it with cudaMalloc"),
        MemoryKind::Mapped { posix_fd: true } => {
            Some("it was made by cuMemCreate and goes by file descriptor (Allocation::retain and export)")
        }
        MemoryKind::Mapped { posix_fd: false } => Some(
            "it was made by cuMemCreate without a handle type to share it by; \
             with PyTorch, turn expandable_segments off in PYTORCH_CUDA_ALLOC_CONF",
        ),
        MemoryKind::Pool => Some("it is of a cudaMallocAsync pool; allocate it with cudaMalloc"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_survives_its_bytes() {
        let handle = IpcHandle(std::array::from_fn(|index| index as u8 * 3));
        let export = IpcExport { handle, offset: 0x1234_5678_9abc, len: 512 };
        assert_eq!(IpcExport::from_bytes(&export.to_bytes()), Ok(export));
        let error = IpcExport::from_bytes(&[0; 64]).unwrap_err().to_string();
        assert_eq!(error, "64 bytes are not an IPC export, which has 80");
    }

    #[test]
    fn the_drivers_answers_tell_the_kinds_apart() {
        let at = DevicePointer(0x7000_1000);
        let kind = |answers| PointerInfo::interpret(at, answers).kind;
        assert_eq!(kind([0; 8]), MemoryKind::Unknown);
        assert_eq!(kind([1, 0, 0, 0, 0, 0, 0, 0]), MemoryKind::PinnedHost);
        assert_eq!(kind([2, 1, 0, 0, 0, 0, 0, 0]), MemoryKind::Managed);
        assert_eq!(kind([2, 0, 0, 1, 0, 0, 0, 0]), MemoryKind::Device);
        assert_eq!(kind([2, 0, 0, 0, 1, 0, 0, 0]), MemoryKind::Mapped { posix_fd: true });
        assert_eq!(kind([2, 0, 0, 0, 8, 0, 0, 0]), MemoryKind::Mapped { posix_fd: false });
        assert_eq!(kind([2, 0, 0, 0, 1, 9, 0, 0]), MemoryKind::Pool);

        let tensor = PointerInfo::interpret(at, [2, 0, 3, 1, 0, 0, 0x7000_0000, 1 << 21]);
        let expected = PointerInfo {
            kind: MemoryKind::Device,
            device: Some(3),
            base: DevicePointer(0x7000_0000),
            len: 1 << 21,
        };
        assert_eq!(tensor, expected);
        assert_eq!(PointerInfo::interpret(at, [0; 8]).base, at);
    }

    #[test]
    fn a_refusal_says_what_would_do() {
        let reason = refusal(MemoryKind::Mapped { posix_fd: false }).unwrap();
        let error = CudaError::NotShareable { pointer: 0x10, way: "CUDA IPC", reason }.to_string();
        assert!(error.starts_with("the memory at 0x10 cannot be shared by CUDA IPC: "), "{error}");
        assert!(error.contains("expandable_segments"), "{error}");
        assert_eq!(refusal(MemoryKind::Device), None);
    }
}
