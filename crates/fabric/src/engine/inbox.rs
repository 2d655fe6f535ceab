//! Where arriving messages go, and every check of what a peer sends.

use std::{
    collections::BTreeMap,
    ptr::{self, NonNull},
    sync::{Arc, MutexGuard, OnceLock, PoisonError},
};

use antiphon_device::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

use super::{Key, Message};

/// A communicator's side of arriving messages: the memory for their payloads, and what is to be done once those are in place.
///
/// # Safety
/// The memory of [`region`](Self::region) is valid for writing as long as the value lives, nothing holds a reference into it, and what
/// reads it waits for [`arrived`](Self::arrived) by an acquiring load of what that stored.
pub unsafe trait Receiver: Send + Sync {
    /// The memory that messages of the rank `sender` of this communicator may write: none if no such rank sends messages.
    fn region(&self, sender: usize) -> Option<NonNull<[u8]>>;

    /// All `len` bytes of a message are in place. This runs on the thread that moves messages, under the engine's lock: it must neither
    /// wait nor use the engine.
    fn arrived(&self, message: &Message, len: usize);
}

/// How many messages were dropped, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Dropped {
    /// Their header has not as many bytes as a header has.
    pub malformed: u64,
    /// They have another world's key.
    pub key: u64,
    /// No communicator of this number is registered.
    pub communicator: u64,
    /// Their payload does not lie in the region of their sender.
    pub place: u64,
}

/// The kinds of messages that engines send themselves. Their sender is a rank of the world.
pub(super) const LEAVES: u32 = Message::ENGINES_OWN;
pub(super) const LIVES: u32 = Message::ENGINES_OWN + 1;

/// The state that a peer announces.
#[derive(Default)]
struct Signs {
    left: AtomicU32,
    /// How often it has said that it lives.
    lives: AtomicU64,
}

/// Where the messages of an engine arrive.
///
/// Whatever a peer sends, a message is stored only if it has the world's key and lies in the region of its sender. All others are dropped
/// and counted.
pub struct Inbox {
    key: OnceLock<Key>,
    receivers: Mutex<BTreeMap<u64, Arc<dyn Receiver>>>,
    /// The signs of each peer.
    signs: Vec<Signs>,
    malformed: AtomicU64,
    wrong_key: AtomicU64,
    unregistered: AtomicU64,
    out_of_place: AtomicU64,
}

/// A message that was admitted, while its payload is being stored.
pub(super) struct Landing {
    message: Message,
    receiver: Arc<dyn Receiver>,
    to: *mut u8,
    len: usize,
}

// SAFETY: the receiver keeps the memory valid on all threads.
unsafe impl Send for Landing {}

impl Landing {
    /// Where the payload is to be stored: valid for writing all its bytes.
    pub(super) fn to(&self) -> *mut u8 {
        self.to
    }

    /// Stores the payload and releases the signal.
    ///
    /// # Safety
    /// `payload` is valid for reading as many bytes as were admitted.
    pub(super) unsafe fn store(self, payload: *const u8) {
        if self.len > 0 {
            // SAFETY: the caller's promise, and that of `admit`. They may overlap where a program sends to itself.
            unsafe { ptr::copy(payload, self.to, self.len) };
        }
        self.arrived();
    }

    /// All bytes are stored.
    pub(super) fn arrived(self) {
        self.receiver.arrived(&self.message, self.len);
    }
}

impl Inbox {
    /// An inbox for the messages of `peers` peers.
    pub(super) fn new(peers: usize) -> Self {
        Self {
            key: OnceLock::new(),
            receivers: Mutex::default(),
            signs: (0..peers).map(|_| Signs::default()).collect(),
            malformed: AtomicU64::default(),
            wrong_key: AtomicU64::default(),
            unregistered: AtomicU64::default(),
            out_of_place: AtomicU64::default(),
        }
    }

