//! The properties of a device.

use std::fmt;

use antiphon_tensor::Device as TensorDevice;
use cudarc::driver::sys::{self, CUdevice_P2PAttribute as Link, CUdevice_attribute as Attribute};
use serde::{Deserialize, Serialize};

use super::{Architecture, CudaError, CudaVersion, Driver, driver::call};

/// One GPU that this process sees. Small and copied freely; it holds nothing open.
#[derive(Clone, Copy)]
pub struct Device {
    driver: &'static Driver,
    ordinal: u32,
    raw: sys::CUdevice,
}

/// The properties of a device, as plain data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// The product's name, such as `NVIDIA H200`.
    pub name: String,
    /// The name that stays the same whatever CUDA_VISIBLE_DEVICES says, as nvidia-smi writes it.
    pub uuid: String,
    /// The place on the PCI bus, such as `0000:19:00.0`.
    pub pci_bus_id: String,
    /// Major and minor compute capability: (9, 0) is Hopper.
    pub compute_capability: (u32, u32),
    /// How many streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of device memory.
    pub memory_bytes: u64,
    /// Bytes of level-2 cache.
    pub l2_bytes: u64,
    /// Bytes of shared memory that a block can have if it asks.
    pub shared_bytes_per_block: u32,
    /// Threads that one multiprocessor holds.
    pub threads_per_multiprocessor: u32,
    /// Whether all blocks of a grid can be made to run at once.
    pub cooperative_launch: bool,
    /// Whether blocks can be grouped into clusters.
    pub cluster_launch: bool,
    /// Whether streams can write words of 64 bits ([`memory::write_word`](super::memory::write_word)).
    pub stream_writes: bool,
    /// Whether memory can be created and mapped separately ([`Allocation`](super::Allocation)).
    pub virtual_memory: bool,
    /// Whether such memory can be handed over as a file descriptor.
    pub posix_fd_handles: bool,
    /// Whether such memory can be handed over to other machines of one NVLink domain.
    pub fabric_handles: bool,
    /// Whether a network card can reach such memory.
    pub rdma_virtual_memory: bool,
    /// Whether NVLink multicast objects are supported. Only ever asked: nothing here creates one.
    pub multicast: bool,
}

/// How one device reaches another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerLink {
    /// Whether it can load and store there.
    pub access: bool,
    /// Whether its atomics there are atomic.
    pub native_atomics: bool,
    /// The driver's ranking of the link: lower is faster.
    pub performance_rank: i32,
}

impl Device {
    pub(super) fn new(driver: &'static Driver, ordinal: u32) -> Result<Self, CudaError> {
        let mut raw = 0;
        // SAFETY: writes one integer.
        unsafe { call!(cuDeviceGet(&mut raw, ordinal as i32)) }?;
        Ok(Self { driver, ordinal, raw })
    }

