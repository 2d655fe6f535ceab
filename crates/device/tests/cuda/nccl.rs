//! NCCL: found, and what its calls do between two GPUs, each driven by a thread.

use std::thread;

use antiphon_device::{
    ReduceOp,
    cuda::{
        Context, CudaError, DeviceMemory, DevicePointer, Graph, LibraryVersion, Nccl, NcclCommunicator,
        Stream, StreamRef, UniqueId,
    },
};
use antiphon_tensor::{DType, Element, TensorView, with_dtype};

use antiphon_testing::{link, nccl, packages};

const WORLD: usize = 2;
/// Elements of a rank's block.
const BLOCK: usize = 1000;

#[test]
fn the_library_among_the_packages_tells_its_version() {
    let site = packages().map(|site| site.join("nvidia/nccl/lib")).filter(|folder| folder.is_dir());
    let opened = site.map(|folder| Nccl::open(&folder).unwrap().version());
    let Some(version) = opened.or_else(|| Some(nccl()?.version())) else { return };
    assert!(version >= LibraryVersion { major: 2, minor: 13, patch: 0 }, "{version}");
}

/// One of the two ranks: a communicator, a stream, and memory for an input and an output of one block for each rank.
struct Rank {
    comm: NcclCommunicator,
    stream: Stream,
    input: DeviceMemory,
    output: DeviceMemory,
}

impl Rank {
    fn new(context: &Context, id: &UniqueId, rank: usize) -> Self {
        let memory = || DeviceMemory::allocate(context, WORLD * BLOCK * 8).unwrap();
        let comm = NcclCommunicator::new(context, id, rank, WORLD).unwrap();
        assert_eq!((comm.rank(), comm.world_size()), (rank, WORLD));
        Self { comm, stream: context.stream().unwrap(), input: memory(), output: memory() }
    }

    /// Element `index` of the input of `rank`: small enough for any dtype, for its sum with the other rank's too.
    fn value<T: Element>(rank: usize, index: usize) -> T {
        T::from_f64(((index * 7 + rank * 3) % 50) as f64)
    }

    /// What a call makes of this rank's input, which is `len` elements, as is the result.
    fn result<T: Element>(
        &self,
        len: usize,
        call: impl FnOnce(&Self, StreamRef<'_>) -> Result<(), CudaError>,
    ) -> Vec<T> {
        let mine: Vec<T> = (0..WORLD * BLOCK).map(|index| Self::value(self.comm.rank(), index)).collect();
        self.input.write(&self.stream, 0, TensorView::from(&mine).as_bytes().unwrap()).unwrap();
        call(self, self.stream.borrow()).unwrap();
        self.output(len)
    }

    fn output<T: Element>(&self, len: usize) -> Vec<T> {
        let mut values = vec![T::default(); len];
        // SAFETY: any bytes are elements, and these are all of the vector's.
        let bytes = unsafe {
            std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), size_of_val(&values[..]))
        };
        self.output.read(&self.stream, 0, bytes).unwrap();
        values
    }

    fn ends(&self) -> (DevicePointer, DevicePointer) {
        (self.input.pointer(), self.output.pointer())
    }
}

/// Runs both ranks.
fn on_two_gpus(each: impl Fn(&Rank) + Sync) {
    let Some([first, second]) = link() else { return };
    let Some(nccl) = nccl() else { return };
    let id = UniqueId::from_bytes(&nccl.unique_id().unwrap().to_bytes()).unwrap();
    let (id, each) = (&id, &each);
    thread::scope(|scope| {
        for (rank, context) in [first, second].into_iter().enumerate() {
            scope.spawn(move || {
                let rank = Rank::new(&context, id, rank);
                each(&rank);
                rank.comm.check().unwrap();
            });
        }
    });
}

fn sum<T: Element>(index: usize) -> T {
    T::from_f64((0..WORLD).map(|rank| Rank::value::<T>(rank, index).to_f64()).sum())
}

// SAFETY of every call below: the memory is as large as it needs and lives until the stream is done, which reading the
// output waits for.

