//! What UCX calls back, and the state that calls and callbacks share.
//!
//! A worker is used by one thread at a time: whoever holds the lock. UCX calls back only from within calls that the holder makes, so
//! callbacks own the state too. None of them borrows it longer than a step of their own.

use std::{
    cell::RefCell,
    ffi::{c_uint, c_void},
    ptr,
    sync::{Arc, MutexGuard, PoisonError, TryLockError},
    time::Instant,
};

use antiphon_device::sync::{AtomicU32, Mutex, Ordering};

use super::{
    super::{
        EngineError, Flight, Inbox, Key, Message,
        inbox::{LEAVES, Landing},
    },
    exit,
    ffi::{self, AmReceiveParam, Callback, Endpoint, OK, Outcome, RequestParam, Status, Worker},
    library::Api,
};

/// The only active message: all differences are in its header.
const ID: u32 = 0;

/// Codes of a send to a peer that is lost, though UCX has not called the error handler yet.
const LOST: [Status; 6] = [-3, -6, -16, -24, -25, -80];

/// A worker with what its callbacks need. It has one address for its whole life, which UCX knows.
pub(super) struct Shared {
    pub(super) api: &'static Api,
    pub(super) worker: Worker,
    pub(super) inbox: Inbox,
    /// The rank that this is of.
    rank: usize,
    lock: Mutex<()>,
    /// Accessed under the lock only.
    state: RefCell<State>,
    /// How endpoints handle the failure of their peer.
    err_mode: c_uint,
    /// For each peer: not 0 if its endpoint has failed.
    lost: Vec<AtomicU32>,
}

#[derive(Default)]
struct State {
    /// The endpoint of each peer. Those of lost peers are closed.
    endpoints: Vec<Option<Endpoint>>,
    /// Whether the worker is destroyed.
    is_destroyed: bool,
    /// All that were ever made, for the worker's end.
    requests: Vec<*mut Request>,
    free: Vec<*mut Request>,
}

// SAFETY: the pointers lead to what UCX lets any thread use, one at a time, which the lock ensures; `state` is accessed under the lock only.
unsafe impl Send for Shared {}
// SAFETY: likewise.
unsafe impl Sync for Shared {}

/// What an operation needs until it is complete. Used again and again: a warm call allocates nothing.
struct Request {
    shared: *const Shared,
    /// UCX 1.13 reads a header until the send is complete.
    header: [u8; Message::HEADER],
    flight: Option<Arc<Flight>>,
    landing: Option<Landing>,
}

/// The right to use a worker.
pub(super) struct Locked<'a> {
    shared: &'a Shared,
    _guard: MutexGuard<'a, ()>,
}

impl Shared {
    /// The state of a worker that is not used yet; [`listen`](Locked::listen) makes it receive.
    pub(super) fn new(
        api: &'static Api,
        worker: Worker,
        (rank, peers): (usize, usize),
        tells_failures: bool,
    ) -> Arc<Self> {
        let err_mode = if tells_failures { ffi::ERR_HANDLING_MODE_PEER } else { ffi::ERR_HANDLING_MODE_NONE };
        let state = State { endpoints: vec![None; peers], ..State::default() };
        Arc::new(Self {
            api,
            worker,
            inbox: Inbox::new(peers),
            rank,
            lock: Mutex::default(),
            state: RefCell::new(state),
            err_mode,
            lost: (0..peers).map(|_| AtomicU32::default()).collect(),
        })
    }

