//! Packets: data that says by itself whether it is there.
//!
//! Four bytes of data and the launch's flag share one atomic word of eight bytes, so whoever sees the flag sees the
//! data. A packet is one such word (LL8) or two (LL16), all of which must carry the flag. Words keep their places whatever
//! the message's size, and are never written by anything else, so that no data is ever taken for a flag.

use antiphon_device::sync::{AtomicU64, Ordering};

/// How much a packet carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u8)]
pub enum PacketKind {
    /// 4 bytes of data in 8.
    LL8 = 8,
    /// 8 bytes of data in 16.
    #[default]
    LL16 = 16,
}

impl PacketKind {
    /// Bytes of data in a packet.
    pub fn payload(self) -> usize {
        self as usize / 2
    }
}

/// Bytes of data in a word.
const DATA: usize = 4;

/// # Safety
/// `packets` is that of a packet area, and its word number `at` lies in it.
#[inline(always)]
unsafe fn word<'a>(packets: *const u8, at: usize) -> &'a AtomicU64 {
    // SAFETY: areas are aligned to 16 bytes, consist of words that only these functions touch, and stay mapped during a
    // launch.
    unsafe { &*packets.cast::<AtomicU64>().add(at) }
}

/// The words of so many bytes.
fn words(kind: PacketKind, len: usize) -> usize {
    len.div_ceil(kind.payload()) * (kind.payload() / DATA)
}

/// Writes bytes as packets.
///
/// # Safety
/// `from` is valid for reading `len` bytes; `to` is the beginning of a packet, and as many fit as the bytes need.
pub(super) unsafe fn pack(kind: PacketKind, from: *const u8, to: *mut u8, len: usize, flag: u32) {
    for at in 0..words(kind, len) {
        let mut data = [0; DATA];
        let part = len.saturating_sub(at * DATA).min(DATA);
        // SAFETY: the part lies within the bytes. (Of whole words the compiler makes one load.)
        unsafe {
            if part == DATA {
                data = from.add(at * DATA).cast::<[u8; DATA]>().read_unaligned();
            } else {
                from.add((at * DATA).min(len)).copy_to_nonoverlapping(data.as_mut_ptr(), part);
            }
        }
        let value = u64::from(u32::from_le_bytes(data)) | u64::from(flag) << 32;
        // Release: pairs with the load in `unpack`, as a signal would; the data itself needs no order.
        // SAFETY: as the caller says.
        unsafe { word(to, at) }.store(value, Ordering::Release);
    }
}

/// Reads packets as bytes; if one is not there, says where it is missing: so many bytes of the area behind `from`.
///
/// # Safety
/// `from` is the beginning of a packet, and as many follow as `len` bytes need; `to` is valid for writing them.
pub(super) unsafe fn unpack(
    kind: PacketKind,
    from: *const u8,
    to: *mut u8,
    len: usize,
    flag: u32,
) -> Result<(), usize> {
    let per_packet = kind.payload() / DATA;
    for first in (0..words(kind, len)).step_by(per_packet) {
        // SAFETY: as the caller says.
        let value = |at: usize| unsafe { word(from, at) }.load(Ordering::Acquire);
        let packet = [value(first), if per_packet == 2 { value(first + 1) } else { u64::from(flag) << 32 }];
        if let Some(missing) = packet.iter().position(|value| (value >> 32) as u32 != flag) {
            return Err((first + missing) * size_of::<u64>());
        }
        for (at, value) in (first..).zip(packet).take(per_packet) {
            let part = len.saturating_sub(at * DATA).min(DATA);
            let data = (value as u32).to_le_bytes();
            // SAFETY: the part lies within the bytes.
            unsafe {
                if part == DATA {
                    to.add(at * DATA).cast::<[u8; DATA]>().write_unaligned(data);
                } else {
                    data.as_ptr().copy_to_nonoverlapping(to.add((at * DATA).min(len)), part);
                }
            }
        }
    }
    Ok(())
}

/// The flag of the packet word at a place.
///
/// # Safety
/// It is a word of a packet area.
pub(super) unsafe fn flag_at(place: *const u8) -> u32 {
    // SAFETY: as the caller says.
    (unsafe { word(place, 0) }.load(Ordering::Acquire) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length comes back, needs all its packets, and touches nothing beside them.
    #[test]
    fn bytes_survive_packets_of_any_length() {
        for kind in [PacketKind::LL8, PacketKind::LL16] {
            for len in 0..40 {
                let bytes: Vec<u8> = (1..=len as u8).collect();
                let (mut area, mut back) = (vec![0u64; 40], vec![0xEE; len + 1]);
                let packets: *mut u8 = area.as_mut_ptr().cast();
                // SAFETY: both are long enough.
                unsafe {
                    pack(kind, bytes.as_ptr(), packets, len, 7);
                    assert_eq!(unpack(kind, packets, back.as_mut_ptr(), len, 7), Ok(()));
                }
                assert_eq!((&back[..len], back[len]), (&bytes[..], 0xEE));
                let used = len.div_ceil(kind.payload()) * kind as usize / 8;
                assert!(area[..used].iter().all(|word| word >> 32 == 7));
                assert!(area[used..].iter().all(|&word| word == 0));
            }
        }
    }

    #[test]
    fn a_packet_is_there_when_all_its_words_are() {
        let mut area = [0u64; 8];
        let packets: *mut u8 = area.as_mut_ptr().cast();
        let mut back = [0u8; 16];
        // SAFETY: 16 bytes need 4 words.
        unsafe {
            pack(PacketKind::LL16, [5u8; 16].as_ptr(), packets, 16, 3);
            packets.cast::<u64>().add(3).write(2 << 32 | 5);
            assert_eq!(unpack(PacketKind::LL16, packets, back.as_mut_ptr(), 16, 3), Err(24));
            assert_eq!(back[8..], [0; 8]);
            assert_eq!((flag_at(packets.add(16)), flag_at(packets.add(24))), (3, 2));
        }
    }
}
