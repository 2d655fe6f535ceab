//! Anonymous memory that several processes map.
//!
//! A [`SharedMemory`] is a Linux memfd: it has no name in any file system, so nothing is left behind when its users
//! are killed; the kernel frees it with the last descriptor and mapping. It is sealed against resizing, so that no
//! process can turn another's load into a SIGBUS by truncating it. Pages exist from their first touch on, so a large
//! capacity costs address space only.

use std::{os::fd::OwnedFd, ptr::NonNull};

use rustix::{
    fs::{MemfdFlags, SealFlags},
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags},
    process::{Resource, getrlimit},
};

use crate::DeviceError;

/// A shared mapping of a sealed memfd; unmapped on drop. It takes no descriptor.
#[derive(Debug)]
pub struct SharedMemory {
    base: NonNull<u8>,
    len: usize,
    number: u64,
}

// SAFETY: the mapping is plain memory that lives as long as the value and is not tied to a thread. Access goes
// through raw pointers, whose users answer for synchronisation.
unsafe impl Send for SharedMemory {}
// SAFETY: as for Send: `&SharedMemory` only hands out the address.
unsafe impl Sync for SharedMemory {}

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl SharedMemory {
    /// Creates `len` bytes of zeroed shared memory and maps them. A process that receives the descriptor can
    /// [map](Self::from_fd) them too; the memory itself needs it no more.
    ///
    /// # Errors
    /// [`DeviceError::System`] when the kernel refuses the descriptor, the size or the mapping.
    pub fn create(len: usize) -> Result<(Self, OwnedFd), DeviceError> {
        let fd = rustix::fs::memfd_create("antiphon", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| DeviceError::system("memfd_create", e, "Linux 3.17 or newer is needed"))?;
        grow(&fd, len as u64).map_err(|e| {
            let remedy = "lower ANTIPHON_ARENA_BYTES, or raise the limit of file sizes (ulimit -f)";
            DeviceError::system(format!("ftruncate to {len} bytes"), e, remedy)
        })?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)
            .map_err(|e| DeviceError::system("fcntl F_ADD_SEALS", e, "the kernel must support sealing"))?;
        Ok((Self::map(&fd, len)?, fd))
    }

    /// Maps memory that another process created with [`create`](Self::create) and handed over.
    ///
    /// # Errors
    /// [`DeviceError::ForeignMemory`] when the descriptor has another size or lacks the seals;
    /// [`DeviceError::System`] when it cannot be mapped.
    pub fn from_fd(fd: OwnedFd, len: usize) -> Result<Self, DeviceError> {
        let size = rustix::fs::fstat(&fd)
            .map_err(|e| DeviceError::system("fstat", e, "the descriptor is not a file"))?
            .st_size;
        if size != len as i64 {
            return Err(DeviceError::ForeignMemory {
                found: format!("{size} bytes long"),
                expected: format!("{len} bytes"),
            });
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        if !seals.contains(SEALS) {
            return Err(DeviceError::ForeignMemory {
                found: format!("sealed with {seals:?}"),
                expected: format!("{SEALS:?}"),
            });
        }
        Self::map(&fd, len)
    }

    fn map(fd: &OwnedFd, len: usize) -> Result<Self, DeviceError> {
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        }
        .map_err(|e| {
            DeviceError::system(format!("mmap of {len} bytes"), e, "lower ANTIPHON_ARENA_BYTES, or ulimit -v")
        })?;
        let base = NonNull::new(base.cast()).expect("mmap does not return null on success");
        // The descriptor has just been mapped, so its inode can be read.
        let number = rustix::fs::fstat(fd).map_or(0, |file| file.st_ino);
        Ok(Self { base, len, number })
    }

    /// The first byte. Valid for [`len`](Self::len) bytes as long as the value lives.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// A number that no other shared memory of this machine has at the same time, and that is equal in all processes that map it.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Size in bytes.
    #[allow(clippy::len_without_is_empty)] // never empty: the kernel refuses to map nothing
    pub fn len(&self) -> usize {
        self.len
    }

    /// Gives the pages of a byte range, which begins with a page, back to the machine; they read as zero afterwards, in
    /// every process.
    ///
    /// # Errors
    /// [`DeviceError::System`] when the range does not begin with a page, or the kernel cannot punch holes.
    ///
    /// # Panics
    /// When the range does not lie inside the memory.
    pub fn release(&self, offset: usize, len: usize) -> Result<(), DeviceError> {
        assert!(offset + len <= self.len, "{offset} + {len} exceeds {}", self.len);
        if len == 0 {
            return Ok(());
        }
        // SAFETY: the range lies inside the mapping, which is of shared memory whose users expect any bytes.
        unsafe { rustix::mm::madvise(self.base.as_ptr().add(offset).cast(), len, Advice::LinuxRemove) }
            .map_err(|e| {
                DeviceError::system(format!("madvise remove of {len} bytes"), e, "tmpfs supports it")
            })
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are the mapping made in `map`, unmapped once; users of its addresses borrow from
        // owners of this value.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Gives a file its size. One beyond RLIMIT_FSIZE, which counts for shared memory too, is refused here: the kernel would
/// send SIGXFSZ, which kills without a word.
fn grow(fd: &OwnedFd, len: u64) -> Result<(), Errno> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < len => Err(Errno::FBIG),
        _ => rustix::fs::ftruncate(fd, len),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_see_the_same_bytes() {
        let (first, descriptor) = SharedMemory::create(8192).unwrap();
        let second = SharedMemory::from_fd(descriptor, 8192).unwrap();
        // SAFETY: both mappings are 8192 bytes long, and only this thread uses them.
        unsafe {
            first.base().add(5000).write(42);
            assert_eq!(second.base().add(5000).read(), 42);
            first.release(4096, 4096).unwrap();
            assert_eq!(second.base().add(5000).read(), 0);
        }
    }

    #[test]
    fn a_descriptor_of_another_size_or_without_seals_is_refused() {
        let (_memory, fd) = SharedMemory::create(4096).unwrap();
        let error = SharedMemory::from_fd(fd, 8192).unwrap_err().to_string();
        assert!(error.contains("4096") && error.contains("8192"), "{error}");

        let unsealed = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&unsealed, 4096).unwrap();
        assert!(matches!(SharedMemory::from_fd(unsealed, 4096), Err(DeviceError::ForeignMemory { .. })));
    }

    /// The limit is the whole process's, so this test runs once more in a process of its own.
    #[test]
    fn a_limit_of_file_sizes_is_an_error_and_not_a_signal() {
        if std::env::var_os("ANTIPHON_TEST_LIMITED").is_some() {
            let error = SharedMemory::create(1 << 20).unwrap_err().to_string();
            assert!(error.contains("1048576") && error.contains("ulimit -f"), "{error}");
            return;
        }
        let name = "host::memory::tests::a_limit_of_file_sizes_is_an_error_and_not_a_signal";
        let mut limited = std::process::Command::new("/bin/sh");
        limited.args(["-c", "ulimit -f 8; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
        limited.args(["--exact", name]).env("ANTIPHON_TEST_LIMITED", "1");
        let output = limited.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{:?}: {said}", output.status);
    }

    #[test]
    fn sealed_memory_cannot_be_truncated() {
        let (_memory, descriptor) = SharedMemory::create(4096).unwrap();
        assert!(rustix::fs::ftruncate(descriptor, 0).is_err());
    }
}
