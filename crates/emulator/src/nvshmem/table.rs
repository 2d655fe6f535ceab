//! Where PEs meet: a table in memory that they share.

use std::{
    ffi::c_int,
    io,
    os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd},
    ptr::NonNull,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::Duration,
};

const MOST: usize = 64;

/// `nvshmemx_uniqueid_t`: here the process that has the table, and its descriptor.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Id {
    version: c_int,
    process: u32,
    file: u32,
    padding: [u8; 116],
}

#[repr(C)]
struct Shared {
    arrived: AtomicU32,
    generation: AtomicU32,
    entries: [Entry; MOST],
}

#[repr(C)]
struct Entry {
    /// As `memory::export` has it.
    heap: [AtomicU64; 5],
    near: AtomicU64,
}

/// The table, as this process has mapped it, for good.
pub(super) struct Table {
    shared: NonNull<Shared>,
    count: usize,
}

// SAFETY: the table has atomics only.
unsafe impl Send for Table {}

impl Table {
    pub(super) fn create() -> io::Result<Id> {
        // SAFETY: a new descriptor.
        let file = unsafe {
            let file = libc::memfd_create(c"emulated PEs".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(file)
        };
        // SAFETY: an open descriptor.
        if unsafe { libc::ftruncate(file.as_raw_fd(), size_of::<Shared>() as i64) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let version = (1 << 16) + size_of::<Id>() as c_int;
        // Open for good: the others come when they come.
        Ok(Id { version, process: std::process::id(), file: file.into_raw_fd() as u32, padding: [0; 116] })
    }

    pub(super) fn open(id: Id, number: usize, count: usize) -> io::Result<Self> {
        if count > MOST || number >= count {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let path = format!("/proc/{}/fd/{}", id.process, id.file);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
        let (len, access) = (size_of::<Shared>(), libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new mapping of a file of that length.
        let mapped =
            unsafe { libc::mmap(std::ptr::null_mut(), len, access, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(io::Error::last_os_error()),
            false => Ok(Self { shared: NonNull::new(mapped.cast()).ok_or(io::ErrorKind::Other)?, count }),
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: mapped for good; zeros are valid atomics.
        unsafe { self.shared.as_ref() }
    }

    pub(super) fn enter(&self, number: usize, heap: [u64; 5], near: u64) {
        let entry = &self.shared().entries[number];
        entry.heap.iter().zip(heap).for_each(|(place, value)| place.store(value, Ordering::Relaxed));
        entry.near.store(near, Ordering::Relaxed);
    }

    pub(super) fn heap(&self, number: usize) -> [u64; 5] {
        self.shared().entries[number].heap.each_ref().map(|value| value.load(Ordering::Relaxed))
    }

    pub(super) fn near(&self, number: usize) -> u64 {
        self.shared().entries[number].near.load(Ordering::Relaxed)
    }

    /// Waits for all PEs, without a deadline.
    pub(super) fn barrier(&self) {
        let Shared { arrived, generation, .. } = self.shared();
        let before = generation.load(Ordering::Acquire);
        if arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.count as u32 {
            arrived.store(0, Ordering::Relaxed);
            generation.store(before + 1, Ordering::Release);
            return;
        }
        while generation.load(Ordering::Acquire) == before {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}