    /// Sets the key of the world. Before that the engine moves nothing: messages wait in the network. A second key is ignored.
    pub fn open(&self, key: Key) {
        let _ = self.key.set(key);
    }

    /// The key, once the inbox is open.
    pub(super) fn key(&self) -> Option<Key> {
        self.key.get().copied()
    }

    /// Gives the messages of a communicator to `receiver` from now on. All ranks must have registered a communicator before one sends
    /// messages of it.
    pub fn register(&self, communicator: u64, receiver: Arc<dyn Receiver>) {
        self.receivers().insert(communicator, receiver);
    }

    /// Drops what arrives for a communicator from now on. What is being stored keeps the receiver until it is stored.
    pub fn remove(&self, communicator: u64) {
        // The receiver's drop may do anything, so it runs after the lock.
        let removed = self.receivers().remove(&communicator);
        drop(removed);
    }

    /// How many messages were dropped.
    pub fn dropped(&self) -> Dropped {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Dropped {
            malformed: read(&self.malformed),
            key: read(&self.wrong_key),
            communicator: read(&self.unregistered),
            place: read(&self.out_of_place),
        }
    }

    /// Admits a message with a payload of `len` bytes, or drops it. The caller holds the engine's lock.
    pub(super) fn admit(&self, header: &[u8], len: usize) -> Option<Landing> {
        let Some((key, message)) = Message::decode(header) else { return drop_and_count(&self.malformed) };
        if self.key() != Some(key) {
            return drop_and_count(&self.wrong_key);
        }
        if message.kind >= Message::ENGINES_OWN {
            match self.signs.get(message.sender as usize) {
                Some(signs) => signs.take(message.kind),
                None => return drop_and_count(&self.out_of_place),
            }
            return None;
        }
        let receiver = self.receivers().get(&message.communicator).cloned();
        let Some(receiver) = receiver else { return drop_and_count(&self.unregistered) };
        match place(&*receiver, &message, len) {
            Some(to) => Some(Landing { message, receiver, to, len }),
            None => drop_and_count(&self.out_of_place),
        }
    }

    /// Whether a peer has said that it leaves.
    pub(super) fn has_left(&self, peer: usize) -> bool {
        self.signs.get(peer).is_some_and(|signs| signs.left.load(Ordering::Acquire) != 0)
    }

    /// How often a peer has said that it lives.
    pub(super) fn signs_of_life(&self, peer: usize) -> u64 {
        self.signs.get(peer).map_or(0, |signs| signs.lives.load(Ordering::Relaxed))
    }

    /// How many peers there are, this one included.
    pub(super) fn peers(&self) -> usize {
        self.signs.len()
    }