    /// The driver that the device belongs to.
    pub fn driver(self) -> &'static Driver {
        self.driver
    }

    /// Its number among the visible devices.
    pub fn ordinal(self) -> u32 {
        self.ordinal
    }

    pub(super) fn raw(self) -> sys::CUdevice {
        self.raw
    }

    /// Major and minor compute capability.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn compute_capability(self) -> Result<(u32, u32), CudaError> {
        let major = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major as u32, minor as u32))
    }

    /// The architecture for which kernels are compiled.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn architecture(self) -> Result<Architecture, CudaError> {
        let (major, minor) = self.compute_capability()?;
        Ok(Architecture::of_capability(major, minor))
    }

    /// Everything about the device.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn properties(self) -> Result<DeviceProperties, CudaError> {
        use Attribute::*;
        let flag = |attribute| self.attribute(attribute).map(|value| value != 0);
        // A driver that does not know an attribute calls it an invalid value.
        let flag_since = |version, attribute| match self.driver.supports(version) {
            true => flag(attribute),
            false => Ok(false),
        };
        Ok(DeviceProperties {
            name: self.name()?,
            uuid: self.uuid()?,
            pci_bus_id: self.pci_bus_id()?,
            compute_capability: self.compute_capability()?,
            multiprocessors: self.multiprocessors()?,
            memory_bytes: self.memory_bytes()?,
            l2_bytes: self.attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as u64,
            shared_bytes_per_block: self.attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                as u32,
            threads_per_multiprocessor: self.attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?
                as u32,
            cooperative_launch: flag(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH)?,
            cluster_launch: flag(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH)?,
            stream_writes: flag_since(
                CudaVersion::new(12, 0),
                CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
            )?,
            virtual_memory: flag(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED)?,
            posix_fd_handles: flag(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
            fabric_handles: flag_since(
                CudaVersion::new(12, 4),
                CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
            )?,
            rdma_virtual_memory: self.has_rdma_virtual_memory()?,
            multicast: flag_since(CudaVersion::new(12, 1), CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED)?,
        })
    }

    /// One of the [`properties`](Self::properties), for calls that need no other.
    pub(super) fn multiprocessors(self) -> Result<u32, CudaError> {
        Ok(self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32)
    }

    pub(super) fn has_rdma_virtual_memory(self) -> Result<bool, CudaError> {
        let attribute = Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        Ok(self.attribute(attribute)? != 0)
    }

    /// How this device reaches `other`'s memory; itself trivially.
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn link_to(self, other: Device) -> Result<PeerLink, CudaError> {
        if self == other {
            return Ok(PeerLink { access: true, native_atomics: true, performance_rank: 0 });
        }
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { call!(cuDeviceGetP2PAttribute(&mut value, attribute, self.raw, other.raw)) }?;
            Ok::<_, CudaError>(value)
        };
        Ok(PeerLink {
            access: ask(Link::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED)? != 0,
            native_atomics: ask(Link::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED)? != 0,
            performance_rank: ask(Link::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK)?,
        })
    }

    /// How each of `devices` (row) reaches each (column).
    ///
    /// # Errors
    /// [`CudaError::Call`].
    pub fn links(devices: &[Device]) -> Result<Vec<Vec<PeerLink>>, CudaError> {
        devices.iter().map(|from| devices.iter().map(|to| from.link_to(*to)).collect()).collect()
    }

    pub(super) fn attribute(self, attribute: Attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        unsafe { call!(cuDeviceGetAttribute(&mut value, attribute, self.raw)) }?;
        Ok(value)
    }

    fn name(self) -> Result<String, CudaError> {
        let mut text = [0u8; 256];
        // SAFETY: writes at most 256 bytes, the last of them NUL.
        unsafe { call!(cuDeviceGetName(text.as_mut_ptr().cast(), 256, self.raw)) }?;
        Ok(until_nul(&text))
    }

    fn pci_bus_id(self) -> Result<String, CudaError> {
        let mut text = [0u8; 32];
        // SAFETY: writes at most 32 bytes, the last of them NUL.
        unsafe { call!(cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 32, self.raw)) }?;
        Ok(until_nul(&text))
    }

    fn uuid(self) -> Result<String, CudaError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes sixteen bytes.
        unsafe { call!(cuDeviceGetUuid_v2(&mut uuid, self.raw)) }?;
        Ok(format_uuid(uuid.bytes.map(|byte| byte as u8)))
    }

    fn memory_bytes(self) -> Result<u64, CudaError> {
        let mut bytes = 0;
        // SAFETY: writes one size.
        unsafe { call!(cuDeviceTotalMem_v2(&mut bytes, self.raw)) }?;
        Ok(bytes as u64)
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.ordinal == other.ordinal
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({self})")
    }
}

impl fmt::Display for Device {
    /// Writes `cuda:` and the ordinal.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        TensorDevice::from(*self).fmt(f)
    }
}

impl From<Device> for TensorDevice {
    fn from(device: Device) -> Self {
        TensorDevice::Cuda(device.ordinal)
    }
}

fn until_nul(bytes: &[u8]) -> String {
    let text = bytes.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}

/// `GPU-` and the groups of hexadecimal digits that nvidia-smi prints.
fn format_uuid(bytes: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    let mut rest = &bytes[..];
    for group in [4, 2, 2, 2, 6] {
        let (bytes, after) = rest.split_at(group);
        text.push('-');
        bytes.iter().for_each(|byte| text.push_str(&format!("{byte:02x}")));
        rest = after;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_writes_it() {
        let bytes = std::array::from_fn(|index| 0xA0 + index as u8);
        assert_eq!(format_uuid(bytes), "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }

    #[test]
    fn a_name_ends_at_its_nul() {
        assert_eq!(until_nul(b"NVIDIA H200\0\0junk"), "NVIDIA H200");
    }
}
