//! Families of kernels: their programs, and the loaded ones.

use std::{any::Any, fmt, sync::Arc};

use antiphon_device::cuda::{
    Architecture, Context, CudaError, Function, KernelArgument, KernelCache, LaunchConfig, Module, NvJitLink,
    Nvrtc, Nvshmem, PUT_SIGNAL, Program, relaxed,
};

use super::{
    MAX_WORLD,
    launch::Arguments,
    most_blocks,
    room::Share,
    staging::{MAX_BLOCKS, SLOTS_AT},
};
use crate::FabricError;

/// The threads of a block, unless a [`Family`] says otherwise.
pub const THREADS: u32 = 128;
/// The registers of a multiprocessor.
const REGISTERS: u32 = 65536;
/// The partitions of a multiprocessor. Each has a quarter of the registers, and a quarter of a block's warps, rounded up.
const PARTITIONS: u32 = 4;

/// A text of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The name of its file, which the compiler's messages mention.
    pub name: &'static str,
    /// The content of the file.
    pub text: &'static str,
}

impl Source {
    /// A file of this name with this content.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { name, text }
    }
}

/// The slots: what every program of a family begins with, behind the prelude.
pub const SLOTS: Source = Source { name: "slots.cuh", text: include_str!("slots.cuh") };

/// Quantising: numbers of few bits and their scales, for a family that has them among its [`SOURCES`](Family::SOURCES).
pub const FORMATS: Source = Source { name: "formats.cuh", text: antiphon_device::cuda::FORMATS };
/// Moving bytes of any meaning; behind [`SLOTS`].
pub const ROWS: Source = Source { name: "rows.cuh", text: include_str!("rows.cuh") };

/// Kernels that are compiled together: one program, specialised by the fields of the value.
///
/// A value names one variant of the program (a dtype, an operator); equal values are compiled and loaded once for each
/// [`Tenant`](super::Tenant). The program is the prelude, [`SLOTS`], [`SOURCES`](Self::SOURCES) and then the value's own
/// [`source`](Self::source). See [`gpu`](super) for an example.
pub trait Family: Clone + Eq + fmt::Debug + Send + 'static {
    /// The kernels of the program; `gpu::kernels!` makes the enum.
    type Kernel: Kernel;
    /// What the kernels take behind the `arguments` of all families: a type of `gpu::kernel_call!`, or [`NoArguments`] if there is nothing.
    type Arguments: KernelArgument;
    /// The name of the program, which the compiler's messages mention.
    const NAME: &'static str;
    /// The texts of the program, in their order, behind [`SLOTS`].
    const SOURCES: &'static [Source];

    /// Whether kernels put into memory of other nodes, with the functions of [`PUT_SIGNAL`]. Then they are linked with NVSHMEM's device
    /// library, and the tenant has [`Rails`](super::Rails).
    const PUTS: bool = false;

    /// The text behind [`SOURCES`](Self::SOURCES), of a family whose values each have their own: a kernel that is made at run time. Its
    /// name is [`NAME`](Self::NAME).
    fn source(&self) -> &str {
        ""
    }

    /// Adds the macros that tell this variant from the others. `WORLD`, `THREADS`, `RESIDENT` and the layout of the slots
    /// are defined in any case. A family with one variant has nothing to add.
    fn define(&self, program: Program, _world_size: usize) -> Program {
        program
    }

    /// The most threads of a block.
    fn threads(&self) -> u32 {
        THREADS
    }

    /// How many blocks of a grid each multiprocessor runs at most. Blocks wait for those of other GPUs, so each must run at
    /// once; a kernel is compiled so that twice as many fit, and another grid (another tenant's, or another communicator's) has
    /// room beside it.
    fn most_blocks(&self, world_size: usize) -> u32 {
        most_blocks(world_size)
    }

    /// How many blocks of a grid each multiprocessor must be able to run; a GPU that cannot is refused when the kernels are
    /// loaded.
    fn least_blocks(&self, _world_size: usize) -> u32 {
        1
    }

    /// The most bytes of dynamic shared memory of a block, where each multiprocessor runs [`most_blocks`](Self::most_blocks).
    fn shared_bytes(&self, _world_size: usize) -> u32 {
        0
    }

    /// A launch of `blocks` blocks of [`threads`](Self::threads), with [`shared_bytes`](Self::shared_bytes).
    fn blocks(&self, blocks: u32, world_size: usize) -> LaunchConfig {
        LaunchConfig::new(blocks, self.threads()).shared_bytes(self.shared_bytes(world_size))
    }
}

/// The kernels of a [`Family`], which `gpu::kernels!` implements.
pub trait Kernel: Copy + Eq + fmt::Debug + Send + Sync + 'static {
    /// All of them.
    const ALL: &'static [Self];

    /// The name in the source.
    fn name(self) -> &'static str;
}

