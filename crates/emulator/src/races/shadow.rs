//! Shadow memory: for each word of 4 bytes the last writer, and some readers.
//!
//! It belongs to physical memory: whatever address a process has mapped it at, the word is the same. A flat table leads from an
//! address to its page, without a search.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    cell::UnsafeCell,
    collections::HashMap,
    ptr,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
};

use super::{
    clocks::{Id, Time},
    late::Histories,
    threads::Message,
};
use crate::lock;

const PAGE: usize = 4096;
pub(super) const WORD: usize = 4;
/// The bytes that one lock protects.
pub(super) const GRANULE: usize = 16;
const READERS: usize = 3;

/// An access that was. Empty if `word` is 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Record {
    pub id: Id,
    pub time: Time,
    /// The address of the instruction in 48 bits, and what the access is above.
    pub word: u64,
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub(super) struct Cell {
    pub writer: Record,
    pub readers: [Record; READERS],
}

/// 4096 bytes of memory.
pub(super) struct Page {
    /// Null until a part of the page is accessed.
    cells: AtomicPtr<Cell>,
    /// The last thread that wrote the whole word, before that access.
    whole: Mutex<Record>,
    /// Memory of a block: what other clusters have done there is over.
    pub is_shared: bool,
}

const CELLS: Layout = Layout::new::<[Cell; PAGE / WORD]>();

impl Page {
    fn new(is_shared: bool) -> Self {
        Self { cells: AtomicPtr::default(), whole: Mutex::default(), is_shared }
    }

    /// The first of the page's cells.
    fn cells(&self) -> *mut Cell {
        let cells = self.cells.load(Ordering::Acquire);
        if !cells.is_null() {
            return cells;
        }
        let whole = lock(&self.whole);
        let cells = self.cells.load(Ordering::Acquire);
        if !cells.is_null() {
            return cells;
        }
        // SAFETY: not empty; zeros are an empty record.
        let cells = unsafe { alloc_zeroed(CELLS) }.cast::<Cell>();
        if cells.is_null() {
            handle_alloc_error(CELLS);
        }
        if *whole != Record::default() {
            for at in 0..PAGE / WORD {
                // SAFETY: this many cells, which nobody else knows yet.
                unsafe { (*cells.add(at)).writer = *whole };
            }
        }
        self.cells.store(cells, Ordering::Release);
        cells
    }

    /// Records that all of it is written, unless parts have been accessed; returns who did so before.
    pub(super) fn write_whole(&self, record: Record) -> Option<Record> {
        let mut whole = lock(&self.whole);
        let is_untouched = self.cells.load(Ordering::Acquire).is_null();
        is_untouched.then(|| std::mem::replace(&mut *whole, record))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let cells = *self.cells.get_mut();
        if !cells.is_null() {
            // SAFETY: allocated above.
            unsafe { dealloc(cells.cast(), CELLS) };
        }
    }
}

/// The shadow of physical memory.
pub(crate) struct Shadow {
    pages: Box<[Page]>,
}

/// The shadows of files, by device and inode.
type Files = HashMap<(u64, u64), Weak<Shadow>>;

/// The shadows of files: two descriptors may lead to one memory.
static SHADOWS: Mutex<Option<Files>> = Mutex::new(None);

impl Shadow {
    /// The shadow of a new file.
    pub(crate) fn create(file: (u64, u64), len: usize) -> Arc<Self> {
        let pages = (0..len.div_ceil(PAGE)).map(|_| Page::new(false)).collect();
        let shadow = Arc::new(Self { pages });
        let mut all = lock(&SHADOWS);
        let all = all.get_or_insert_default();
        all.retain(|_, shadow| shadow.strong_count() > 0);
        all.insert(file, Arc::downgrade(&shadow));
        shadow
    }

    /// The shadow of a file, if this process has made it.
    pub(crate) fn find(file: (u64, u64)) -> Option<Arc<Self>> {
        lock(&SHADOWS).get_or_insert_default().get(&file).and_then(Weak::upgrade)
    }

    /// The memory is mapped there from now on, and stays so until [`unmap`].
    pub(crate) fn map(&self, at: usize) {
        for (index, page) in self.pages.iter().enumerate() {
            entry(at + index * PAGE).store(ptr::from_ref(page).cast_mut(), Ordering::Release);
        }
    }
}

/// Nothing is mapped there any more.
pub(crate) fn unmap(at: usize, len: usize) {
    for page in (at..at + len).step_by(PAGE) {
        entry(page).store(ptr::null_mut(), Ordering::Release);
    }
}

