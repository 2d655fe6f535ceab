//! Mixed collectives on GPUs beyond the conformance suite, which has worlds of up to four ranks: more ranks, blocks that are longer
//! than a lane, refusals.

use std::time::Duration;

use antiphon_collectives::{
    CollectiveError,
    mixed::{CudaMixedHandler, MixedCall, MixedHandler, MixedLayout, MixedMode, MixedOp},
};
use antiphon_device::cuda::Stream;
use antiphon_fabric::FabricError;
use antiphon_tensor::{DType, Device, Element, TensorView, TensorViewMut, bf16, f16};

use crate::harness::{At, Outcome, Rank, on_gpus, values};

const FUSED: [MixedOp; 2] = [MixedOp::AllReduceAllGather, MixedOp::ReduceScatterAllReduce];
const MODES: [Option<MixedMode>; 3] = [Some(MixedMode::Waits), Some(MixedMode::Bytes1), None];
/// Elements of blocks: vectors and parts of them, fewer than a group has ranks, and more than a lane has room for.
const COUNTS: [usize; 9] = [1, 8, 9, 249, 1000, 7168, 65_537, 300_001, 3_000_000];

/// The mixed collectives of one layout, on the host and on the GPUs.
pub struct Mixed<'a> {
    pub rank: &'a Rank,
    pub host: MixedHandler,
    pub gpus: CudaMixedHandler,
}

/// Elements of input and output of a call with blocks of `count` elements, or of as many as it says.
pub fn lengths(layout: &MixedLayout, call: &MixedCall<'_>, count: usize) -> (usize, usize) {
    let (own, all) = match call.counts {
        Some(counts) => (counts[layout.dp_rank()], counts.iter().sum()),
        None => (count, count * layout.dp_size()),
    };
    match call.op {
        MixedOp::AllReduce => (count, count),
        MixedOp::AllGather | MixedOp::AllReduceAllGather => (own, all),
        MixedOp::ReduceScatter | MixedOp::ReduceScatterAllReduce => (all, own),
    }
}

impl<'a> Mixed<'a> {
    pub fn new(rank: &'a Rank, tp: usize) -> Outcome<Self> {
        let layout = MixedLayout::builder(rank.comm.world_size(), rank.comm.rank()).local_tp(tp).build()?;
        let host = MixedHandler::new(&rank.comm, layout)?;
        Ok(Self { rank, host, gpus: CudaMixedHandler::new(&rank.comm, &rank.collectives, layout)? })
    }

    /// Elements of input and output.
    pub fn lengths(&self, call: &MixedCall<'_>, count: usize) -> (usize, usize) {
        lengths(self.host.layout(), call, count)
    }

    pub fn queue(&self, call: MixedCall<'_>, from: At, to: At) -> Result<(), CollectiveError> {
        self.queue_on(call, from, to, &self.rank.stream)
    }

    pub fn queue_on(
        &self,
        call: MixedCall<'_>,
        from: At,
        to: At,
        stream: &Stream,
    ) -> Result<(), CollectiveError> {
        let collectives = &self.rank.collectives;
        let device = Device::Cuda(collectives.context().device().ordinal());
        let at = |address: u64| address as usize as *mut u8;
        // SAFETY: the tests keep the memory until they have synchronised with the stream.
        unsafe {
            let input = TensorView::from_raw_parts(at(from.0), from.1, &[from.2], None, device).unwrap();
            let mut output = TensorViewMut::from_raw_parts(at(to.0), to.1, &[to.2], None, device).unwrap();
            self.gpus.run(collectives, call, &input, &mut output, stream.borrow())
        }
    }

    /// Does the same on GPUs and on the host, behind `offset` elements, and compares the bits.
    fn compare<T: Element>(&self, call: MixedCall<'_>, count: usize, offset: usize) -> Outcome {
        let (from, to) = self.lengths(&call, count);
        let input = values::<T>(self.rank.comm.rank(), offset + from);
        let mut expected = vec![T::from_f64(7.0); to];
        self.host.run(&self.rank.comm, call, &input[offset..], &mut expected)?;
        let size = size_of::<T>();
        let (device_in, device_out) = (self.rank.upload(&input)?, self.rank.allocate((offset + to) * size)?);
        self.gpus.prepare(&self.rank.collectives, T::DTYPE)?;
        self.rank.meet()?;
        let behind = |pointer: u64, count| At(pointer + (offset * size) as u64, T::DTYPE, count);
        self.queue(call, behind(device_in.pointer().0, from), behind(device_out.pointer().0, to))?;
        let got = self.rank.download(&device_out, offset * size, to * size)?;
        self.rank.meet()?;
        let layout = self.host.layout();
        let what =
            format!("{call:?} of {count} behind {offset}, tp {} × dp {}", layout.tp_size(), layout.dp_size());
        self.rank.same::<T>(&what, &got, &expected)
    }
}

fn every_layout<T: Element>(rank: &Rank, offset: usize) -> Outcome {
    let world_size = rank.comm.world_size();
    for tp in (1..=world_size).filter(|&tp| world_size.is_multiple_of(tp)) {
        let mixed = Mixed::new(rank, tp)?;
        for count in COUNTS {
            for &op in mixed.gpus.valid_ops() {
                for mode in MODES
                    .iter()
                    .filter(|mode| mode.is_none_or(|mode| mixed.gpus.valid_modes().contains(&mode)))
                {
                    mixed.compare::<T>(MixedCall::from(op).mode(*mode), count, offset)?;
                }
            }
        }
    }
    Ok(())
}