    fn receivers(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<dyn Receiver>>> {
        // A map is whole even if a panic came between.
        self.receivers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Signs {
    fn take(&self, kind: u32) {
        match kind {
            LEAVES => self.left.store(1, Ordering::Release),
            LIVES => self.lives.store(self.lives.load(Ordering::Relaxed) + 1, Ordering::Relaxed),
            // A sign of a later version.
            _ => {}
        }
    }
}

/// Where a payload goes, if that is inside of its sender's region. A payload without bytes goes nowhere.
fn place(receiver: &dyn Receiver, message: &Message, len: usize) -> Option<*mut u8> {
    if len == 0 {
        return Some(NonNull::dangling().as_ptr());
    }
    let region = receiver.region(message.sender as usize)?;
    let place = usize::try_from(message.place).ok()?;
    let fits = place.checked_add(len).is_some_and(|end| end <= region.len());
    // SAFETY: the place lies in the region.
    fits.then(|| unsafe { region.cast::<u8>().as_ptr().add(place) })
}

fn drop_and_count(count: &AtomicU64) -> Option<Landing> {
    count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    None
}

/// See [`super::message::fuzz`].
pub(super) fn fuzz(bytes: &[u8]) {
    /// Rank 0 has a region and rank 1 has none. The last word of the memory is nobody's.
    struct Regions(NonNull<[u8]>, AtomicU64);

    // SAFETY: the memory outlives the call of `fuzz`, and each payload is stored before it is read.
    unsafe impl Receiver for Regions {
        fn region(&self, sender: usize) -> Option<NonNull<[u8]>> {
            (sender == 0).then_some(self.0)
        }

        fn arrived(&self, _message: &Message, len: usize) {
            self.1.store(len as u64 + 1, Ordering::Relaxed);
        }
    }
    // SAFETY: a raw pointer to a slice is a pointer and a length.
    unsafe impl Send for Regions {}
    // SAFETY: likewise.
    unsafe impl Sync for Regions {}

    const REGION: usize = 64;
    let Some((len, header)) = bytes.split_first() else { return };
    let (key, len) = (Key::from_bytes([7; Key::LEN]), usize::from(*len));
    let mut memory = [0u8; REGION + 8];
    let region = NonNull::slice_from_raw_parts(NonNull::from(&mut memory).cast(), REGION);
    let regions = Arc::new(Regions(region, AtomicU64::default()));
    let inbox = Inbox::new(0);
    inbox.open(key);
    inbox.register(1, regions.clone());
    let payload = vec![0xAB; len];
    // An admitted header is given with the right key too: a fuzzer does not guess it.
    for header in [header.to_vec(), key.to_bytes().into_iter().chain(header.iter().copied()).collect()] {
        let admitted = inbox.admit(&header, len);
        let expected = Message::decode(&header).is_some_and(|(theirs, message)| {
            let fits = u128::from(message.place) + len as u128 <= REGION as u128;
            theirs == key
                && message.communicator == 1
                && message.kind < Message::ENGINES_OWN
                && (len == 0 || message.sender == 0 && fits)
        });
        assert_eq!(admitted.is_some(), expected);
        if let Some(landing) = admitted {
            // SAFETY: the payload has `len` bytes.
            unsafe { landing.store(payload.as_ptr()) };
            assert_eq!(regions.1.load(Ordering::Relaxed), len as u64 + 1);
        }
    }
    // SAFETY: nothing writes any more, and the last bytes never were a place.
    let rest = unsafe { region.cast::<u8>().as_ptr().add(REGION).cast::<[u8; 8]>().read() };
    assert_eq!(rest, [0; 8], "what lies behind a region is never written");
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn with_header(len: u8, message: &Message) -> Vec<u8> {
        let header = message.encode(Key::from_bytes([7; Key::LEN]));
        [&[len][..], &header].concat()
    }

    // The bounded run of the fuzz target: numbers near the limits, which a fuzzer finds in hours.
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]

        #[test]
        fn what_lies_in_the_senders_region_is_admitted_and_nothing_else(
            len: u8,
            communicator in 0u64..3,
            sender in prop_oneof![0u32..3, any::<u32>()],
            place in prop_oneof![0u64..70, (0u64..300).prop_map(|below| u64::MAX - below), any::<u64>()],
            cut in 0usize..3,
        ) {
            let message = Message { communicator, sender, place, ..Message::default() };
            let bytes = with_header(len, &message);
            fuzz(&bytes);
            fuzz(&bytes[..bytes.len() - cut]);
            fuzz(&[&bytes[..1], &bytes[1 + Key::LEN..]].concat());
        }

        #[test]
        fn noise_is_dropped(noise in proptest::collection::vec(any::<u8>(), 0..120)) {
            fuzz(&noise);
        }
    }

    #[test]
    fn a_closed_inbox_admits_nothing() {
        let inbox = Inbox::new(0);
        let zero = Message::default().encode(Key::from_bytes([0; Key::LEN]));
        assert!(inbox.admit(&zero, 0).is_none());
        assert_eq!(inbox.dropped(), Dropped { key: 1, ..Dropped::default() });
    }
}
