//! Packets: data that shows by itself whether it has arrived.
//!
//! Four bytes of data and the launch's flag share one atomic word of eight bytes, so a reader that sees the flag sees the
//! data. A packet is one such word (LL8) or two (LL16), all of which must carry the flag. The place of a word does not depend on
//! the message's size, and nothing else is ever written there, so no data is mistaken for a flag.

use antiphon_device::sync::{AtomicU64, Ordering, fence};

use crate::layout::PacketKind;

/// Bytes of data in a word.
const DATA: usize = size_of::<u32>();
/// Words that are looked at together, without a branch each: those of a cache line.
const LINE: usize = 8;

/// # Safety
/// `packets` is that of a packet area, and its word number `at` lies in it.
#[inline(always)]
unsafe fn word<'a>(packets: *const u8, at: usize) -> &'a AtomicU64 {
    // SAFETY: areas are aligned to 16 bytes, consist of words that only these functions touch, and stay mapped during a
    // launch.
    unsafe { &*packets.cast::<AtomicU64>().add(at) }
}

/// The words that `len` bytes take.
fn words(kind: PacketKind, len: usize) -> usize {
    len.div_ceil(kind.payload()) * (kind.payload() / DATA)
}

/// Writes bytes as packets.
///
/// # Safety
/// `from` is valid for reading `len` bytes; `to` is the beginning of a packet, and as many fit as the bytes need.
pub(super) unsafe fn pack(kind: PacketKind, from: *const u8, to: *mut u8, len: usize, flag: u32) {
    let write = |at: usize, data: [u8; DATA]| {
        let value = u64::from(u32::from_le_bytes(data)) | u64::from(flag) << 32;
        // Release: pairs with the fence in `unpack`, as a signal would with a wait.
        // SAFETY: as the caller says.
        unsafe { word(to, at) }.store(value, Ordering::Release);
    };
    let whole = len / DATA;
    for at in 0..whole {
        // SAFETY: the four bytes lie within the others.
        write(at, unsafe { from.cast::<[u8; DATA]>().add(at).read_unaligned() });
    }
    let mut rest = [0; DATA];
    // SAFETY: these are the last bytes.
    unsafe { from.add(whole * DATA).copy_to_nonoverlapping(rest.as_mut_ptr(), len % DATA) };
    for at in whole..words(kind, len) {
        write(at, std::mem::take(&mut rest));
    }
}

/// Reads packets as bytes. If a packet is not there yet, the error is its offset in bytes from `from`.
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
    let (words, whole) = (words(kind, len), len / DATA);
    // The high half is zero if a word is there.
    // SAFETY: as the caller says.
    let differs = |at: usize| unsafe { word(from, at) }.load(Ordering::Relaxed) ^ u64::from(flag) << 32;
    let is_whole = |line: &usize| (0..LINE).fold(0, |any, at| any | differs(line * LINE + at)) >> 32 == 0;
    let first = (0..words / LINE).take_while(is_whole).count() * LINE;
    if let Some(missing) = (first..words).find(|&at| differs(at) >> 32 != 0) {
        return Err(missing * size_of::<u64>());
    }
    // Pairs with the stores in `pack`: they happen before what follows. And since a plan has no races, nobody writes these
    // words again before they are read, so that plain reads do for the data, which the compiler can widen.
    fence(Ordering::Acquire);
    let data = |at: usize| {
        // SAFETY: as the caller says.
        let word = unsafe { from.cast::<u64>().add(at).read() };
        (word as u32).to_le_bytes()
    };
    // SAFETY: the words' bytes, and what is left, lie within the others.
    unsafe {
        for at in 0..whole {
            to.cast::<[u8; DATA]>().add(at).write_unaligned(data(at));
        }
        if whole * DATA < len {
            let last = data(whole);
            last.as_ptr().copy_to_nonoverlapping(to.add(whole * DATA), len % DATA);
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