    /// The right to use the worker, once other threads have done with it: none if the process [exits](exit).
    pub(super) fn lock(&self) -> Option<Locked<'_>> {
        let lock =
            || Locked { shared: self, _guard: self.lock.lock().unwrap_or_else(PoisonError::into_inner) };
        (!exit::is_exiting()).then(lock)
    }

    /// As [`lock`](Self::lock), if no other thread uses the worker.
    pub(super) fn try_lock(&self) -> Option<Locked<'_>> {
        if exit::is_exiting() { None } else { self.try_lock_at_exit() }
    }

    fn try_lock_at_exit(&self) -> Option<Locked<'_>> {
        let _guard = match self.lock.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Locked { shared: self, _guard })
    }

    /// Says goodbye, unless the engine has been dropped, and keeps the lock: no thread can use the worker any more. If another thread keeps it
    /// until the deadline, this gives up.
    pub(super) fn leave_for_good(&self, deadline: Instant) {
        loop {
            if let Some(locked) = self.try_lock_at_exit() {
                if !self.state.borrow().is_destroyed {
                    locked.leave(deadline);
                }
                std::mem::forget(locked);
                return;
            }
            if Instant::now() >= deadline {
                return;
            }
            std::thread::yield_now();
        }
    }

    pub(super) fn is_lost(&self, peer: usize) -> bool {
        self.has_failed(peer) || self.inbox.has_left(peer)
    }

    fn has_failed(&self, peer: usize) -> bool {
        self.lost.get(peer).is_some_and(|lost| lost.load(Ordering::Acquire) != 0)
    }

    /// A request that is not in use.
    fn take(&self) -> *mut Request {
        let mut state = self.state.borrow_mut();
        state.free.pop().unwrap_or_else(|| {
            let new = Request { shared: self, header: [0; Message::HEADER], flight: None, landing: None };
            let request = Box::into_raw(Box::new(new));
            state.requests.push(request);
            request
        })
    }

    /// Gives a request back whose send does not read its buffers any more.
    ///
    /// # Safety
    /// The request is in use, and the caller holds the lock.
    unsafe fn give_back(&self, request: *mut Request) {
        // SAFETY: requests live as long as the worker; UCX has done with this one.
        let (flight, landing) = unsafe { ((*request).flight.take(), (*request).landing.take()) };
        if let Some(flight) = flight {
            flight.finish();
        }
        self.state.borrow_mut().free.push(request);
        // After the borrow: a receiver's drop may do anything.
        drop(landing);
    }
}

