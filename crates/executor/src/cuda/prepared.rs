//! What a plan has for each size that it is prepared for.

use antiphon_device::cuda::DeviceMemory;
use antiphon_fabric::{Communicator, FabricError, Operation, Signature, gpu::MAX_WORLD};
use antiphon_operation::Count;
use antiphon_plan::Extent;
use antiphon_tensor::DType;

use super::{
    bases::Bases,
    compiled::{Form, Shapes},
    family::{PlanCall, PlanFamily},
    listing::Listing,
    memory::{Arenas, Places},
    plan::{CudaPlan, name_of},
    table::{Item, Table},
    tenants::lock,
};
use crate::{
    ExecutorError,
    error::Result,
    layout::{Base, Mode, Move, Program, Slicing, Target, compile},
};

/// The bits of a signature's algorithm.
const IN_PLACE: u8 = 1;
const REGISTERED: u8 = 2;
const LAST_PART: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) dtype: DType,
    pub(super) chunk: usize,
    pub(super) in_place: bool,
}

/// A size for which the plan is ready.
pub(super) struct Prepared {
    pub(super) key: Key,
    pub(super) signature: Signature,
    pub(super) slicing: Slicing,
    /// The launches of a whole slice, and the last one if its slice is shorter.
    pub(super) parts: Vec<Part>,
    /// Where all ranks stage inputs and outputs, and where staging begins.
    pub(super) staging: [[u64; MAX_WORLD]; 3],
    /// Copies before the first launch and behind the last one.
    pub(super) loads: Vec<Copy>,
    pub(super) stores: Vec<Copy>,
}

/// What launches of one size of slices have in common.
pub(super) struct Part {
    pub(super) family: PlanFamily,
    pub(super) program: Program,
    pub(super) origins: Vec<Option<(u32, u32)>>,
    pub(super) call: PlanCall,
    _table: DeviceMemory,
    _arenas: Arenas,
}

/// Bytes to copy between tensors and staging.
#[derive(Debug, Clone, Copy)]
pub(super) struct Copy {
    pub(super) from: Item,
    pub(super) to: Item,
    pub(super) bytes: usize,
}

impl Prepared {
    /// The part of a launch.
    pub(super) fn part(&self, launch: usize) -> &Part {
        let is_whole = self.slicing.len(launch) == self.slicing.slice;
        &self.parts[if is_whole { 0 } else { self.parts.len() - 1 }]
    }

    /// What ranks agree on in a launch, if registered tensors are in the places of a digest.
    pub(super) fn signature(&self, launch: usize, places: Option<u32>) -> Signature {
        let algorithm = [
            (self.key.in_place, IN_PLACE),
            (places.is_some(), REGISTERED),
            (self.slicing.cuts() && launch + 1 == self.slicing.launches(), LAST_PART),
        ];
        Signature {
            algorithm: algorithm.into_iter().filter(|(holds, _)| *holds).map(|(_, bit)| bit).sum(),
            count: Count::placed(self.signature.count, places),
            ..self.signature
        }
    }

    /// The part of which a signature tells, if it is of this size.
    pub(super) fn part_of(&self, told: &Signature) -> Option<&Part> {
        let (count, _) = Count::of_placed(told.count);
        let algorithm = told.algorithm & IN_PLACE;
        let is_this = Signature { algorithm, count, ..*told } == self.signature;
        let part = if told.algorithm & LAST_PART == 0 { self.parts.first() } else { self.parts.last() };
        part.filter(|_| is_this)
    }
}

impl CudaPlan {
    pub(super) fn mode(&self, in_place: bool) -> &Mode {
        self.checked.modes[usize::from(in_place)].as_ref().expect("it was asked for")
    }

    /// The steps for a size, and the kernel that executes them.
    fn listed(&self, key: &Key, extent: Extent, sliced: bool) -> Result<ListedPlan> {
        let target = Target {
            plan: &self.plan,
            wiring: &self.wiring,
            placements: &self.mode(key.in_place).placements,
            rank: self.rank,
            packets: self.options.packets,
            ports: self.options.ports,
            element: key.dtype.size(),
            extent,
            sliced,
        };
        ListedPlan::new(target, key.dtype, self.per_multiprocessor, self.options.form)
    }

