//! UCX, the engine of clusters: InfiniBand, RoCE, TCP and shared memory, by active messages of libucp.
//!
//! The library is opened at run time; [`antiphon_device::library`] says where it is looked for. Versions 1.13 and 1.22 were tried. UCX's own
//! variables, such as `UCX_TLS` and `UCX_NET_DEVICES`, apply as everywhere.
//!
//! A killed peer is noticed within milliseconds by TCP, and by InfiniBand after a second; by shared memory alone it is noticed by its signs
//! of life.

mod exit;
mod ffi;
mod library;
mod worker;

use std::{
    mem::ManuallyDrop,
    os::fd::{BorrowedFd, OwnedFd},
    ptr,
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
    fs::Timespec,
};
use sha2::{Digest, Sha256};

pub use library::Survey;

use self::{library::Api, worker::Shared};
use super::{Engine, EngineError, Flight, Inbox, Lost, Message, owner::Owner};

/// How an address begins.
const NAME: &[u8; 4] = b"ucx1";
/// How many bytes of an address are its check sum, behind the name.
const CHECK: usize = 8;

/// How long an engine that is dropped waits for its peers to take what was sent: half of what a peer may be silent.
const FAREWELL: Duration = Duration::from_secs(5);

/// The engine that uses UCX.
pub struct Ucx {
    /// Not dropped in a forked child.
    shared: ManuallyDrop<Arc<Shared>>,
    rank: usize,
    context: ffi::Context,
    address: Vec<u8>,
    /// The worker's events. UCX owns it.
    events: BorrowedFd<'static>,
    /// What [`wake`](Engine::wake) writes to.
    woken: OwnedFd,
    owner: Owner,
}

// SAFETY: the context is used by its worker, whose rules `Shared` keeps, and by `survey`, which reads what never changes.
unsafe impl Send for Ucx {}
// SAFETY: likewise.
unsafe impl Sync for Ucx {}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ucx {{ version: {} }}", self.shared.api.version_text)
    }
}

impl Ucx {
    /// Opens UCX, for the connections of peer `rank` of `peers`.
    ///
    /// # Errors
    /// [`EngineError::Library`], which says what to install; [`EngineError::TooOld`]; [`EngineError::Call`], if UCX finds nothing to use.
    pub fn open(rank: usize, peers: usize) -> Result<Self, EngineError> {
        Self::with(rank, peers, &[])
    }

    /// As [`open`](Self::open), with settings of UCX by their names without `UCX_`, such as `("TLS", "tcp")`. The user's variables go before
    /// them.
    ///
    /// # Errors
    /// As for [`open`](Self::open); also if UCX knows no such setting.
    ///
    /// # Panics
    /// If a setting contains NUL.
    pub fn with(rank: usize, peers: usize, settings: &[(&str, &str)]) -> Result<Self, EngineError> {
        let api = Api::load()?;
        let functions = &api.functions;
        let context = Scope(api.context(peers, settings)?, functions.cleanup);
        let mut worker: ffi::Worker = ptr::null_mut();
        // SAFETY: the parameters live during the call; writes one pointer.
        let status =
            unsafe { (functions.worker_create)(context.0, &ffi::WorkerParams::serialized(), &mut worker) };
        api.check("ucp_worker_create", status)?;
        let worker = Scope(worker, functions.worker_destroy);
        let mut events = -1;
        // SAFETY: the worker is open; writes one number.
        let status = unsafe { (functions.worker_get_efd)(worker.0, &mut events) };
        api.check("ucp_worker_get_efd", status)?;
        let address = address_of(api, worker.0)?;
        let woken = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| EngineError::System { what: "an eventfd", reason: error.to_string() })?;
        let shared = Shared::new(api, worker.0, (rank, peers), api.survey(context.0).leaves_the_machine());
        shared.lock().ok_or(EngineError::Exiting)?.listen()?;
        exit::register(&shared);
        // The engine's drop ends worker and context, so they are not dropped here.
        std::mem::forget(worker);
        let context = context.keep();
        // SAFETY: UCX keeps the descriptor open as long as the worker.
        let events = unsafe { BorrowedFd::borrow_raw(events) };
        let shared = ManuallyDrop::new(shared);
        Ok(Self { shared, rank, context, address, events, woken, owner: Owner::this() })
    }

    /// UCX as it is installed, and what it can use on this machine.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn survey() -> Result<Survey, EngineError> {
        let api = Api::load()?;
        let context = Scope(api.context(1, &[])?, api.functions.cleanup);
        Ok(api.survey(context.0))
    }

    /// Posts a message, for `send` and `tell`.
    ///
    /// # Safety
    /// As for [`Engine::send`].
    unsafe fn post(
        &self,
        peer: usize,
        message: &Message,
        payload: *const [u8],
        flight: Option<&Arc<Flight>>,
    ) -> Result<(), EngineError> {
        self.owner.check()?;
        let Some(key) = self.inbox().key() else { return Err(EngineError::Closed) };
        let locked = self.shared.lock().ok_or(EngineError::Exiting)?;
        // SAFETY: passed on to the caller.
        unsafe { locked.send(peer, (key, message), payload, flight) }
    }
}

