//! libnvshmem_host: the functions that Antiphon calls, as NVSHMEM's headers document them.
//!
//! A PE is a process, as it is there. PEs meet in a table in shared memory of the process that made the id, and map each other's heaps.
//! PEs with the same `ANTIPHON_NODE` reach each other by loads and stores, and with `ANTIPHON_EMULATOR_REACH=all` all do. A put takes
//! effect later, in an order of the seed's, and its source is read when it does: see [`puts`].
#![allow(clippy::missing_safety_doc)] // as NVSHMEM's headers say

mod puts;
mod table;

use std::{
    ffi::{c_int, c_uint, c_void},
    hash::{DefaultHasher, Hash, Hasher},
    ptr,
    sync::Mutex,
};

use crate::{
    driver::{self, Module},
    lock,
    memory::{self, Kind},
};

use table::Table;

/// The version whose functions these are.
const VERSION: [c_int; 3] = [3, 4, 5];
const INITIALIZED: c_int = 2;
const ALIGNMENT: usize = 512;
const DEFAULT_HEAP: usize = 64 << 20;

/// The state of this process, once it is a PE.
struct Pe {
    table: Table,
    number: usize,
    /// The first byte of each PE's heap, as this process has mapped it.
    heaps: Vec<u64>,
    heap_bytes: usize,
    /// Of this process's heap. Memory that is freed is not used again, unless all of it is.
    taken: usize,
    allocations: usize,
    /// Whether each PE is reached by loads and stores.
    is_near: Vec<bool>,
}

static PE: Mutex<Option<Pe>> = Mutex::new(None);

/// `nvshmemx_init_attr_t`.
#[repr(C)]
pub struct Attributes {
    version: c_int,
    communicator: *mut c_void,
    arguments: [c_int; 2],
    of_id: OfId,
    reserved: [u8; 96],
}

#[repr(C)]
struct OfId {
    version: c_int,
    id: *const table::Id,
    rank: c_int,
    count: c_int,
}

fn near() -> u64 {
    let mut hash = DefaultHasher::new();
    match std::env::var("ANTIPHON_EMULATOR_REACH").as_deref() {
        Ok("all") => {}
        Ok("" | "node") | Err(_) => std::env::var_os("ANTIPHON_NODE").hash(&mut hash),
        Ok(other) => panic!("ANTIPHON_EMULATOR_REACH is node or all, not {other}"),
    }
    hash.finish()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_vendor_get_version_info(
    major: *mut c_int,
    minor: *mut c_int,
    patch: *mut c_int,
) {
    // SAFETY: three places for a number.
    unsafe { [*major, *minor, *patch] = VERSION };
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_init_status() -> c_int {
    if lock(&PE).is_some() { INITIALIZED } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_get_uniqueid(id: *mut table::Id) -> c_int {
    match Table::create() {
        Ok(new) => {
            // SAFETY: a place for an id.
            unsafe { id.write(new) };
            0
        }
        Err(_) => 1,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_set_attr_uniqueid_args(
    rank: c_int,
    count: c_int,
    id: *const table::Id,
    attributes: *mut Attributes,
) -> c_int {
    // SAFETY: attributes.
    unsafe {
        let version = (1 << 16) + size_of::<OfId>() as c_int;
        (*attributes).of_id = OfId { version, id, rank, count };
    }
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_hostlib_init_attr(flags: c_uint, attributes: *mut Attributes) -> c_int {
    const WITH_UNIQUE_ID: c_uint = 1 << 3;
    // SAFETY: attributes, and the id that they name.
    let (version, of_id, id) = unsafe {
        let attributes = &*attributes;
        (attributes.version, &attributes.of_id, *attributes.of_id.id)
    };
    if flags != WITH_UNIQUE_ID || version != (1 << 16) + size_of::<Attributes>() as c_int {
        return 1;
    }
    if lock(&PE).is_some() {
        return 7;
    }
    let (number, count) = (of_id.rank as usize, of_id.count as usize);
    let heap_bytes = std::env::var("NVSHMEM_SYMMETRIC_SIZE").ok().and_then(|bytes| bytes.parse().ok());
    match join(id, number, count, heap_bytes.unwrap_or(DEFAULT_HEAP)) {
        Ok(pe) => {
            *lock(&PE) = Some(pe);
            0
        }
        Err(code) => code,
    }
}

fn join(id: table::Id, number: usize, count: usize, heap_bytes: usize) -> Result<Pe, c_int> {
    let table = Table::open(id, number, count).map_err(|_| 2)?;
    let device = driver::current();
    let own = memory::allocate(device, heap_bytes, Kind::Plain).map_err(|_| 3)?;
    table.enter(number, memory::export(own).map_err(|_| 4)?, near());
    table.barrier();
    let map = |pe: usize| match pe == number {
        true => Ok(own),
        false => memory::import(device, table.heap(pe)).map_err(|_| 5),
    };
    let heaps = (0..count).map(map).collect::<Result<_, _>>()?;
    let is_near = (0..count).map(|pe| table.near(pe) == table.near(number)).collect();
    table.barrier();
    Ok(Pe { table, number, heaps, heap_bytes, taken: 0, allocations: 0, is_near })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_hostlib_finalize() {
    puts::drain();
    if let Some(pe) = lock(&PE).take() {
        pe.table.barrier();
        pe.heaps.into_iter().for_each(|heap| {
            let _ = memory::free(heap);
        });
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_my_pe() -> c_int {
    lock(&PE).as_ref().map_or(-1, |pe| pe.number as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_n_pes() -> c_int {
    lock(&PE).as_ref().map_or(-1, |pe| pe.heaps.len() as c_int)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_malloc(bytes: usize) -> *mut c_void {
    let mut state = lock(&PE);
    let Some(pe) = state.as_mut() else { return ptr::null_mut() };
    pe.table.barrier();
    let (at, end) = (pe.taken, pe.taken + bytes.next_multiple_of(ALIGNMENT));
    if bytes == 0 || end > pe.heap_bytes {
        return ptr::null_mut();
    }
    (pe.taken, pe.allocations) = (end, pe.allocations + 1);
    (pe.heaps[pe.number] as usize + at) as *mut c_void
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_free(_memory: *mut c_void) {
    puts::drain();
    if let Some(pe) = lock(&PE).as_mut() {
        pe.table.barrier();
        pe.allocations -= 1;
        if pe.allocations == 0 {
            pe.taken = 0;
        }
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_ptr(memory: *const c_void, pe: c_int) -> *mut c_void {
    let state = lock(&PE);
    let found = state.as_ref().and_then(|own| {
        let offset = own.offset(memory.addr() as u64)?;
        own.is_near.get(pe as usize)?.then(|| own.heaps[pe as usize] + offset)
    });
    found.map_or(ptr::null_mut(), |address| address as usize as *mut c_void)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmem_barrier_all() {
    puts::drain();
    if let Some(pe) = lock(&PE).as_ref() {
        pe.table.barrier();
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvshmemx_cumodule_init(module: *const Module) -> c_int {
    if lock(&PE).is_none() {
        return 7;
    }
    // SAFETY: a module that was loaded.
    match unsafe { driver::set_puts(module, puts::put) } {
        true => 0,
        false => 3,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn nvshmemx_cumodule_finalize(_module: *const Module) -> c_int {
    0
}

impl Pe {
    /// Where an address of this process's heap is in it.
    fn offset(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.heaps[self.number])?;
        (offset < self.heap_bytes as u64).then_some(offset)
    }
}
