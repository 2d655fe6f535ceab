//! The frames that ranks exchange while they meet.
//!
//! A frame is a 12-byte header (magic `ANTI`, protocol version, kind, payload length; little endian) and a JSON
//! payload. Frames come from any process that can reach the socket, so decoding trusts nothing: the length is bounded before
//! anything is allocated, and every malformed input is an error, never a panic (there is a fuzz target).

use serde::{Deserialize, Serialize};

/// The version of the protocol; ranks of different versions refuse each other.
pub const VERSION: u16 = 5;
/// The longest payload, in bytes: the cards of hundreds of ranks with hundreds of cores each.
pub const MAX_PAYLOAD: usize = 1 << 20;

const MAGIC: [u8; 4] = *b"ANTI";
const HEADER: usize = 12;

/// What a rank tells the other ranks about itself when they meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Card {
    /// Its rank.
    pub rank: usize,
    /// The world size that it expects.
    pub world_size: usize,
    /// Its process id, in its own PID namespace.
    pub pid: u32,
    /// The PID namespace that the id belongs to, or 0 if it is not known.
    pub pid_namespace: u64,
    /// The cores it may run on.
    pub cores: Vec<u32>,
    /// The bytes of symmetric memory that it expects every rank to have.
    pub arena_bytes: usize,
    /// Its rank in the communicator of which this one will be a group, if it is to be one.
    pub parent_rank: Option<usize>,
    /// Where it is, if the ranks may be on several nodes.
    pub place: Option<Place>,
}

/// Where a rank is, and how ranks on other nodes reach it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The name of its node: ranks with equal names share a memory.
    pub node: String,
    /// What names its machine, and the network namespace there in which it is.
    pub machine: String,
    /// The address of its engine, or why it has none.
    pub engine: Result<Vec<u8>, String>,
}

impl Card {
    /// The process: its id and the PID namespace of the id, if that is known.
    pub(crate) fn process(&self) -> Option<(u32, u64)> {
        Some((self.pid, self.pid_namespace)).filter(|_| self.pid_namespace != 0)
    }

    /// Whether both ranks are threads of one process. Numbers of processes mean nothing on another machine.
    pub(crate) fn is_of_process(&self, other: &Self) -> bool {
        let machine = |card: &Self| card.place.as_ref().map(|place| place.machine.clone());
        self.process().is_some() && self.process() == other.process() && machine(self) == machine(other)
    }
}

/// Random bytes that make a proof worthless the second time, in hexadecimal.
pub type Nonce = String;
/// An HMAC-SHA256 over the whole conversation so far, in hexadecimal.
pub type Proof = String;

/// One message of the meeting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Frame {
    /// Rank 0 challenges every peer that connects.
    Challenge {
        /// To be covered by the joiner's proof.
        nonce: Nonce,
    },
    /// A rank asks to join, and proves that it knows the secret. A handle on its process (a pidfd) travels beside this
    /// frame, if the rank has one.
    Join {
        /// The rank that joins.
        card: Card,
        /// To be covered by rank 0's proof.
        nonce: Nonce,
        /// Over both nonces and the card.
        proof: Proof,
    },
    /// Asks the process that has taken the name to prove that it knows the secret: rank 0 finds the name taken.
    Ask {
        /// To be covered by the proof.
        nonce: Nonce,
    },
    /// Rank 0 has noted the join; the rest are still awaited.
    Noted {
        /// The proof that the sender is rank 0, over both nonces.
        proof: Proof,
    },
    /// Rank 0 turns the joiner away.
    Refusal {
        /// Why, with the numbers that differ.
        reason: String,
        /// Whether asking again later can help.
        retry: bool,
        /// The ranks that never arrived, if that is why.
        missing: Vec<usize>,
    },
    /// All ranks have joined. The shared memory's descriptor travels beside this frame, then the handles of processes.
    Welcome {
        /// The cards of all ranks, in order.
        cards: Vec<Card>,
        /// The ranks whose process handles come beside this frame: one for each process but the receiver's own.
        handles: Vec<usize>,
        /// What rank 0 has drawn for this world: worlds with the same secret and the same cards differ in it.
        random: Nonce,
        /// Over both nonces, the cards, the handles' ranks and what rank 0 has drawn.
        proof: Proof,
    },
}

/// Bytes that are no frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The first bytes are not ours.
    #[error("not a frame of this protocol: it starts with {0:02x?}")]
    Magic([u8; 4]),
    /// The other side speaks another version.
    #[error("protocol version {0}, this is version {VERSION}")]
    Version(u16),
    /// The length field exceeds the limit.
    #[error("a payload of {0} bytes exceeds the limit of {MAX_PAYLOAD}")]
    TooLong(u32),
    /// The payload is not what the header says.
    #[error("malformed payload: {0}")]
    Payload(String),
}

impl Frame {
    /// The bytes to send.
    pub fn encode(&self) -> Vec<u8> {
        let payload = serde_json::to_vec(self).expect("frames hold only strings and numbers");
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.extend_from_slice(&0u16.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&payload);
        bytes
    }