/// What is ended by a function, unless it is kept.
struct Scope(*mut std::ffi::c_void, unsafe extern "C" fn(*mut std::ffi::c_void));

impl Scope {
    fn keep(self) -> *mut std::ffi::c_void {
        let kept = self.0;
        std::mem::forget(self);
        kept
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // SAFETY: made just before, and used by nobody any more.
        unsafe { (self.1)(self.0) };
    }
}

/// The address of a worker, with a name and a check sum: UCX trusts the addresses that it is given.
fn address_of(api: &Api, worker: ffi::Worker) -> Result<Vec<u8>, EngineError> {
    let (mut address, mut len) = (ptr::null_mut(), 0);
    // SAFETY: the worker is open; writes a pointer and a length.
    let status = unsafe { (api.functions.worker_get_address)(worker, &mut address, &mut len) };
    api.check("ucp_worker_get_address", status)?;
    // SAFETY: UCX has allocated `len` bytes, and frees them below.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len) };
    let named = [&NAME[..], &check_sum(bytes), bytes].concat();
    // SAFETY: the address came from this worker.
    unsafe { (api.functions.worker_release_address)(worker, address) };
    Ok(named)
}

/// UCX's own address in that of an engine.
fn unwrap(address: &[u8]) -> Option<&[u8]> {
    let (sum, bytes) = address.strip_prefix(NAME)?.split_first_chunk::<CHECK>()?;
    (*sum == check_sum(bytes)).then_some(bytes)
}

fn check_sum(bytes: &[u8]) -> [u8; CHECK] {
    *Sha256::digest(bytes).first_chunk().expect("a digest is longer")
}

impl Engine for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn address(&self) -> &[u8] {
        &self.address
    }

    fn inbox(&self) -> &Inbox {
        &self.shared.inbox
    }

    fn connect(&self, peer: usize, address: &[u8]) -> Result<(), EngineError> {
        self.owner.check()?;
        let unwrapped = unwrap(address).filter(|_| peer < self.inbox().peers());
        let Some(bytes) = unwrapped else {
            return Err(EngineError::Address { engine: self.name(), len: address.len() });
        };
        let locked = self.shared.lock().ok_or(EngineError::Exiting)?;
        if locked.is_connected(peer) {
            return Err(EngineError::Connected { peer });
        }
        // SAFETY: the check sum is right: an engine has made the address.
        match unsafe { locked.connect(peer, bytes) } {
            ffi::ERR_UNREACHABLE => {
                let survey = self.shared.api.survey(self.context);
                let devices = survey.devices_on_a_line();
                Err(EngineError::NoRoute { peer, version: survey.version, devices })
            }
            status => self.shared.api.check("ucp_ep_create", status),
        }
    }

    unsafe fn send(
        &self,
        peer: usize,
        message: &Message,
        payload: *const [u8],
        flight: &Arc<Flight>,
    ) -> Result<(), EngineError> {
        // SAFETY: passed on to the caller.
        unsafe { self.post(peer, message, payload, Some(flight)) }
    }

    fn tell(&self, peer: usize, message: &Message) -> Result<(), EngineError> {
        // SAFETY: there is no payload.
        unsafe { self.post(peer, message, &[], None) }
    }

    fn progress(&self) -> bool {
        if !self.owner.is_this() || self.inbox().key().is_none() {
            return false;
        }
        let Some(locked) = self.shared.try_lock() else { return false };
        let moved = locked.progress();
        if moved {
            locked.close_lost();
        }
        moved
    }

    fn sleep(&self, limit: Duration) {
        if !self.owner.is_this() {
            return;
        }
        let is_open = self.inbox().key().is_some();
        if is_open {
            let Some(locked) = self.shared.lock() else { return std::thread::sleep(limit) };
            locked.close_lost();
            if !locked.arm() {
                return;
            }
        }
        let woken = PollFd::new(&self.woken, PollFlags::IN);
        let events = PollFd::from_borrowed_fd(self.events, PollFlags::IN);
        // Before the inbox is open, events are left alone.
        let mut descriptors = [woken, events];
        let descriptors = &mut descriptors[..1 + usize::from(is_open)];
        let limit = Timespec::try_from(limit).ok();
        // Woken, timed out or interrupted: the caller looks again in every case.
        let _ = poll(descriptors, limit.as_ref());
        let _ = rustix::io::read(&self.woken, &mut [0; 8]);
    }

    fn wake(&self) {
        if self.owner.is_this() {
            // A counter that is full wakes as well.
            let _ = rustix::io::write(&self.woken, &1u64.to_ne_bytes());
        }
    }

    fn lost(&self, peer: usize) -> Option<Lost> {
        self.shared.is_lost(peer).then_some(Lost::Reset)
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        if !self.owner.is_this() {
            // The connections are the parent's.
            return;
        }
        let Some(locked) = self.shared.lock() else { return };
        locked.leave(Instant::now() + FAREWELL);
        locked.destroy();
        // SAFETY: its worker is destroyed.
        unsafe { (self.shared.api.functions.cleanup)(self.context) };
        drop(locked);
        // SAFETY: nothing knows it any more, and it is not used again.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}