impl Locked<'_> {
    /// Lets the worker receive.
    pub(super) fn listen(&self) -> Result<(), EngineError> {
        let param = ffi::AmHandlerParam {
            field_mask: ffi::AM_HANDLER_ALL_FIELDS,
            id: ID,
            flags: ffi::AM_WHOLE_MESSAGE,
            handler: Some(arrived),
            arg: ptr::from_ref(self.shared).cast_mut().cast(),
        };
        // SAFETY: the worker is open; what the handler gets lives longer than the worker.
        let status =
            unsafe { (self.shared.api.functions.worker_set_am_recv_handler)(self.shared.worker, &param) };
        self.shared.api.check("ucp_worker_set_am_recv_handler", status)
    }

    /// Whether the peer has an endpoint, or had one.
    pub(super) fn is_connected(&self, peer: usize) -> bool {
        self.shared.has_failed(peer) || self.shared.state.borrow().endpoints[peer].is_some()
    }

    /// Makes the endpoint of a peer that has none. The status is UCX's.
    ///
    /// # Safety
    /// `address` is the address of a worker, as UCX gave it.
    pub(super) unsafe fn connect(&self, peer: usize, address: &[u8]) -> Status {
        let arg = ptr::from_ref(&self.shared.lost[peer]).cast_mut().cast();
        let params = ffi::EndpointParams::new(address.as_ptr().cast(), self.shared.err_mode, failed, arg);
        let mut endpoint: Endpoint = ptr::null_mut();
        // SAFETY: the parameters live during the call, what the handler gets lives longer than the worker.
        let status =
            unsafe { (self.shared.api.functions.ep_create)(self.shared.worker, &params, &mut endpoint) };
        if status == OK {
            self.shared.state.borrow_mut().endpoints[peer] = Some(endpoint);
        }
        status
    }

    /// Sends a message, whose payload is read until the flight is complete.
    ///
    /// # Safety
    /// As for [`Engine::send`](super::super::Engine::send).
    pub(super) unsafe fn send(
        &self,
        peer: usize,
        (key, message): (Key, &Message),
        payload: *const [u8],
        flight: Option<&Arc<Flight>>,
    ) -> Result<(), EngineError> {
        let shared = self.shared;
        if shared.is_lost(peer) {
            return Ok(());
        }
        let endpoint = shared.state.borrow().endpoints.get(peer).copied().flatten();
        let Some(endpoint) = endpoint else { return Err(EngineError::NotConnected { peer }) };
        let request = shared.take();
        if let Some(flight) = flight {
            flight.start();
        }
        // SAFETY: the request is in nobody's use but this one's until it is given back, by this function or by `sent`. Header and
        // payload stay as they are so long.
        unsafe {
            (*request).header = message.encode(key);
            (*request).flight = flight.cloned();
            let param = RequestParam::with_callback(Callback { send: sent }, request.cast());
            let header = (&raw const (*request).header).cast();
            let send = shared.api.functions.am_send;
            match Outcome::from(send(
                endpoint,
                ID,
                header,
                Message::HEADER,
                payload.cast(),
                payload.len(),
                &param,
            )) {
                Outcome::Pending(_) => Ok(()),
                Outcome::Done => {
                    shared.give_back(request);
                    Ok(())
                }
                Outcome::Failed(status) => {
                    shared.give_back(request);
                    if LOST.contains(&status) {
                        shared.lost[peer].store(1, Ordering::Release);
                    }
                    if shared.is_lost(peer) { Ok(()) } else { shared.api.check("ucp_am_send_nbx", status) }
                }
            }
        }
    }

    /// Moves messages. Whether anything moved.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: the worker is open, and this thread has the right to use it.
        unsafe { (self.shared.api.functions.worker_progress)(self.shared.worker) != 0 }
    }

    /// Arms the worker's event descriptor. Whether nothing is left to move, so that the descriptor will tell of the next event.
    pub(super) fn arm(&self) -> bool {
        // SAFETY: as for `progress`.
        unsafe { (self.shared.api.functions.worker_arm)(self.shared.worker) != ffi::ERR_BUSY }
    }

    /// How many sends and fetches are not complete.
    pub(super) fn in_flight(&self) -> usize {
        let state = self.shared.state.borrow();
        state.requests.len() - state.free.len()
    }

    /// Closes the endpoints of lost peers, which completes their sends.
    pub(super) fn close_lost(&self) {
        for peer in 0..self.shared.lost.len() {
            if self.shared.has_failed(peer)
                && let Some(request) = self.close(peer, ffi::EP_CLOSE_FORCE)
            {
                self.free(request);
            }
        }
    }

    /// Closes the endpoint of a peer, if it has one. The request, if that takes time.
    pub(super) fn close(&self, peer: usize, flags: u32) -> Option<*mut c_void> {
        let endpoint = self.shared.state.borrow_mut().endpoints[peer].take()?;
        // SAFETY: the endpoint is open, and never used again.
        let outcome =
            unsafe { (self.shared.api.functions.ep_close)(endpoint, &RequestParam::with_flags(flags)) };
        match Outcome::from(outcome) {
            Outcome::Pending(request) => Some(request),
            Outcome::Done | Outcome::Failed(_) => None,
        }
    }

    /// Whether a request of [`close`](Self::close) is complete.
    pub(super) fn is_complete(&self, request: *mut c_void) -> bool {
        // SAFETY: the request was not freed.
        unsafe { (self.shared.api.functions.request_check_status)(request) != ffi::IN_PROGRESS }
    }

    /// Frees a request of [`close`](Self::close).
    pub(super) fn free(&self, request: *mut c_void) {
        // SAFETY: nobody uses it any more.
        unsafe { (self.shared.api.functions.request_free)(request) };
    }

    /// Tells the peers that this engine leaves, once they have what it sent; until the deadline at most.
    pub(super) fn leave(&self, deadline: Instant) {
        let shared = self.shared;
        let until = |done: &dyn Fn() -> bool| {
            while !done() && Instant::now() < deadline {
                if !self.progress() {
                    std::thread::yield_now();
                }
                self.close_lost();
            }
        };
        until(&|| self.in_flight() == 0);
        let peers = 0..shared.inbox.peers();
        let connected: Vec<usize> =
            peers.filter(|&peer| self.is_connected(peer) && !shared.is_lost(peer)).collect();
        if let Some(key) = shared.inbox.key() {
            let message = Message { kind: LEAVES, sender: shared.rank as u32, ..Message::default() };
            for &peer in &connected {
                // SAFETY: there is no payload. A peer that cannot be told notices by itself.
                let _ = unsafe { self.send(peer, (key, &message), &[], None) };
            }
        }
        let closing: Vec<_> = connected.iter().filter_map(|&peer| self.close(peer, 0)).collect();
        until(&|| closing.iter().all(|&request| self.is_complete(request)));
        closing.into_iter().for_each(|request| self.free(request));
    }

    /// Destroys the worker. Nothing may use it afterwards, and nothing reads or writes what was in flight.
    pub(super) fn destroy(&self) {
        // SAFETY: this is the worker's end.
        unsafe { (self.shared.api.functions.worker_destroy)(self.shared.worker) };
        let State { requests, .. } =
            self.shared.state.replace(State { is_destroyed: true, ..State::default() });
        for request in requests {
            // SAFETY: it came from a box, and the callbacks that knew it will not come.
            drop(unsafe { Box::from_raw(request) });
        }
    }
}

