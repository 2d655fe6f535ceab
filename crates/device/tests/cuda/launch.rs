//! Modules, launches, graphs.

use antiphon_device::cuda::{
    Context, CudaError, DeviceMemory, Event, Function, Graph, KernelArgument, LaunchConfig, Module, Stream,
    memory,
};

use antiphon_testing::{Need, need, nvrtc, sized};

use crate::{gpu, kernel};

pub const SOURCE: &str = include_str!("kernels/launch.cu");

/// A kernel of `launch.cu`, a stream, and zeroed memory for `words` words.
fn setup(name: &str, words: usize) -> Option<(Context, Function, Stream, DeviceMemory)> {
    let context = gpu()?;
    let function = kernel(&context, "launch.cu", SOURCE, name)?;
    let (stream, memory) = (context.stream().unwrap(), DeviceMemory::allocate(&context, 4 * words).unwrap());
    // SAFETY: the memory has `words` words; the stream orders the fill before all uses.
    unsafe { memory::fill_words(stream.borrow(), memory.pointer(), 0, words) }.unwrap();
    Some((context, function, stream, memory))
}

fn words(stream: &Stream, memory: &DeviceMemory) -> Vec<u32> {
    let mut bytes = vec![0; memory.len()];
    memory.read(stream, 0, &mut bytes).unwrap();
    bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect()
}

#[test]
fn arguments_arrive_and_are_checked() {
    #[derive(Clone, Copy)]
    #[repr(C)]
    struct Numbers {
        wide: u64,
        narrow: u32,
    }
    // SAFETY: the same fields as the kernel's `numbers`, in C's layout.
    unsafe impl KernelArgument for Numbers {}

    let Some((_context, arguments, stream, memory)) = setup("arguments", 96) else { return };
    let (to, byte, real, numbers, last) = (memory.pointer(), 7u8, 5f32, Numbers { wide: 3, narrow: 2 }, 1u32);
    let config = LaunchConfig::new(3, 32);
    let given = [(&to).into(), (&byte).into(), (&real).into(), (&numbers).into(), (&last).into()];
    // SAFETY: the arguments are the kernel's, and it writes one word for each of 96 threads.
    unsafe { arguments.launch(&stream, &config, &given) }.unwrap();
    let expected: Vec<u32> = (0..96).map(|index| index + 12_357_000).collect();
    assert_eq!(words(&stream, &memory), expected);

    // SAFETY: refused before anything runs.
    let error = unsafe { arguments.launch(&stream, &config, &given[..4]) }.unwrap_err();
    assert_eq!(error.to_string(), "kernel arguments has 5 parameters and was given 4 arguments");
    let wide = 7u64;
    let wrong = [given[0], given[1], (&wide).into(), given[3], given[4]];
    // SAFETY: as above.
    let error = unsafe { arguments.launch(&stream, &config, &wrong) }.unwrap_err();
    assert_eq!(error.to_string(), "parameter 2 of kernel arguments has 4 bytes and was given 8");
    // SAFETY: as above. The launch fails, since no device runs 4096 threads in a block.
    let error = unsafe { arguments.launch(&stream, &LaunchConfig::new(1, 4096), &given) }.unwrap_err();
    assert!(
        error.to_string().starts_with("cuLaunchKernelEx failed: CUDA_ERROR_INVALID_VALUE (1)"),
        "{error}"
    );
}

#[test]
fn what_is_not_a_module_or_not_in_it_is_refused() {
    let Some((context, function, ..)) = setup("increment", 1) else { return };
    let attributes = function.attributes().unwrap();
    eprintln!("{attributes:?}");
    assert_eq!(attributes.local_bytes, 0);
    assert!(attributes.registers > 0 && attributes.max_threads_per_block >= 1024);
    let capability = context.device().compute_capability().unwrap();
    assert_eq!(attributes.binary_version, capability.0 * 10 + capability.1);
    assert!(function.blocks_per_multiprocessor(256, 0).unwrap() >= 1);

    let error = Module::load(&context, &[0; 64]).unwrap_err().to_string();
    assert_eq!(error, "64 bytes are no machine code that a GPU can load: it is not an ELF file");
    let program =
        antiphon_device::cuda::Program::new("x.cu", SOURCE, context.device().architecture().unwrap());
    let cubin = nvrtc().unwrap().compile(&program).unwrap().cubin;
    let error = Module::load(&context, &cubin).unwrap().function("nothing").unwrap_err().to_string();
    assert!(error.starts_with("cuModuleGetFunction failed: CUDA_ERROR_NOT_FOUND (500)"), "{error}");
}

#[test]
fn a_cooperative_grid_runs_all_at_once_or_not_at_all() {
    let Some((context, meet, stream, memory)) = setup("meet", 4096) else { return };
    let most = meet.blocks_per_multiprocessor(512, 0).unwrap()
        * context.device().properties().unwrap().multiprocessors;
    let blocks = sized(most, 16);
    let (counter, to) = (memory.pointer(), memory.pointer().offset(4));
    let given = [(&counter).into(), (&to).into()];
    // SAFETY: the kernel writes one word per block, and there are fewer than 4095 blocks.
    unsafe { meet.launch(&stream, &LaunchConfig::new(blocks, 512).cooperative(), &given) }.unwrap();
    let seen = words(&stream, &memory);
    assert!(seen[..=blocks as usize].iter().all(|&count| count == blocks), "{seen:?}");
    // SAFETY: refused before anything runs.
    let error =
        unsafe { meet.launch(&stream, &LaunchConfig::new(most + 1, 512).cooperative(), &given) }.unwrap_err();
    assert!(error.to_string().contains("CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"), "{error}");
}

