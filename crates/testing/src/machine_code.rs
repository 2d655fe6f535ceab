//! What the kernels of families are compiled to, on any machine that has NVRTC.

use std::thread;

use antiphon_device::cuda::{Architecture, Nvrtc, Program};
use antiphon_fabric::gpu::{Family, Kernel as _, most_registers, most_shared_bytes, program};
use antiphon_sass::{Disassembler, Kernel, Rules};

use crate::{disassembler, nvrtc};

/// The architectures for which every kernel is compiled.
pub const ARCHITECTURES: [Architecture; 3] =
    [Architecture::SM_80, Architecture::SM_90A, Architecture::SM_100A];

/// The vectors of slots come and go whole, and past every cache: what kernels that receive and send vectors need.
pub const SLOTS: &[&str] = &["LDG.128.STRONG.SYS", "STG.128.STRONG.SYS"];

/// A family for a world of some size and an architecture, and the rules for its kernels.
pub struct Variant {
    name: String,
    kernels: Vec<&'static str>,
    program: Program,
    /// The rules. They begin with the registers of which twice the blocks of a grid fit a multiprocessor, and forbid fused
    /// arithmetic, as sums are rounded one by one.
    pub rules: Rules<'static>,
    /// Whether a block takes so much shared memory that a grid has a multiprocessor for itself. It begins with whether the dynamic memory
    /// alone is that much.
    pub takes_all: bool,
    /// Whether the compiler must know of every access whether it is global.
    pub knows_spaces: bool,
    /// Bytes of dynamic shared memory of a block; the most with the static ones of which two blocks fit, and of which one does.
    shared_bytes: [u32; 3],
}

impl Variant {
    /// A family whose kernels need these instructions.
    pub fn of<F: Family>(
        family: &F,
        world_size: usize,
        architecture: Architecture,
        needed: &'static [&'static str],
    ) -> Self {
        let half = most_shared_bytes(family, architecture, world_size);
        let dynamic = family.shared_bytes(world_size);
        Self {
            name: format!("{family:?} for {world_size} ranks on {architecture}"),
            kernels: F::Kernel::ALL.iter().map(|kernel| kernel.name()).collect(),
            program: program(family, architecture, world_size),
            rules: Rules {
                registers: most_registers(family, world_size),
                needed,
                forbidden: &["FFMA", "DFMA"],
                ..Rules::default()
            },
            takes_all: dynamic > half,
            knows_spaces: false,
            shared_bytes: [dynamic, half, 2 * half + (1 << 10)],
        }
    }

    /// The program for NVRTC.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// What is wrong with a kernel.
    fn broken(&self, kernel: &Kernel) -> Vec<String> {
        let mut broken = kernel.broken(&self.rules);
        let [dynamic, half, whole] = self.shared_bytes;
        let shared = kernel.shared_bytes + dynamic;
        if (shared > half) != self.takes_all || shared > whole {
            broken.push(format!("{}: {shared} bytes of shared memory, of {half}", kernel.name));
        }
        let is_generic = |words: &&String| words.starts_with("LD.") || words.starts_with("ST.");
        if self.knows_spaces && kernel.instructions.keys().any(|words| is_generic(&words)) {
            let name = &kernel.name;
            broken.push(format!("{name}: accesses of which the compiler does not know that they are global"));
        }
        broken
    }
}

/// Compiles the variants for every architecture, if there is NVRTC, and looks at their machine code, if there is a disassembler.
///
/// # Panics
/// If a program does not compile or compiles with a warning, or a kernel breaks its rules: with all that is wrong.
pub fn assert_as_meant(variants: impl Fn(Architecture) -> Vec<Variant> + Sync) {
    let Some(nvrtc) = nvrtc() else { return };
    let (variants, disassembler) = (&variants, &disassembler());
    let wrong: Vec<String> = thread::scope(|scope| {
        let checks = ARCHITECTURES.map(|architecture| {
            scope.spawn(move || wrong(&variants(architecture), nvrtc, disassembler.as_ref()))
        });
        checks.into_iter().flat_map(|check| check.join().unwrap()).collect()
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn wrong(variants: &[Variant], nvrtc: &Nvrtc, disassembler: Option<&Disassembler>) -> Vec<String> {
    let (mut cubins, mut wrong) = (Vec::new(), Vec::new());
    for Variant { name, program, .. } in variants {
        let compiled = nvrtc.compile(program).unwrap_or_else(|error| panic!("{name}: {error}"));
        if !compiled.log.is_empty() {
            wrong.push(format!("{name}: {}", compiled.log));
        }
        cubins.push(compiled.cubin);
    }
    let codes = disassembler.map_or_else(Vec::new, |disassembler| disassembler.read(&cubins).unwrap());
    for (variant, code) in variants.iter().zip(&codes) {
        let broken = variant.kernels.iter().flat_map(|name| variant.broken(code.kernel(name).unwrap()));
        wrong.extend(broken.map(|what| format!("{}: {what}", variant.name)));
    }
    wrong
}