/// A message has arrived.
///
/// # Safety
/// UCX calls it, from a call of the lock's holder, with the address of the worker's state.
unsafe extern "C" fn arrived(
    arg: *mut c_void,
    header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const AmReceiveParam,
) -> Status {
    // SAFETY: `listen` gave the address.
    let shared = unsafe { &*arg.cast::<Shared>() };
    let header: &[u8] = match header_length {
        0 => &[],
        // SAFETY: a header that has bytes is valid during this call.
        _ => unsafe { std::slice::from_raw_parts(header.cast(), header_length) },
    };
    // A fetch that is not begun is dropped, and complete for the sender.
    let Some(landing) = shared.inbox.admit(header, length) else { return OK };
    // SAFETY: the parameter is valid during this call.
    if unsafe { (*param).attributes } & ffi::AM_RECV_RNDV == 0 {
        // SAFETY: the data are `length` bytes.
        unsafe { landing.store(data.cast()) };
        return OK;
    }
    let request = shared.take();
    let to = landing.to();
    // SAFETY: the request is in nobody's use but this one's until it is given back. The landing keeps the memory valid so long.
    unsafe {
        (*request).landing = Some(landing);
        let param = RequestParam::with_callback(Callback { receive: fetched }, request.cast());
        let fetch = shared.api.functions.am_recv_data;
        match Outcome::from(fetch(shared.worker, data, to.cast(), length, &param)) {
            Outcome::Pending(_) => {}
            Outcome::Done => {
                let landing = (*request).landing.take();
                shared.give_back(request);
                landing.into_iter().for_each(Landing::arrived);
            }
            Outcome::Failed(_) => shared.give_back(request),
        }
    }
    OK
}

/// A payload was fetched, or its sender is lost.
///
/// # Safety
/// UCX calls it, from a call of the lock's holder, with the request that `arrived` gave it.
unsafe extern "C" fn fetched(operation: *mut c_void, status: Status, _length: usize, user_data: *mut c_void) {
    let request = user_data.cast::<Request>();
    // SAFETY: the request is in use until it is given back; the operation is complete.
    unsafe {
        let shared = &*(*request).shared;
        let landing = (*request).landing.take().filter(|_| status == OK);
        shared.give_back(request);
        landing.into_iter().for_each(Landing::arrived);
        (shared.api.functions.request_free)(operation);
    }
}

/// A send is complete, or its receiver is lost.
///
/// # Safety
/// As for [`fetched`], with the request that `send` gave it.
unsafe extern "C" fn sent(operation: *mut c_void, _status: Status, user_data: *mut c_void) {
    let request = user_data.cast::<Request>();
    // SAFETY: as in `fetched`.
    unsafe {
        let shared = &*(*request).shared;
        shared.give_back(request);
        (shared.api.functions.request_free)(operation);
    }
}

/// The endpoint of a peer has failed.
///
/// # Safety
/// UCX calls it with what `connect` gave it.
unsafe extern "C" fn failed(arg: *mut c_void, _endpoint: Endpoint, _status: Status) {
    // SAFETY: `connect` gave the address, and these live as long as the worker.
    let lost = unsafe { &*arg.cast::<AtomicU32>() };
    lost.store(1, Ordering::Release);
}