#[test]
fn clusters_have_the_size_that_was_asked_for() {
    let Some((context, cluster_size, stream, memory)) = setup("cluster_size", 16) else { return };
    let clusters = context.device().properties().unwrap().cluster_launch.then_some(());
    let Some(()) = need(Need::Hardware("clusters"), clusters.ok_or("they need Hopper")) else { return };
    let (to, config) = (memory.pointer(), LaunchConfig::new(16, 64).cluster(8));
    assert!(cluster_size.active_clusters(&config).unwrap() >= 1);
    // SAFETY: the kernel writes one word for each of 16 blocks.
    unsafe { cluster_size.launch(&stream, &config, &[(&to).into()]) }.unwrap();
    assert_eq!(words(&stream, &memory), [8; 16]);
    // SAFETY: as above, with more blocks in a cluster.
    let large = LaunchConfig::new(16, 64).cluster(16);
    cluster_size.allow_large_clusters().unwrap();
    if cluster_size.active_clusters(&large).is_ok_and(|clusters| clusters > 0) {
        // SAFETY: as above.
        unsafe { cluster_size.launch(&stream, &large, &[(&to).into()]) }.unwrap();
        assert_eq!(words(&stream, &memory), [16; 16]);
    }
}

#[test]
fn dependent_launches_keep_their_order() {
    let Some((_context, chain, stream, memory)) = setup("chain", 1) else { return };
    let to = memory.pointer();
    for _ in 0..1000 {
        // SAFETY: the kernel adds to one word, after it has waited for the launch ahead.
        unsafe { chain.launch(&stream, &LaunchConfig::new(1, 32).programmatic(), &[(&to).into()]) }.unwrap();
    }
    assert_eq!(words(&stream, &memory), [1000]);
}

#[test]
fn large_shared_memory_is_had_by_asking() {
    let Some((context, large_shared, stream, memory)) = setup("large_shared", 1) else { return };
    let bytes = context.device().properties().unwrap().shared_bytes_per_block;
    let (to, count) = (memory.pointer(), bytes / 4);
    let (config, given) = (LaunchConfig::new(1, 256).shared_bytes(bytes), [(&to).into(), (&count).into()]);
    // SAFETY: refused before anything runs.
    unsafe { large_shared.launch(&stream, &config, &given) }.unwrap_err();
    large_shared.allow_dynamic_shared(bytes).unwrap();
    // SAFETY: the kernel uses as many words of shared memory as it was given, and writes one word.
    unsafe { large_shared.launch(&stream, &config, &given) }.unwrap();
    assert_eq!(words(&stream, &memory), [count - 1]);
}

#[test]
fn a_graph_runs_what_was_recorded() {
    let Some((context, increment, stream, memory)) = setup("increment", 32) else { return };
    let (to, config) = (memory.pointer(), LaunchConfig::new(1, 32));
    stream.borrow().synchronize().unwrap();
    let side = context.stream().unwrap();
    let [fork, join] = [(); 2].map(|()| Event::new(&context).unwrap());
    let graph = Graph::capture::<CudaError>(&stream, |recorded| {
        assert!(recorded.is_capturing()?);
        // SAFETY: the kernel adds one to each of 32 words.
        unsafe { increment.launch(recorded, &config, &[(&to).into()]) }?;
        fork.record(recorded)?;
        side.borrow().wait(&fork)?;
        // SAFETY: as above.
        unsafe { increment.launch(&side, &config, &[(&to).into()]) }?;
        join.record(&side)?;
        recorded.wait(&join)
    })
    .unwrap();
    assert!(!stream.borrow().is_capturing().unwrap());
    assert_eq!(graph.node_count().unwrap(), 2);
    assert_eq!(words(&stream, &memory), [0; 32], "a capture runs nothing");
    let ready = graph.instantiate().unwrap();
    drop(graph);
    for _ in 0..5 {
        // SAFETY: the memory and the kernel are alive.
        unsafe { ready.launch(&stream) }.unwrap();
    }
    assert_eq!(words(&stream, &memory), [10; 32]);
}

#[test]
fn an_error_in_a_capture_leaves_the_stream_usable() {
    let Some((_context, increment, stream, memory)) = setup("increment", 32) else { return };
    let to = memory.pointer();
    let failed = Graph::capture::<CudaError>(&stream, |recorded| {
        // SAFETY: refused: the kernel has one parameter.
        unsafe { increment.launch(recorded, &LaunchConfig::new(1, 32), &[]) }
    });
    assert!(matches!(failed, Err(CudaError::ArgumentCount { .. })), "{failed:?}");
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        Graph::capture::<CudaError>(&stream, |_| panic!("in the middle of a capture"))
    }));
    assert!(panicked.is_err() && !stream.borrow().is_capturing().unwrap());
    // SAFETY: the kernel adds one to each of 32 words.
    unsafe { increment.launch(&stream, &LaunchConfig::new(1, 32), &[(&to).into()]) }.unwrap();
    assert_eq!(words(&stream, &memory), [1; 32]);
}
