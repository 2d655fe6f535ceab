//! All-reduce on GPUs' registered memory; `registered.cuh` has the algorithms.

use antiphon_device::cuda::{Program, StreamRef};
use antiphon_fabric::{
    Operation, RegisteredTensor, Registry, Signature,
    gpu::{
        Family, Grid, Launch, MAX_WORLD, Pieces, REDUCE, Reduction, Source, Tenant, Work, kernel_call,
        kernels,
    },
};

use super::Algorithm;
use crate::{
    arguments::CheckedCall,
    error::{CollectiveError, Result},
};

kernels! {
    /// The kernels of `registered.cuh`.
    pub(crate) enum Kernel {
        OneShot = "one_shot_registered",
        OneShotPlain = "one_shot_registered_plain",
        TwoShot = "two_shot_registered",
        TwoShotPlain = "two_shot_registered_plain",
    }
}

/// The kernels that reduce elements of a type in registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Registered(pub(crate) Reduction);

impl Family for Registered {
    type Kernel = Kernel;
    type Arguments = Places;
    const NAME: &'static str = "registered.cuh";
    const SOURCES: &'static [Source] =
        &[REDUCE, Places::SOURCE, Source::new("all_reduce/registered.cuh", include_str!("registered.cuh"))];

    fn define(&self, program: Program, _world_size: usize) -> Program {
        self.0.define(program)
    }
}

kernel_call! {
    /// The addresses of the tensors, in rank order.
    pub(crate) struct Places = "places" {
        input: [*const u8; MAX_WORLD],
        /// For one-shot only this rank's.
        output: [*mut u8; MAX_WORLD],
    }
}

/// Carries out an all-reduce of registered tensors.
///
/// # Safety
/// As [`run_staged`](super::cuda::run_staged). After an error slower peers may still use what is registered.
pub(crate) unsafe fn run_registered(
    tenant: &Tenant,
    registry: &Registry,
    call: &CheckedCall<'_>,
    algorithm: Algorithm,
    stream: StreamRef<'_>,
) -> Result<()> {
    let mut signature = Signature { algorithm: algorithm.number(true), ..call.signature };
    let (size, bytes, one_shot) = (call.dtype.size(), call.block_bytes(), algorithm == Algorithm::OneShot);
    if bytes == 0 {
        return Ok(tenant.check_ready()?); // nothing lies anywhere
    }
    let (from, to) = call.addresses();
    let apart = from + bytes <= to || to + bytes <= from;
    if !apart && (one_shot || from != to) {
        let form = if one_shot {
            "apart from the input, from which peers load"
        } else {
            "the input or apart from it"
        };
        return Err(refused("output", format!("{form}: {bytes} bytes are at {from:#x} and {to:#x}")));
    }
    let find = |which, address: usize| {
        let found = registry.find(tenant.rank(), address as u64, bytes as u64);
        found.ok_or_else(|| {
            refused(which, format!("in registered memory: no memory has the {bytes} bytes at {address:#x}"))
        })
    };
    let source = find("input", from)?;
    let target = if one_shot { None } else { Some(find("output", to)?) };
    signature.detail = RegisteredTensor::digest([Some(source), target]);
    let loaded = tenant.ready(Registered(call.reduction()?), stream)?;
    if tenant.multiprocessors_here() < tenant.multiprocessors() {
        let expected = format!(
            "on a stream whose kernels may use {} multiprocessors, as those of the other ranks, not {}",
            tenant.multiprocessors(),
            tenant.multiprocessors_here()
        );
        return Err(refused("stream", expected));
    }
    let places = Places { input: source.at, output: target.map_or([0; MAX_WORLD], |target| target.at) };
    let parts = if one_shot { 1 } else { tenant.world_size() };
    let launch = |start: usize, len: usize, _| {
        let there = |at: u64| if at == 0 { 0 } else { at + start as u64 };
        let places = Places { input: places.input.map(there), output: places.output.map(there) };
        let (input, output) = (from + start, to + start);
        let work = Work { input, output, count: len / size, ..Work::new(signature) };
        let all = places.input.into_iter().chain(places.output).chain([to as u64 + start as u64]);
        let plain = all.fold(0, |bits, at| bits | at).is_multiple_of(16) && len.is_multiple_of(16);
        let kernel = match (algorithm, plain) {
            (Algorithm::OneShot, true) => Kernel::OneShotPlain,
            (Algorithm::OneShot, false) => Kernel::OneShot,
            (Algorithm::TwoShot, true) => Kernel::TwoShotPlain,
            (Algorithm::TwoShot, false) => Kernel::TwoShot,
        };
        let grid = Grid::Items(len.div_ceil(16 * parts));
        Launch { kernel, grid, work, arguments: places }
    };
    // SAFETY: passed on; registered memory is mapped as long as it is known.
    unsafe { tenant.run(&loaded, Pieces::bytes(bytes, MOST_BYTES), stream, launch) }?;
    Ok(())
}

/// Bytes of a launch. In longer ones blocks drift apart, until they miss each other's pages: 256 MiB took 1.7 times as long.
const MOST_BYTES: usize = 64 << 20;

fn refused(which: &'static str, expected: String) -> CollectiveError {
    CollectiveError::Refused { operation: Operation::AllReduce.name(), which, expected }
}