/// Makes the enum of a family's kernels: each variant with the name of its function in the source.
///
/// ```
/// use antiphon_fabric::gpu::{Kernel, kernels};
///
/// kernels! {
///     /// The kernels of rotate.cuh.
///     pub enum Rotation {
///         /// To the next rank.
///         Rotate = "rotate",
///     }
/// }
/// assert_eq!(Rotation::ALL, [Rotation::Rotate]);
/// assert_eq!(Rotation::Rotate.name(), "rotate");
/// ```
#[macro_export]
#[doc(hidden)]
macro_rules! gpu_kernels {
    ($(#[$meta:meta])* $visibility:vis enum $Kernel:ident {
        $($(#[$of_variant:meta])* $Variant:ident = $name:literal),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $visibility enum $Kernel {
            $($(#[$of_variant])* $Variant,)*
        }

        impl $crate::gpu::Kernel for $Kernel {
            const ALL: &'static [Self] = &[$(Self::$Variant),*];

            fn name(self) -> &'static str {
                match self {
                    $(Self::$Variant => $name,)*
                }
            }
        }
    };
}

/// For kernels that take nothing but the `arguments` of slots.cuh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct NoArguments;

// SAFETY: it has no bytes, and is not passed.
unsafe impl KernelArgument for NoArguments {}

/// The threads that a kernel is compiled for: those of a block whose warps are as many on each partition. With fewer the compiler
/// would count registers that a partition does not have, and another grid's blocks would find no room beside the kernel's.
fn bound<F: Family>(family: &F) -> u32 {
    family.threads().next_multiple_of(PARTITIONS * 32)
}

/// The most registers of a thread of a family's kernels, of which twice the blocks of a grid fit a multiprocessor.
pub fn most_registers<F: Family>(family: &F, world_size: usize) -> u32 {
    REGISTERS / (2 * family.most_blocks(world_size) * bound(family)) / 8 * 8
}

/// The most shared memory of a block of a family's kernels, static and dynamic, in bytes, of which twice the blocks of a grid fit a
/// multiprocessor. The system reserves a KiB for each.
pub fn most_shared_bytes<F: Family>(family: &F, architecture: Architecture, world_size: usize) -> u32 {
    const RESERVED: u32 = 1 << 10;
    let all = if architecture < Architecture::SM_90A { 164 << 10 } else { 228 << 10 };
    all / (2 * family.most_blocks(world_size)) - RESERVED
}

/// The program of a family for a world of this size.
pub fn program<F: Family>(family: &F, architecture: Architecture, world_size: usize) -> Program {
    let arguments = Arguments::<1>::SOURCE; // the same text for any number of peers
    let program = Program::new(F::NAME, "", architecture);
    let program = match F::PUTS {
        true => program.include("put_signal.cuh", PUT_SIGNAL).relocatable(),
        false => program,
    };
    let program = program
        .define("PEER_PLACES", world_size.saturating_sub(1).max(1))
        .include(arguments.name, arguments.text)
        .include(SLOTS.name, SLOTS.text);
    let program =
        F::SOURCES.iter().fold(program, |program, source| program.include(source.name, source.text));
    let program = match family.source() {
        "" => program,
        own => program.include(F::NAME, own),
    };
    // A rank that is alone compares numbers with that of its peers, 0, of which the compiler warns.
    let program = if world_size == 1 { program.option("-diag-suppress=186") } else { program };
    family
        .define(program, world_size)
        .define("WORLD", world_size)
        .define("THREADS", family.threads())
        .define("BOUND", bound(family))
        .define("RESIDENT", 2 * family.most_blocks(world_size))
        .define("MAX_WORLD", MAX_WORLD)
        .define("MAX_BLOCKS", MAX_BLOCKS)
        .define("SLOTS_AT", SLOTS_AT)
}

/// A kernel that is loaded on a device.
pub(super) struct Resident<K> {
    kernel: K,
    pub(super) function: Function,
    /// Blocks of a grid for each multiprocessor, which run at once: beside those of another grid, unless they take the
    /// [whole](Share::Whole) of it.
    pub(super) blocks: u32,
    share: Share,
}

/// A family's kernels, loaded on a device.
#[derive(Clone)]
pub struct Loaded<F: Family>(Arc<[Resident<F::Kernel>]>);

impl<F: Family> fmt::Debug for Loaded<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.iter().map(|resident| resident.kernel)).finish()
    }
}

impl<F: Family> Loaded<F> {
    #[inline]
    pub(super) fn get(&self, kernel: F::Kernel) -> &Resident<F::Kernel> {
        let found = self.0.iter().find(|resident| resident.kernel == kernel);
        found.expect("a program is loaded with all of its kernels")
    }

    /// The largest share of a multiprocessor that a grid of the family takes.
    #[inline]
    pub(super) fn share(&self) -> Share {
        match self.0.iter().any(|resident| resident.share == Share::Whole) {
            true => Share::Whole,
            false => Share::Half,
        }
    }
}

/// The blocks of a grid that each multiprocessor runs, and the share of the multiprocessor that they take. `fitting` blocks fit at
/// once; the result is `None` if these are fewer than `least`, which a grid needs.
fn room_for(least: u32, most: u32, fitting: u32) -> Option<(u32, Share)> {
    match fitting {
        _ if fitting / 2 >= least => Some((most.min(fitting / 2), Share::Half)),
        _ if fitting >= least => Some((most.min(fitting), Share::Whole)),
        _ => None,
    }
}

