#![forbid(unsafe_code)]
//! # antiphon-sass: the machine code of kernels
//!
//! This crate is for tests on machines without a GPU. A kernel that spills registers, loads a vector byte by byte, or fuses
//! operations that must round separately, still gives results, but is slower or has other bits. Its machine
//! code (SASS) shows the defect. A [`Disassembler`] reads cubins as NVRTC makes them; a [`Kernel`] counts its instructions and
//! says which of a test's [`Rules`] it breaks.
//!
//! ```no_run
//! use antiphon_sass::{Disassembler, Rules, SassError};
//!
//! # fn compile(variant: &str) -> Vec<u8> { vec![] }
//! # let variants = ["a", "b"];
//! let disassembler = match Disassembler::find() {
//!     Ok(disassembler) => disassembler,
//!     Err(error) => return Ok(eprintln!("skipped: {error}")),
//! };
//! // All at once: nvdisasm needs half a second to start, and is started once for each architecture.
//! let cubins: Vec<Vec<u8>> = variants.iter().map(|variant| compile(variant)).collect();
//! for (variant, code) in variants.iter().zip(disassembler.read(&cubins)?) {
//!     let kernel = code.kernel("one_shot")?;
//!     // Vectors go to peers whole and past every cache; nothing spills; products and sums are rounded one by one.
//!     let rules = Rules {
//!         registers: 64,
//!         needed: &["LDG.128.STRONG.SYS", "STG.128.STRONG.SYS"],
//!         forbidden: &["FFMA"],
//!         ..Rules::default()
//!     };
//!     assert_eq!(kernel.broken(&rules), [""; 0], "{variant}");
//!     assert!(kernel.count("MEMBAR") <= 2);
//! }
//! # Ok::<(), SassError>(())
//! ```
//!
//! ## Mnemonics
//!
//! An opcode with its modifiers, `LDG.E.128.STRONG.SYS`, is counted by any of its parts in their order: `LDG`,
//! `LDG.128`, `LDG.STRONG.SYS`. The mnemonics that tests of this project use:
//!
//! | words | meaning |
//! | --- | --- |
//! | `LDG`, `STG` | global memory; `LD` and `ST` are generic accesses, to memory of a kind that the compiler does not know |
//! | `LDL`, `STL` | local memory: registers that were spilled, or an array that is indexed at run time |
//! | `.128` | 16 bytes of every thread at once |
//! | `.STRONG.SYS` | volatile, relaxed or acquire at the scope of the system: it may be a peer's memory |
//! | `MEMBAR` | a fence, for example of a release |
//! | `FFMA`, `DFMA` | a product and a sum, rounded once. Division by a number that is not a power of two contains some too |
//! | `HFMA2` | the same on halves; also how the compiler makes constants, so forbid it only by looking |
//! | `RED`, `ATOM` | atomics without and with a result; a `G` at the end of either from Hopper on |

mod cubin;
mod disassembler;
mod kernel;

pub use disassembler::{Disassembler, SassError};
pub use kernel::{Kernel, MachineCode, Rules};
