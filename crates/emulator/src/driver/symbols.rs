//! The static shared memory of kernels, from the symbols of their compiled program.

/// Little-endian numbers of an ELF file.
struct Elf<'b>(&'b [u8]);

impl<'b> Elf<'b> {
    fn number(&self, at: usize, len: usize) -> Option<usize> {
        let bytes = self.0.get(at..at + len)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    }

    /// Where a section of this type is, its bytes, and the section that it names; 64 bytes tell about each.
    fn section(&self, is_it: impl Fn(usize, usize) -> bool) -> Option<(&'b [u8], usize)> {
        let (headers, count) = (self.number(40, 8)?, self.number(60, 2)?);
        (0..count).find_map(|index| {
            let header = headers + 64 * index;
            let (at, len) = (self.number(header + 24, 8)?, self.number(header + 32, 8)?);
            let is_wanted = is_it(index, self.number(header + 4, 4)?);
            if is_wanted { Some((self.0.get(at..at + len)?, self.number(header + 40, 4)?)) } else { None }
        })
    }

    /// The names and sizes of the variables.
    fn variables(&self) -> Option<Vec<(&'b str, u32)>> {
        const SYMBOLS: usize = 2;
        const VARIABLE: usize = 1;
        let (symbols, names) = self.section(|_, kind| kind == SYMBOLS)?;
        let (names, _) = self.section(|index, _| index == names)?;
        let mut found = Vec::new();
        for symbol in symbols.chunks_exact(24).map(Elf) {
            if symbol.number(4, 1)? & 15 == VARIABLE {
                let name = names.get(symbol.number(0, 4)?..)?.split(|byte| *byte == 0).next()?;
                found.push((std::str::from_utf8(name).ok()?, symbol.number(16, 8)? as u32));
            }
        }
        Some(found)
    }
}

/// The bytes that each of these kernels declares `__shared__`. What a function declares that is no kernel counts for all of them.
pub(super) fn shared_bytes(image: &[u8], kernels: &[&str]) -> Vec<u32> {
    // As g++ mangles `image` of device/blocks.hpp for what `sum` declares: _ZN8emulator12shared_placeIZ3sumE17emulated_shared_9E5imageE.
    let of = |name: &str, kernel: &str| name.contains(&format!("{}{kernel}E", kernel.len()));
    let all = Elf(image).variables().unwrap_or_default();
    let is_shared = |name: &str| name.starts_with("_ZN8emulator12shared_place") && name.ends_with("5imageE");
    let declared: Vec<_> = all.into_iter().filter(|(name, _)| is_shared(name)).collect();
    let bytes = |kernel: &&str| {
        let is_its = |name: &str| of(name, kernel) || !kernels.iter().any(|other| of(name, other));
        declared.iter().filter(|(name, _)| is_its(name)).map(|(_, len)| len.next_multiple_of(16)).sum()
    };
    kernels.iter().map(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::shared_bytes;
    use crate::kernel;

    #[test]
    fn a_kernel_has_its_own_and_that_of_functions() {
        if std::process::Command::new("g++").arg("--version").output().is_err() {
            return eprintln!("skipped: no g++");
        }
        let source = "template <int N> __device__ int* room() { __shared__ int of[N]; return of; }
            extern \"C\" __global__ void small(int* to) { __shared__ int kept[4]; kept[*to] = 1; room<8>()[*to] = kept[1]; }
            namespace inner { __global__ void large(int* to) { __shared__ double kept[100]; kept[*to] = 1; *to = kept[1]; } }";
        let image = kernel::compile(source, &["--gpu-architecture=sm_90a".to_owned()]).unwrap();
        assert_eq!(shared_bytes(&image, &["small", "large"]), [16 + 32, 800 + 32]);
    }
}