    /// Makes the plan ready for a size. All ranks call it together.
    pub(super) fn prepare_size(&mut self, comm: &Communicator, key: Key, extent: &Extent) -> Result<()> {
        const PROBLEM: &str = "cannot prepare its plan";
        let slicing = comm.agree(PROBLEM, self.slicing(key.dtype, extent))?;
        let areas = comm.agree(PROBLEM, self.areas(slicing, key.in_place))?;
        let mut lens: Vec<_> = [0, slicing.launches() - 1].map(|launch| slicing.len(launch)).into();
        lens.dedup();
        let [input, _] = self.chunks();
        let mut prepared = Prepared {
            key,
            signature: Signature {
                dtype: Some(key.dtype),
                algorithm: if key.in_place { IN_PLACE } else { 0 },
                detail: self.digest,
                count: input * key.chunk as u64 / key.dtype.size() as u64,
                ..Signature::new(Operation::ExecutePlan)
            },
            slicing,
            parts: Vec::new(),
            staging: [[0; MAX_WORLD]; 3],
            loads: Vec::new(),
            stores: Vec::new(),
        };
        for slice in lens {
            let listed = self.listed(&key, extent.part(slice as u64), slicing.cuts());
            let listed = comm.agree(PROBLEM, listed)?;
            lock(&self.tenant).load_together(comm, listed.family.clone())?;
            let arenas = self.memory.workspace.reserve(comm, &self.context, &areas)?;
            let of_half = |half| Places {
                rank: self.rank,
                counters: &self.memory.counters,
                writers: &self.writers,
                arenas: &arenas,
                areas,
                half,
                slicing,
                slice,
            };
            let places: Vec<_> = (0..areas.halves).map(of_half).collect();
            let copies = |moves: &[Move]| moves.iter().map(|each| copy(each, &places[0])).collect();
            let mode = self.mode(key.in_place);
            (prepared.loads, prepared.stores) = (copies(&mode.loads), copies(&mode.stores));
            prepared.staging = places[0].staging();
            let (call, table) = comm.agree(PROBLEM, self.load_table(&listed, &places))?;
            let ListedPlan { family, program, listing, .. } = listed;
            let origins = listing.origins;
            prepared.parts.push(Part { family, program, origins, call, _table: table, _arenas: arenas });
        }
        self.memory.prepared.push(prepared);
        Ok(())
    }

    /// Puts the table of some steps into device memory: what a launch passes of it, and its memory.
    fn load_table(&self, listed: &ListedPlan, places: &[Places<'_>]) -> Result<(PlanCall, DeviceMemory)> {
        let copied = listed.shapes.copied().filter(|_| listed.family.is_compiled());
        let table = Table::new(&listed.listing, &listed.shapes.of_blocks, copied, places);
        let memory = DeviceMemory::allocate(&self.context, table.bytes.len()).map_err(FabricError::from)?;
        let stream = self.context.stream().map_err(FabricError::from)?;
        memory.write(&stream, 0, &table.bytes).map_err(FabricError::from)?;
        let at = memory.pointer().0;
        let halves = places.len() as u64;
        let places = &places[0];
        let [packets, packet_bytes] = places.packets();
        let call = PlanCall {
            blocks: at,
            steps: at + table.steps_at as u64,
            items: at + table.items_at as u64,
            flags: places.flags(),
            cleared: places.cleared(),
            packets,
            packet_bytes,
            halves,
            size: if self.meets { 0 } else { lock(&self.tenant).next_size() },
            places: 0,
            requests: self.memory.engines.as_ref().map_or(0, |engines| engines.fifo().0),
            requested: self.memory.counters.requests(self.rank).0,
            bases: Bases::none().0,
        };
        Ok((call, memory))
    }
}

/// A rank's part of a plan for chunks of a size, and the kernel that executes it.
pub(super) struct ListedPlan {
    pub(super) program: Program,
    pub(super) listing: Listing,
    pub(super) shapes: Shapes,
    pub(super) family: PlanFamily,
}

impl ListedPlan {
    pub(super) fn new(target: Target<'_>, dtype: DType, per_multiprocessor: u32, form: Form) -> Result<Self> {
        let program = compile(target)?;
        let listing = Listing::new(&program, target.sliced).ok_or_else(|| ExecutorError::Buffers {
            plan: name_of(target.plan),
            what: format!("too many steps for chunks of {} bytes", program.layout.chunk),
        })?;
        let shapes = Shapes::new(&listing);
        let family = PlanFamily::new(dtype, target.packets, per_multiprocessor, shapes.source(form));
        Ok(Self { program, listing, shapes, family })
    }
}

/// A move of chunks as a copy of bytes.
fn copy(each: &Move, places: &Places<'_>) -> Copy {
    let end = |(region, chunk): (Base, u64)| {
        let (base, at, stride) = places.region(places.rank, region);
        Item { at: at + chunk * stride as u64, base, rank: places.rank }
    };
    Copy { from: end(each.from), to: end(each.to), bytes: each.chunks as usize * places.slicing.chunk }
}
