//! Memory: what a device has, and what other processes map of it.

use std::{
    collections::{BTreeMap, HashMap},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    ptr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    Code, lock, races,
    races::shadow::{self, Shadow},
    schedule,
};

const PAGE: usize = 4096;
/// Memory that is created has multiples of this.
pub(crate) const GRANULARITY: usize = 2 << 20;
/// A device's memory.
pub(crate) const TOTAL: usize = 16 << 30;

/// Bytes in use, of all devices of this process.
static USED: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn free_bytes() -> usize {
    TOTAL.saturating_sub(USED.load(Ordering::Relaxed))
}

/// Physical memory.
pub(crate) struct Physical {
    file: OwnedFd,
    len: usize,
    is_mine: bool,
    /// If races are checked.
    shadow: Option<Arc<Shadow>>,
}

/// The files that this process has made.
static OWN: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn is_own(file: (u64, u64)) -> bool {
    lock(&OWN).contains(&file)
}

/// What tells files apart.
fn identity(file: &OwnedFd) -> (u64, u64) {
    // SAFETY: an open descriptor, and a place for what is known of it.
    unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        libc::fstat(file.as_raw_fd(), &raw mut about);
        (about.st_dev, about.st_ino)
    }
}

impl Physical {
    /// Memory that somebody has made, who may be another process.
    fn of_file(file: OwnedFd, len: usize) -> Arc<Self> {
        let shadow = if races::is_on() { Shadow::find(identity(&file)) } else { None };
        if shadow.is_none() {
            races::stop_checking();
        }
        if !is_own(identity(&file)) {
            schedule::is_shared_with_others();
        }
        Arc::new(Self { file, len, is_mine: false, shadow })
    }

    fn create(len: usize) -> Result<Arc<Self>, Code> {
        if len == 0 {
            return Err(Code::INVALID_VALUE);
        }
        if len > free_bytes() {
            return Err(Code::OUT_OF_MEMORY);
        }
        // SAFETY: a new descriptor.
        let file = unsafe {
            let file = libc::memfd_create(c"emulated".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 || libc::ftruncate(file, len as i64) != 0 {
                return Err(Code::OUT_OF_MEMORY);
            }
            OwnedFd::from_raw_fd(file)
        };
        USED.fetch_add(len, Ordering::Relaxed);
        lock(&OWN).push(identity(&file));
        let shadow = races::is_on().then(|| Shadow::create(identity(&file), len));
        Ok(Arc::new(Self { file, len, is_mine: true, shadow }))
    }

    fn map_at(&self, at: *mut libc::c_void) -> Result<(), Code> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is reserved, and nothing else is mapped there.
        let mapped = unsafe {
            libc::mmap(at, self.len, access, libc::MAP_SHARED | libc::MAP_FIXED, self.file.as_raw_fd(), 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(Code::OUT_OF_MEMORY);
        }
        if let Some(shadow) = &self.shadow {
            shadow.map(at as usize);
        }
        Ok(())
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.is_mine {
            USED.fetch_sub(self.len, Ordering::Relaxed);
            lock(&OWN).retain(|file| *file != identity(&self.file));
        }
    }
}

/// What lies at an address.
#[derive(Clone)]
pub(crate) struct Region {
    pub base: u64,
    pub len: usize,
    pub device: usize,
    pub kind: Kind,
    physical: Option<Arc<Physical>>,
    /// The reserved addresses, and the place of the first byte in the file.
    range: (usize, usize),
    offset: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Plain,
    Host,
    Mapped { posix_fd: bool },
    Imported,
}

static REGIONS: Mutex<BTreeMap<u64, Region>> = Mutex::new(BTreeMap::new());
/// Handles of physical memory, and whether a descriptor may be had of it.
type Handles = HashMap<u64, (Arc<Physical>, bool)>;
static HANDLES: Mutex<Option<Handles>> = Mutex::new(None);

pub(crate) fn region_of(address: u64) -> Option<Region> {
    let regions = lock(&REGIONS);
    let (base, region) = regions.range(..=address).next_back()?;
    (address < base + region.len as u64).then(|| region.clone())
}

/// Whether an address is one of the host's memory.
pub(crate) fn is_of_host(address: u64) -> bool {
    region_of(address).is_some_and(|region| region.kind == Kind::Host)
}

/// Addresses without memory on either side of a range: more than a slot of any tenant, so that a kernel that computes the place of a slot
/// wrongly ends the process, as a GPU would report an illegal address.
const GUARD: usize = 256 << 20;

/// Addresses between two guards.
fn reserve_range(len: usize, alignment: usize) -> Result<usize, Code> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let whole = len + 2 * GUARD + alignment;
    // SAFETY: a new range.
    let range = unsafe { libc::mmap(ptr::null_mut(), whole, libc::PROT_NONE, flags, -1, 0) };
    if range == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }
    let at = (range as usize + GUARD).next_multiple_of(alignment);
    let (before, behind) = (at - GUARD - range as usize, at + len + GUARD);
    // SAFETY: the parts that are not needed.
    unsafe {
        if before > 0 {
            libc::munmap(range, before);
        }
        if range as usize + whole > behind {
            libc::munmap(behind as *mut _, range as usize + whole - behind);
        }
    }
    Ok(at)
}