#[test]
fn every_call_does_what_it_says_for_every_dtype() {
    fn check<T: Element>(rank: &Rank) {
        let (dtype, (from, to), me) = (T::DTYPE, rank.ends(), rank.comm.rank());
        let all = WORLD * BLOCK;
        let result = rank.result::<T>(all, |rank, stream| {
            // SAFETY: see above.
            unsafe { rank.comm.all_reduce(from, to, all, dtype, ReduceOp::Sum, stream) }
        });
        assert_eq!(result, (0..all).map(sum).collect::<Vec<T>>());

        let result = rank.result::<T>(BLOCK, |rank, stream| {
            // SAFETY: see above.
            unsafe { rank.comm.reduce_scatter(from, to, BLOCK, dtype, ReduceOp::Sum, stream) }
        });
        assert_eq!(result, (0..BLOCK).map(|index| sum(me * BLOCK + index)).collect::<Vec<T>>());

        let result = rank.result::<T>(all, |rank, stream| {
            // SAFETY: see above.
            unsafe { rank.comm.all_gather(from, to, BLOCK, dtype, stream) }
        });
        let expected: Vec<T> = (0..all).map(|at| Rank::value(at / BLOCK, at % BLOCK)).collect();
        assert_eq!(result, expected);

        let result = rank.result::<T>(all, |rank, stream| {
            let block =
                |memory: DevicePointer, peer: usize| memory.offset((peer * BLOCK * dtype.size()) as u64);
            rank.comm.grouped(|| {
                (0..WORLD).try_for_each(|peer| {
                    // SAFETY: see above.
                    unsafe {
                        rank.comm.send(block(from, peer), BLOCK, dtype, peer, stream)?;
                        rank.comm.recv(block(to, peer), BLOCK, dtype, peer, stream)
                    }
                })
            })
        });
        let expected: Vec<T> = (0..all).map(|at| Rank::value(at / BLOCK, me * BLOCK + at % BLOCK)).collect();
        assert_eq!(result, expected);

        let result = rank.result::<T>(all, |rank, stream| {
            // SAFETY: see above.
            unsafe { rank.comm.broadcast(from, to, all, dtype, 1, stream) }
        });
        assert_eq!(result, (0..all).map(|index| Rank::value(1, index)).collect::<Vec<T>>());
    }
    on_two_gpus(|rank| DType::NUMERIC.iter().for_each(|&dtype| with_dtype!(dtype, T => check::<T>(rank))));
}

#[test]
fn operators_are_nccls() {
    on_two_gpus(|rank| {
        let ((from, to), all) = (rank.ends(), WORLD * BLOCK);
        for op in ReduceOp::ARITHMETIC {
            let result = rank.result::<f32>(all, |rank, stream| {
                // SAFETY: see above.
                unsafe { rank.comm.all_reduce(from, to, all, DType::F32, op, stream) }
            });
            let expected = (0..all).map(|index| {
                let (a, b): (f32, f32) = (Rank::value(0, index), Rank::value(1, index));
                match op {
                    ReduceOp::Sum => a + b,
                    ReduceOp::Prod => a * b,
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                    ReduceOp::Avg => (a + b) / 2.0,
                    _ => unreachable!("NCCL has none on bits"),
                }
            });
            assert_eq!(result, expected.collect::<Vec<f32>>(), "{op}");
        }
    });
}

#[test]
fn calls_are_captured_and_replayed() {
    on_two_gpus(|rank| {
        let ((from, to), all) = (rank.ends(), WORLD * BLOCK);
        let call = |stream: StreamRef<'_>| {
            // SAFETY: see above; the graph is launched below, while the memory lives.
            unsafe { rank.comm.all_reduce(from, to, all, DType::I32, ReduceOp::Sum, stream) }
        };
        let expected: Vec<i32> = (0..all).map(sum).collect();
        assert_eq!(rank.result::<i32>(all, |_, stream| call(stream)), expected);
        let graph = Graph::capture(&rank.stream, |stream| {
            call(stream)?;
            // SAFETY: see above. In place: the sum of the sums.
            unsafe { rank.comm.all_reduce(to, to, all, DType::I32, ReduceOp::Sum, stream) }
        });
        let graph = graph.unwrap().instantiate().unwrap();
        for _ in 0..3 {
            // SAFETY: see above.
            unsafe { graph.launch(&rank.stream) }.unwrap();
        }
        let twice: Vec<i32> = expected.iter().map(|sum| sum * WORLD as i32).collect();
        assert_eq!(rank.output::<i32>(all), twice);
    });
}

#[test]
fn a_call_that_makes_no_sense_is_nccls_error_with_its_words() {
    on_two_gpus(|rank| {
        let (from, to) = rank.ends();
        // SAFETY: refused before anything runs.
        let error =
            unsafe { rank.comm.broadcast(from, to, 1, DType::F32, 7, rank.stream.borrow()) }.unwrap_err();
        assert!(error.to_string().starts_with("ncclBroadcast failed: invalid argument"), "{error}");
    });
}

#[test]
fn an_aborted_communicator_leaves_the_device_usable() {
    let Some([first, second]) = link() else { return };
    let Some(nccl) = nccl() else { return };
    let id = &nccl.unique_id().unwrap();
    thread::scope(|scope| {
        for (rank, context) in [first, second].into_iter().enumerate() {
            scope.spawn(move || {
                let Rank { comm, stream, input, .. } = Rank::new(&context, id, rank);
                comm.abort().unwrap();
                input.write(&stream, 0, &[1; 16]).unwrap();
            });
        }
    });
}