    /// Takes the first frame off `bytes`: the frame and its length, or nothing while it is incomplete.
    ///
    /// # Errors
    /// [`FrameError`] as soon as the bytes cannot become a frame.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            let mut start = [0; 4];
            start[..known].copy_from_slice(&bytes[..known]);
            return Err(FrameError::Magic(start));
        }
        let Some(header) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
        let version = u16::from_le_bytes([header[4], header[5]]);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        if length as usize > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length));
        }
        let end = HEADER + length as usize;
        let Some(payload) = bytes.get(HEADER..end) else { return Ok(None) };
        let frame = serde_json::from_slice(payload).map_err(|e| FrameError::Payload(e.to_string()))?;
        Ok(Some((frame, end)))
    }
}

/// What the fuzz target runs: decoding any bytes must neither panic nor disagree with itself, whether they come at
/// once or piece by piece, and what it accepts must survive a round trip.
#[doc(hidden)]
pub fn fuzz(bytes: &[u8]) {
    let whole = Frame::decode(bytes);
    if let Ok(Some((frame, length))) = &whole {
        assert!(*length <= bytes.len());
        let again = frame.encode();
        assert_eq!(Frame::decode(&again), Ok(Some((frame.clone(), again.len()))));
        assert_eq!(Frame::decode(&bytes[..length - 1]), Ok(None), "a frame must need all of its bytes");
    }
    for cut in [1, 4, HEADER, HEADER + 1] {
        if let Some(start) = bytes.get(..cut)
            && let Err(early) = Frame::decode(start)
            && !matches!(early, FrameError::Magic(_))
        {
            assert_eq!(whole, Err(early), "what is wrong at {cut} bytes is wrong with more");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn card() -> Card {
        Card {
            rank: 3,
            world_size: 4,
            pid: 77,
            pid_namespace: 1,
            cores: vec![0, 5],
            arena_bytes: 1 << 30,
            parent_rank: None,
            place: Some(Place { node: "n".into(), machine: "m".into(), engine: Ok(vec![1, 2, 255]) }),
        }
    }

    fn noted() -> Frame {
        Frame::Noted { proof: "bb".into() }
    }

    fn frames() -> Vec<Frame> {
        vec![
            Frame::Challenge { nonce: "00ff".into() },
            Frame::Join { card: card(), nonce: "aa".into(), proof: "bb".into() },
            Frame::Ask { nonce: "aa".into() },
            noted(),
            Frame::Refusal { reason: "no".into(), retry: true, missing: vec![1] },
            Frame::Welcome {
                cards: vec![card(); 64],
                handles: vec![0, 3],
                random: "dd".into(),
                proof: "cc".into(),
            },
        ]
    }

    #[test]
    fn frames_survive_the_wire_in_any_pieces() {
        for frame in frames() {
            let bytes = frame.encode();
            for cut in 0..bytes.len() {
                assert_eq!(Frame::decode(&bytes[..cut]), Ok(None));
            }
            let mut more = bytes.clone();
            more.extend_from_slice(b"ANTI");
            assert_eq!(Frame::decode(&more), Ok(Some((frame, bytes.len()))));
        }
    }

    #[test]
    fn frames_of_other_protocols_are_recognised_at_once() {
        assert_eq!(Frame::decode(b"GET / HTTP/1.1"), Err(FrameError::Magic(*b"GET ")));
        assert_eq!(Frame::decode(b"\x16"), Err(FrameError::Magic([0x16, 0, 0, 0])));
        let mut long = noted().encode();
        long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(Frame::decode(&long), Err(FrameError::TooLong(u32::MAX)));
        let mut newer = noted().encode();
        newer[4] = 9;
        assert_eq!(Frame::decode(&newer), Err(FrameError::Version(9)));
    }

    /// A header that is right, before a payload that may be anything.
    fn with_header(payload: &[u8]) -> Vec<u8> {
        let mut bytes = noted().encode()[..HEADER].to_vec();
        bytes[8..].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::hash_map("[a-zA-Z_]{0,6}", inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    /// Every place in a JSON value, the whole included, as in RFC 6901.
    fn places(value: &Value, here: String, found: &mut Vec<String>) {
        match value {
            Value::Object(map) => map.iter().for_each(|(k, v)| places(v, format!("{here}/{k}"), found)),
            Value::Array(list) => {
                list.iter().enumerate().for_each(|(i, v)| places(v, format!("{here}/{i}"), found));
            }
            _ => {}
        }
        found.push(here);
    }

    // The bounded run of the fuzz target: what a fuzzer finds by itself in hours is given to it here.
    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn decoding_noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..200)) {
            fuzz(&noise);
            fuzz(&with_header(&noise));
        }

        #[test]
        fn decoding_damaged_frames_never_panics(
            frame in proptest::sample::select(frames()),
            edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
            in_header in any::<bool>(),
            cut in any::<proptest::sample::Index>(),
        ) {
            let mut bytes = frame.encode();
            for (index, byte) in edits {
                let at = index.index(if in_header { HEADER } else { bytes.len() });
                bytes[at] = byte;
            }
            fuzz(&bytes);
            fuzz(&bytes[..cut.index(bytes.len())]);
        }

        #[test]
        fn decoding_other_json_never_panics(
            frame in proptest::sample::select(frames()),
            place in any::<proptest::sample::Index>(),
            other in any_json(),
        ) {
            let mut json = serde_json::to_value(&frame).unwrap();
            let mut found = Vec::new();
            places(&json, String::new(), &mut found);
            *json.pointer_mut(&found[place.index(found.len())]).unwrap() = other;
            fuzz(&with_header(&serde_json::to_vec(&json).unwrap()));
        }
    }
}