/// Gives back addresses of [`reserve_range`], and the guards.
fn release_range(at: usize, len: usize) {
    // SAFETY: reserved together.
    unsafe { libc::munmap((at - GUARD) as *mut _, len + 2 * GUARD) };
}

/// Memory that ends where its pages end, so that an access behind it fails.
pub(crate) fn allocate(device: usize, len: usize, kind: Kind) -> Result<u64, Code> {
    if len == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let pages = len.next_multiple_of(PAGE);
    let physical = Physical::create(pages)?;
    let start = reserve_range(pages, PAGE)?;
    physical.map_at(start as *mut _)?;
    let offset = pages - len.next_multiple_of(256);
    let base = (start + offset) as u64;
    if len <= 16 << 20 {
        // SAFETY: just mapped. Its values are unspecified, and these are unlikely to be right by chance.
        unsafe { ptr::write_bytes(base as *mut u8, 0xA7, len) };
    }
    let range = (start, pages);
    let region = Region { base, len, device, kind, physical: Some(physical), range, offset };
    lock(&REGIONS).insert(base, region);
    Ok(base)
}

/// Frees memory of [`allocate`] or [`import`].
pub(crate) fn free(base: u64) -> Result<(), Code> {
    let region = lock(&REGIONS).remove(&base).ok_or(Code::INVALID_VALUE)?;
    if races::is_on() {
        shadow::unmap(region.range.0, region.range.1);
    }
    release_range(region.range.0, region.range.1);
    Ok(())
}

/// The process, its descriptor, the place in the file and the lengths.
pub(crate) fn export(address: u64) -> Result<[u64; 5], Code> {
    let region = region_of(address).filter(|region| region.kind == Kind::Plain).ok_or(Code::INVALID_VALUE)?;
    let physical = region.physical.ok_or(Code::INVALID_VALUE)?;
    let file = physical.file.as_raw_fd() as u64;
    Ok([std::process::id().into(), file, region.offset as u64, region.len as u64, physical.len as u64])
}

pub(crate) fn import(device: usize, [process, file, offset, len, pages]: [u64; 5]) -> Result<u64, Code> {
    let path = format!("/proc/{process}/fd/{file}");
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path);
    let file = file.map_err(|_| Code::INVALID_HANDLE)?.into();
    let physical = Physical::of_file(file, pages as usize);
    let start = reserve_range(pages as usize, PAGE)?;
    physical.map_at(start as *mut _)?;
    let (base, range, offset) = (start as u64 + offset, (start, pages as usize), offset as usize);
    let physical = Some(physical);
    let region = Region { base, len: len as usize, device, kind: Kind::Imported, physical, range, offset };
    lock(&REGIONS).insert(base, region);
    Ok(base)
}

fn add_handle(physical: Arc<Physical>, posix_fd: bool) -> u64 {
    static NUMBER: AtomicU64 = AtomicU64::new(1);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    lock(&HANDLES).get_or_insert_default().insert(number, (physical, posix_fd));
    number
}

fn handle(number: u64) -> Result<(Arc<Physical>, bool), Code> {
    lock(&HANDLES).get_or_insert_default().get(&number).cloned().ok_or(Code::INVALID_VALUE)
}