fn every_layout_and_type(world_size: usize) {
    on_gpus(world_size, |rank| {
        every_layout::<bf16>(rank, 0)?;
        every_layout::<f16>(rank, 3)?;
        every_layout::<f32>(rank, 0)
    });
}

#[test]
fn mixed_sums_of_long_blocks_have_the_hosts_bits_on_4_gpus() {
    on_gpus(4, |rank| {
        let mixed = Mixed::new(rank, 2)?;
        for op in FUSED {
            for mode in MODES {
                mixed.compare::<bf16>(MixedCall::from(op).mode(mode), 3_000_000, 0)?;
                mixed.compare::<bf16>(MixedCall::from(op).mode(mode).counts(&[2_000_001, 3][..]), 0, 1)?;
            }
        }
        Ok(())
    });
}

#[test]
fn mixed_sums_in_two_hops_have_the_hosts_bits_on_4_gpus() {
    on_gpus(4, |rank| {
        let mixed = Mixed::new(rank, 2)?;
        for op in FUSED {
            let call = MixedCall::from(op).mode(MixedMode::Bytes1);
            mixed.compare::<f32>(call, 1000, 0)?;
            mixed.compare::<f32>(call.counts(&[1000, 3][..]), 0, 1)?;
        }
        Ok(())
    });
}

#[test]
fn mixed_sums_have_the_hosts_bits_on_6_gpus() {
    every_layout_and_type(6);
}

#[test]
fn mixed_sums_have_the_hosts_bits_on_8_gpus() {
    every_layout_and_type(8);
}

#[test]
fn gathered_and_scattered_blocks_may_be_uneven_and_empty_on_2_gpus() {
    on_gpus(2, |rank| {
        let mixed = Mixed::new(rank, 1)?;
        for counts in [[0, 0], [0, 9], [7168, 0], [1, 300_001], [64, 72]] {
            for op in [MixedOp::AllGather, MixedOp::ReduceScatter] {
                mixed.compare::<bf16>(MixedCall::from(op).counts(&counts[..]), 0, 0)?;
                mixed.compare::<f32>(MixedCall::from(op).counts(&counts[..]), 0, 1)?;
            }
        }
        Ok(())
    });
}

#[test]
fn ranks_whose_mixed_calls_differ_hear_of_it_on_4_gpus() {
    on_gpus(4, |rank| {
        // A world of its own, which is unusable afterwards.
        let comm = rank.comm.split(Some(0), 0)?.expect("all are in it");
        let collectives =
            antiphon_collectives::cuda::CudaCollectives::new(&comm, rank.collectives.context())?;
        let layout = MixedLayout::builder(4, comm.rank()).local_tp(2).build()?;
        let made = CudaMixedHandler::new(&comm, &collectives, layout)
            .and_then(|gpus| gpus.prepare(&collectives, DType::BF16).map(|()| gpus));
        let gpus = match made {
            // A rank that is late at the end of this hears of it here: its peers have called already.
            Err(CollectiveError::Fabric(FabricError::Aborted { .. })) => return Ok(()),
            made => made?,
        };
        let counts = if comm.rank() == 3 { [80, 80] } else { [64, 96] };
        let own = counts[comm.rank() / 2];
        let (input, output) = (rank.upload(&vec![bf16::ONE; own])?, rank.allocate(2 * 160)?);
        let device = Device::Cuda(collectives.context().device().ordinal());
        let at = |pointer: u64| pointer as usize as *mut u8;
        rank.meet()?;
        let call = MixedCall::from(MixedOp::AllReduceAllGather).mode(MixedMode::Waits).counts(&counts[..]);
        // SAFETY: the memory lives until the stream is synchronised with.
        unsafe {
            let from = TensorView::from_raw_parts(at(input.pointer().0), DType::BF16, &[own], None, device)?;
            let mut to =
                TensorViewMut::from_raw_parts(at(output.pointer().0), DType::BF16, &[160], None, device)?;
            gpus.run(&collectives, call, &from, &mut to, rank.stream.borrow())?;
        }
        rank.stream.borrow().synchronize()?;
        let mut outcome = collectives.check();
        for _ in 0..100 {
            if outcome.is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(20)); // a rank whose kernel is over hears of it from the others
            outcome = collectives.check();
        }
        match outcome {
            Err(CollectiveError::Fabric(FabricError::Mismatch { .. } | FabricError::Aborted { .. })) => {
                Ok(())
            }
            other => Err(format!("{other:?}").into()),
        }
    });
}

#[test]
fn what_a_gpus_handler_refuses() {
    on_gpus(2, |rank| {
        let mixed = Mixed::new(rank, 2)?;
        let memory = rank.allocate(64)?;
        let at = At(memory.pointer().0, DType::F32, 16);
        let refused = |call: MixedCall<'_>| mixed.queue(call, at, at).unwrap_err().to_string();
        let text = refused(MixedOp::AllGather.into());
        assert!(text.contains("the operation must be one of all_reduce, as tp_size is 2"), "{text}");
        let text = refused(MixedCall::from(MixedOp::AllReduce).mode(MixedMode::Composed));
        assert!(text.contains("the mode must be one of waits, bytes1, not composed"), "{text}");
        let nodes = MixedLayout::builder(2, rank.comm.rank()).local_size(1).build()?;
        let text = CudaMixedHandler::new(&rank.comm, &rank.collectives, nodes).unwrap_err().to_string();
        let only = "mixed collectives of GPUs need all ranks on one node, the layout has inter_size 2";
        assert!(text.ends_with(only), "{text}");
        Ok(())
    });
}