/// Values by their keys, of whatever types both are.
#[derive(Default)]
struct ByKey(Vec<Box<dyn Any + Send>>);

impl ByKey {
    #[inline]
    fn get<K: Eq + Send + 'static, V: Send + 'static>(&self, key: &K) -> Option<&V> {
        let entries = self.0.iter().filter_map(|entry| entry.downcast_ref::<(K, V)>());
        entries.into_iter().find_map(|(known, value)| (known == key).then_some(value))
    }

    fn insert<K: Eq + Send + 'static, V: Send + 'static>(&mut self, key: K, value: V) {
        self.0.push(Box::new((key, value)));
    }
}

/// The programs of a tenant that are loaded.
pub(super) struct Programs {
    context: Context,
    world_size: usize,
    loaded: ByKey,
}

impl Programs {
    pub(super) fn new(context: &Context, world_size: usize) -> Self {
        Self { context: context.clone(), world_size, loaded: ByKey::default() }
    }

    /// The kernels of a family, compiled and loaded if they are not yet.
    #[inline]
    pub(super) fn load<F: Family>(&mut self, family: F) -> Result<Loaded<F>, FabricError> {
        match self.loaded.get::<F, Loaded<F>>(&family) {
            Some(loaded) => Ok(loaded.clone()),
            None => self.compile(family),
        }
    }

    #[cold]
    fn compile<F: Family>(&mut self, family: F) -> Result<Loaded<F>, FabricError> {
        let world_size = self.world_size;
        let (least, most) = (family.least_blocks(world_size), family.most_blocks(world_size));
        let (threads, shared) = (family.threads(), family.shared_bytes(world_size));
        let load = || -> Result<_, CudaError> {
            let architecture = self.context.device().architecture()?;
            let program = program(&family, architecture, world_size);
            let (cache, nvrtc) = (KernelCache::open(), Nvrtc::load()?);
            let nvshmem = F::PUTS.then(Nvshmem::load).transpose()?;
            let cubin = match nvshmem {
                Some(nvshmem) => {
                    cache.link((nvrtc, NvJitLink::load()?), &program, nvshmem.device_library()?)?
                }
                None => cache.compile(nvrtc, &program)?,
            };
            // So that a graph may have the first call of its kind.
            let module = relaxed(|| Module::load(&self.context, &cubin.bytes))??;
            if let Some(nvshmem) = nvshmem {
                relaxed(|| nvshmem.initialize_module(&module))??;
            }
            let resident = |&kernel: &F::Kernel| {
                let function = module.function(kernel.name())?;
                // A kernel that waits on every multiprocessor must leave each other kernel its place: peers may call them in
                // another order, on several streams.
                function.prefer_shared()?;
                if shared > 0 {
                    function.allow_dynamic_shared(shared)?;
                }
                let fitting = function.blocks_per_multiprocessor(threads, shared)?;
                Ok((kernel, function, fitting))
            };
            F::Kernel::ALL.iter().map(resident).collect::<Result<Vec<_>, CudaError>>()
        };
        let residents = load()?.into_iter().map(|(kernel, function, fitting)| {
            let Some((blocks, share)) = room_for(least, most, fitting) else {
                let kernel = kernel.name();
                return Err(FabricError::invalid(format!(
                    "a multiprocessor of the GPU runs {fitting} blocks of {threads} threads, with {shared} bytes of dynamic shared \
                     memory, of the kernel {kernel} at once, and {least} are needed"
                )));
            };
            Ok(Resident { kernel, function, blocks, share })
        });
        let loaded = Loaded::<F>(residents.collect::<Result<_, _>>()?);
        self.loaded.insert(family, loaded.clone());
        Ok(loaded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grid_takes_half_of_a_multiprocessor_or_the_whole_of_it() {
        assert_eq!(room_for(1, 4, 9), Some((4, Share::Half)));
        assert_eq!(room_for(1, 4, 5), Some((2, Share::Half)));
        assert_eq!(room_for(1, 1, 1), Some((1, Share::Whole)));
        assert_eq!(room_for(2, 4, 3), Some((3, Share::Whole)));
        assert_eq!(room_for(2, 4, 1), None);
    }

    #[test]
    fn keys_of_different_types_are_different_keys() {
        #[derive(Clone, Copy, PartialEq, Eq)]
        struct A(u32);
        #[derive(Clone, Copy, PartialEq, Eq)]
        struct B(u32);
        let mut map = ByKey::default();
        map.insert(A(1), "a1");
        map.insert(B(1), "b1");
        map.insert(A(2), "a2");
        assert_eq!(map.get::<A, &str>(&A(1)), Some(&"a1"));
        assert_eq!(map.get::<B, &str>(&B(1)), Some(&"b1"));
        assert_eq!(map.get::<A, &str>(&A(2)), Some(&"a2"));
        assert_eq!(map.get::<B, &str>(&B(2)), None);
    }
}