/// The range is memory of blocks, one after the other, for ever.
pub(crate) fn add_shared(at: usize, len: usize) {
    for page in (at / PAGE * PAGE..at + len).step_by(PAGE) {
        if entry(page).load(Ordering::Acquire).is_null() {
            entry(page).store(Box::into_raw(Box::new(Page::new(true))), Ordering::Release);
        }
    }
}

/// The entry of an address: user addresses have 47 bits. The table is 256 GiB of addresses, of which few have memory.
fn entry(at: usize) -> &'static AtomicPtr<Page> {
    static TABLE: OnceLock<usize> = OnceLock::new();
    const ENTRIES: usize = 1 << (47 - 12);
    let table = *TABLE.get_or_init(|| {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: new memory, of zeros, which stays.
        let table = unsafe { libc::mmap(ptr::null_mut(), ENTRIES * 8, access, flags, -1, 0) };
        assert_ne!(table, libc::MAP_FAILED, "no addresses for the shadow's table");
        table as usize
    });
    // SAFETY: within the table, whose entries are null or pointers.
    unsafe { &*((table + (at >> 12 & (ENTRIES - 1)) * 8) as *const AtomicPtr<Page>) }
}

/// The page of an address, if it is a GPU's memory or a block's.
pub(super) fn page(at: usize) -> Option<&'static Page> {
    // SAFETY: pages live as long as they are mapped, and kernels do not access what the host unmaps.
    unsafe { entry(at).load(Ordering::Acquire).as_ref() }
}

/// What a lock protects beside cells: the releases that words carry, by the granule's first cell; each is of the words of its mask.
pub(super) type Messages = HashMap<usize, Vec<(u8, Message)>>;

pub(super) struct Shard {
    is_taken: AtomicBool,
    messages: UnsafeCell<Messages>,
    histories: UnsafeCell<Histories>,
}

// SAFETY: only a thread that holds the lock accesses `messages` and `histories`.
unsafe impl Sync for Shard {}

/// A granule, locked.
pub(super) struct Locked {
    shard: &'static Shard,
    cells: *mut Cell,
    pub is_shared: bool,
}

impl Locked {
    /// Locks the granule of an address in this page.
    pub(super) fn new(page: &'static Page, at: usize) -> Self {
        static SHARDS: OnceLock<Vec<Shard>> = OnceLock::new();
        const COUNT: usize = 1 << 12;
        let shards = SHARDS.get_or_init(|| {
            let shard = || Shard {
                is_taken: AtomicBool::new(false),
                messages: UnsafeCell::default(),
                histories: UnsafeCell::default(),
            };
            (0..COUNT).map(|_| shard()).collect()
        });
        // SAFETY: within the page.
        let cells = unsafe { page.cells().add(at % PAGE / GRANULE * (GRANULE / WORD)) };
        let granule = cells as usize / size_of::<[Cell; GRANULE / WORD]>();
        let shard = &shards[granule.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40 & (COUNT - 1)];
        while shard.is_taken.swap(true, Ordering::Acquire) {
            // The holder may have lost its processor.
            std::thread::yield_now();
        }
        Self { shard, cells, is_shared: page.is_shared }
    }

    pub(super) fn cells(&mut self) -> &mut [Cell; GRANULE / WORD] {
        // SAFETY: locked.
        unsafe { &mut *self.cells.cast() }
    }

    /// What the words carry, and their key there.
    pub(super) fn messages(&mut self) -> (&mut Messages, usize) {
        // SAFETY: locked.
        (unsafe { &mut *self.shard.messages.get() }, self.cells as usize)
    }

    /// The last stores of granules, and the key of this one.
    pub(super) fn histories(&mut self) -> (&mut Histories, usize) {
        // SAFETY: locked.
        (unsafe { &mut *self.shard.histories.get() }, self.cells as usize)
    }

    /// Leaves it locked, until [`unlock`].
    pub(super) fn keep(self) -> *const Shard {
        let shard = self.shard;
        std::mem::forget(self);
        shard
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        self.shard.is_taken.store(false, Ordering::Release);
    }
}

/// # Safety
/// The shard was kept by [`Locked::keep`], and is unlocked once.
pub(super) unsafe fn unlock(shard: *const Shard) {
    // SAFETY: shards stay.
    unsafe { (*shard).is_taken.store(false, Ordering::Release) };
}
