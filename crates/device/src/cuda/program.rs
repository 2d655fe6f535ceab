//! Kernels as text: a program and the architecture it is for.

use std::{env, fmt};

use super::CudaVersion;

/// The code before every kernel: types, conversions, memory order, reductions, waiting with a deadline.
pub const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");
/// Numbers of few bits and their scales, for programs that quantise; behind the [`PRELUDE`].
pub const FORMATS: &str = include_str!("../../kernels/formats.cuh");

/// The functions of NVSHMEM's device library that kernels call, for programs that are [linked](Program::relocatable) with it; behind the
/// [`PRELUDE`].
pub const PUT_SIGNAL: &str = include_str!("../../kernels/put_signal.cuh");

const OPTIONS: &str = "ANTIPHON_NVRTC_OPTIONS";

/// The kind of GPU that machine code is for, written `sm_90a`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Architecture {
    number: u32,
    specific: bool,
}

impl Architecture {
    /// Ampere: A100.
    pub const SM_80: Self = Self { number: 80, specific: false };
    /// Hopper: H100, H200.
    pub const SM_90A: Self = Self { number: 90, specific: true };
    /// Blackwell: B200.
    pub const SM_100A: Self = Self { number: 100, specific: true };

    /// That of a device: from Hopper on with the instructions that only this very architecture has (the `a`), since
    /// code is compiled for the device it runs on.
    pub fn of_capability(major: u32, minor: u32) -> Self {
        Self { number: major * 10 + minor, specific: major >= 9 }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

/// A program to compile: the [`PRELUDE`], then its own texts, with the constants that it specialises on.
///
/// ```
/// use antiphon_device::cuda::{Architecture, Program};
///
/// let source = "extern \"C\" __global__ void fill(u32* to) { to[threadIdx.x] = VALUE; }";
/// let program = Program::new("fill.cu", source, Architecture::SM_90A).define("VALUE", 7);
/// assert!(program.source().ends_with(source));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    name: String,
    source: String,
    architecture: Architecture,
    options: Vec<String>,
}

impl Program {
    /// A program with this name, which errors mention. NVRTC gets the options in the environment
    /// variable `ANTIPHON_NVRTC_OPTIONS` as well, separated by spaces: `-lineinfo` for a profiler, say.
    pub fn new(name: &str, source: &str, architecture: Architecture) -> Self {
        let more = env::var(OPTIONS).unwrap_or_default();
        let options = [
            &*format!("--gpu-architecture={architecture}"),
            "-std=c++17",
            "-default-device",
            // A product and a sum are rounded one by one, as on the host: the same bits. Where a kernel wants them
            // fused, it says so with __fmaf_rn.
            "-fmad=false",
        ];
        let options = options.into_iter().chain(more.split_whitespace()).map(str::to_owned).collect();
        let program = Self { name: name.to_owned(), source: String::new(), architecture, options };
        program.include("prelude.cuh", PRELUDE).include(name, source)
    }

    /// Appends a text, whose lines errors number from 1.
    #[must_use]
    pub fn include(mut self, name: &str, text: &str) -> Self {
        if !self.source.is_empty() && !self.source.ends_with('\n') {
            self.source.push('\n');
        }
        self.source.push_str(&format!("#line 1 \"{name}\"\n{text}"));
        self
    }

    /// Defines a macro, in all texts.
    #[must_use]
    pub fn define(self, name: &str, value: impl fmt::Display) -> Self {
        self.option(&format!("-D{name}={value}"))
    }

    /// Adds an option of NVRTC's.
    #[must_use]
    pub fn option(mut self, option: &str) -> Self {
        self.options.push(option.to_owned());
        self
    }

    /// Compiles to code that is to be [linked](super::KernelCache::link), with functions that a device library has.
    #[must_use]
    pub fn relocatable(self) -> Self {
        self.option("-rdc=true")
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The whole text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// NVRTC's options.
    pub fn options(&self) -> &[String] {
        &self.options
    }

    /// The architecture that it is compiled for.
    pub fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// The key of this program's machine code: a SHA-256 over all its inputs.
    pub(super) fn key(&self, nvrtc: CudaVersion) -> [u8; 32] {
        use sha2::{Digest, Sha256};
        let mut hash = Sha256::new();
        let mut add = |text: &str| {
            hash.update((text.len() as u64).to_le_bytes());
            hash.update(text);
        };
        add(&nvrtc.to_string());
        add(&self.architecture.to_string());
        add(&self.name);
        add(&self.source);
        self.options.iter().for_each(|option| add(option));
        hash.finalize().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_named_as_nvrtc_names_it() {
        assert_eq!(Architecture::of_capability(8, 0), Architecture::SM_80);
        assert_eq!(Architecture::of_capability(9, 0), Architecture::SM_90A);
        let names = [(8, 9), (9, 0), (10, 0), (12, 0)]
            .map(|(major, minor)| Architecture::of_capability(major, minor).to_string());
        assert_eq!(names, ["sm_89", "sm_90a", "sm_100a", "sm_120a"]);
    }

    #[test]
    fn whatever_changes_the_code_changes_the_key() {
        let version = CudaVersion::new(13, 0);
        let program = Program::new("a.cu", "x", Architecture::SM_90A);
        let key = program.key(version);
        assert_eq!(key, program.clone().key(version));
        let others = [
            Program::new("a.cu", "y", Architecture::SM_90A).key(version),
            Program::new("b.cu", "x", Architecture::SM_90A).key(version),
            Program::new("a.cu", "x", Architecture::SM_80).key(version),
            program.clone().define("WORLD", 4).key(version),
            program.clone().define("WORLD", 8).key(version),
            program.key(CudaVersion::new(13, 1)),
        ];
        assert!(others.iter().all(|other| *other != key));
        assert_ne!(others[3], others[4]);
    }
}
