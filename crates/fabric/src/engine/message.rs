//! What travels before a payload.

/// The random key of a world. A receiver drops messages with any other: an engine's port takes messages from anybody.
#[derive(Clone, Copy, Eq)]
pub struct Key([u8; Key::LEN]);

impl PartialEq for Key {
    /// It takes the same time for every wrong key.
    fn eq(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

impl std::fmt::Debug for Key {
    /// Without the bytes: who knows them can write into the world's memory.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// The bytes of a key.
    pub const LEN: usize = 16;

    /// A fresh random key.
    ///
    /// # Panics
    /// If the operating system has no random bytes.
    pub fn random() -> Self {
        let mut bytes = [0; Self::LEN];
        getrandom::fill(&mut bytes).expect("the operating system has random bytes");
        Self(bytes)
    }

    /// The key of these bytes.
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// A number that differs between keys.
    pub(crate) fn number(self) -> u64 {
        let (first, _) = self.0.split_first_chunk().expect("a key is longer");
        u64::from_le_bytes(*first)
    }

    /// Its bytes, to be told to the ranks of the world and to nobody else.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        self.0
    }
}

/// What a message says beside its payload.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Message {
    /// The number of the communicator, under which the receiver has [registered](super::Inbox::register) it.
    pub communicator: u64,
    /// The sender's rank in the communicator.
    pub sender: u32,
    /// What kind of message it is: the communicator's choice, below [`ENGINES_OWN`](Self::ENGINES_OWN).
    pub kind: u32,
    /// Where the payload goes: an offset in the [region](super::Receiver::region) of the sender.
    pub place: u64,
    /// What the receiver needs when the payload is in place, such as a stamp.
    pub words: [u64; 5],
}

/// The numbers of a message.
const NUMBERS: usize = 8;

impl Message {
    /// The bytes of a message's header: the key, then the numbers, least significant byte first.
    pub const HEADER: usize = Key::LEN + NUMBERS * 8;
    /// The first kind that engines use for themselves.
    pub const ENGINES_OWN: u32 = 1 << 31;

    /// The header of this message under this key.
    pub fn encode(&self, key: Key) -> [u8; Self::HEADER] {
        let [a, b, c, d, e] = self.words;
        let numbers: [u64; NUMBERS] = [
            self.communicator,
            u64::from(self.sender) | u64::from(self.kind) << 32,
            self.place,
            a,
            b,
            c,
            d,
            e,
        ];
        let mut header = [0; Self::HEADER];
        let (first, rest) = header.split_at_mut(Key::LEN);
        first.copy_from_slice(&key.0);
        for (to, number) in rest.chunks_exact_mut(8).zip(numbers) {
            to.copy_from_slice(&number.to_le_bytes());
        }
        header
    }

    /// The message of a header and its key, unless there are more or fewer bytes than a header has.
    pub fn decode(header: &[u8]) -> Option<(Key, Self)> {
        let header: &[u8; Self::HEADER] = header.try_into().ok()?;
        let (key, numbers) = header.split_first_chunk()?;
        let mut numbers =
            numbers.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
        let mut next = || numbers.next().expect("a header has all numbers");
        let (communicator, two, place) = (next(), next(), next());
        let message = Self {
            communicator,
            sender: two as u32,
            kind: (two >> 32) as u32,
            place,
            words: std::array::from_fn(|_| next()),
        };
        Some((Key(*key), message))
    }
}

/// What the fuzz target runs: the header and the length of a peer's message, which an [`Inbox`](super::Inbox) with two senders must admit if
/// and only if the payload lies in the sender's region.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) {
    super::inbox::fuzz(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_message_survives_its_header(
            key: [u8; 16], communicator: u64, sender: u32, kind: u32, place: u64, words: [u64; 5],
        ) {
            let message = Message { communicator, sender, kind, place, words };
            let header = message.encode(Key(key));
            prop_assert_eq!(Message::decode(&header), Some((Key(key), message)));
            prop_assert_eq!(Message::decode(&header[1..]), None);
            prop_assert_eq!(Message::decode(&[&header[..], &[0]].concat()), None);
        }
    }

    #[test]
    fn a_key_is_not_printed() {
        assert_eq!(format!("{:?}", Key([42; 16])), "Key(..)");
        assert_ne!(Key::random(), Key::random());
    }
}
