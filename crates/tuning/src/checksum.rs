//! A hash that is the same in every build, on every machine, for ever.

/// FNV-1a with 64 bits. It guards against change and accident, not against an adversary.
pub(crate) struct Fnv(u64);

impl Fnv {
    /// The hash of nothing.
    pub(crate) const fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    /// Hashes a number.
    pub(crate) fn number(self, number: u64) -> Self {
        self.bytes(&number.to_le_bytes())
    }

    /// Hashes a string, with its length so that two strings never run into one.
    pub(crate) fn text(self, text: &str) -> Self {
        self.number(text.len() as u64).bytes(text.as_bytes())
    }

    /// The hash so far.
    pub(crate) const fn finish(&self) -> u64 {
        self.0
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        self
    }
}

/// The checksum of candidates by name and order, as it stands in the cache file.
pub(crate) fn of_candidates(names: &[impl AsRef<str>]) -> String {
    let hash = names.iter().fold(Fnv::new(), |hash, name| hash.text(name.as_ref()));
    format!("{:016x}", hash.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_fnv_1a() {
        // Test vectors of draft-eastlake-fnv, appendix C.
        assert_eq!(Fnv::new().finish(), 0xcbf2_9ce4_8422_2325);
        assert_eq!(Fnv::new().bytes(b"a").finish(), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(Fnv::new().bytes(b"foobar").finish(), 0x8594_4171_f739_67e8);
    }

    #[test]
    fn depends_on_names_and_order_and_borders() {
        let all = [["ab", "c"], ["a", "bc"], ["c", "ab"]].map(|names| of_candidates(&names));
        assert_ne!(all[0], all[1]);
        assert_ne!(all[0], all[2]);
    }
}