pub(crate) fn create(len: usize, posix_fd: bool) -> Result<u64, Code> {
    if !len.is_multiple_of(GRANULARITY) {
        return Err(Code::INVALID_VALUE);
    }
    Ok(add_handle(Physical::create(len)?, posix_fd))
}

pub(crate) fn release(number: u64) -> Result<(), Code> {
    lock(&HANDLES).get_or_insert_default().remove(&number).map(drop).ok_or(Code::INVALID_VALUE)
}

pub(crate) fn retain(address: u64) -> Result<u64, Code> {
    let region = region_of(address).ok_or(Code::INVALID_VALUE)?;
    match (region.kind, region.physical) {
        (Kind::Mapped { posix_fd }, Some(physical)) => Ok(add_handle(physical, posix_fd)),
        _ => Err(Code::INVALID_VALUE),
    }
}

/// A descriptor of the memory.
pub(crate) fn descriptor(number: u64) -> Result<RawFd, Code> {
    let (physical, posix_fd) = handle(number)?;
    if !posix_fd {
        return Err(Code::NOT_SUPPORTED);
    }
    // SAFETY: an open descriptor.
    let copy = unsafe { libc::dup(physical.file.as_raw_fd()) };
    if copy < 0 { Err(Code::OUT_OF_MEMORY) } else { Ok(copy) }
}

pub(crate) fn from_descriptor(descriptor: RawFd) -> Result<u64, Code> {
    // SAFETY: the caller's descriptor; fstat says whether it is one.
    let (file, len) = unsafe {
        let mut about: libc::stat = std::mem::zeroed();
        let copy = libc::dup(descriptor);
        if copy < 0 {
            return Err(Code::INVALID_VALUE);
        }
        let file = OwnedFd::from_raw_fd(copy);
        libc::fstat(copy, &mut about);
        (file, about.st_size as usize)
    };
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap_or_default();
    if !name.to_string_lossy().starts_with("/memfd:emulated") {
        return Err(Code::INVALID_VALUE);
    }
    Ok(add_handle(Physical::of_file(file, len), true))
}

pub(crate) fn reserve(len: usize) -> Result<u64, Code> {
    Ok(reserve_range(len, GRANULARITY)? as u64)
}

pub(crate) fn unreserve(address: u64, len: usize) {
    release_range(address as usize, len);
}

pub(crate) fn map(device: usize, address: u64, len: usize, number: u64) -> Result<(), Code> {
    let (physical, posix_fd) = handle(number)?;
    if physical.len != len {
        return Err(Code::INVALID_VALUE);
    }
    physical.map_at(address as *mut _)?;
    let kind = Kind::Mapped { posix_fd };
    let range = (address as usize, len);
    let region = Region { base: address, len, device, kind, physical: Some(physical), range, offset: 0 };
    lock(&REGIONS).insert(address, region);
    Ok(())
}

pub(crate) fn unmap(address: u64, len: usize) -> Result<(), Code> {
    lock(&REGIONS).remove(&address).ok_or(Code::INVALID_VALUE)?;
    if races::is_on() {
        shadow::unmap(address as usize, len);
    }
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    // SAFETY: keeps the addresses reserved.
    unsafe { libc::mmap(address as *mut _, len, libc::PROT_NONE, flags, -1, 0) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether every byte of the range is reserved and can't be accessed.
    fn is_guard(from: usize, to: usize) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let hex = |text: &str| usize::from_str_radix(text, 16).unwrap();
        let mut at = from;
        for line in maps.lines() {
            let (range, rest) = line.split_once(' ').unwrap();
            let (start, end) = range.split_once('-').unwrap();
            if (hex(start)..hex(end)).contains(&at) && rest.starts_with("---p") {
                at = hex(end);
            }
        }
        at >= to
    }

    #[test]
    fn no_memory_lies_close_to_a_range() {
        let plain = allocate(0, 100_000, Kind::Plain).unwrap();
        let (start, len) = region_of(plain).unwrap().range;
        assert!(is_guard(start - GUARD, start) && is_guard(start + len, start + len + GUARD));
        let reserved = reserve(3 * GRANULARITY).unwrap() as usize;
        assert_eq!(reserved % GRANULARITY, 0);
        assert!(is_guard(reserved - GUARD, reserved + 3 * GRANULARITY + GUARD));
        free(plain).unwrap();
        unreserve(reserved as u64, 3 * GRANULARITY);
    }
}
