//! Bad input is refused on all ranks, with what is wrong, and the communicator stays usable.

use antiphon_executor::{
    ExecutorError,
    cuda::{CudaOptions, CudaPlan},
};
use antiphon_language::library::{Setting, find};
use antiphon_plan::{
    PlanError,
    verify::{Options as Proof, VerifiedPlan},
};
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::harness::{Both, on_gpus, proved};

fn one_shot(ranks: u32, instances: u32) -> VerifiedPlan {
    let mut setting = Setting::new(ranks);
    setting.options.instances = instances;
    proved(find("one-shot-all-reduce").unwrap().plan(&setting).unwrap())
}

#[test]
fn plans_that_do_not_fit_are_refused_on_2() {
    let (right, for_three, other) = (one_shot(2, 1), one_shot(3, 1), one_shot(2, 2));
    on_gpus(2, |rank| {
        let (comm, context) = (&rank.comm, &rank.context);
        let load = |plan| CudaPlan::load(comm, context, plan, CudaOptions::default());
        let error = load(&for_three).unwrap_err();
        assert!(matches!(error, ExecutorError::WorldSize { ranks: 3, world_size: 2, .. }), "{error:?}");
        let of_host = VerifiedPlan::new(right.plan().clone(), &Proof::default()).expect("it is right");
        let error = load(&of_host).unwrap_err();
        assert!(
            matches!(error, ExecutorError::Proof { .. }) && error.to_string().contains("--memory device"),
            "{error}"
        );
        let error = load(if comm.rank() == 0 { &right } else { &other }).unwrap_err();
        assert!(matches!(error, ExecutorError::PlansDiffer { .. }), "{error:?}");
        Both::load(rank, &right, CudaOptions::default())?.compare::<f32>(64, 0, 0)
    });
}

#[test]
fn too_many_thread_blocks_are_refused_on_2() {
    // Twice as many as any of our GPUs runs.
    let many = one_shot(2, 700);
    on_gpus(2, |rank| {
        let error = CudaPlan::load(&rank.comm, &rank.context, &many, CudaOptions::default()).unwrap_err();
        let ExecutorError::Occupancy { blocks, threads: 128, fit, .. } = error else { panic!("{error:?}") };
        assert!(blocks == 700 && fit < blocks, "{blocks}, {fit}");
        Both::load(rank, &one_shot(2, 1), CudaOptions::default())?.compare::<f32>(64, 0, 0)
    });
}

#[test]
fn tensors_that_do_not_fit_are_refused_on_2() {
    let plan = one_shot(2, 1);
    on_gpus(2, |rank| {
        let mut both = Both::load(rank, &plan, CudaOptions::default())?;
        let error = both.gpu.prepare(&rank.comm, DType::F8E4M3, 64).unwrap_err();
        assert!(matches!(error, ExecutorError::Tensor { .. }), "{error:?}");
        let error = both.gpu.prepare(&rank.comm, DType::F32, 100).unwrap_err();
        assert!(
            matches!(&error, ExecutorError::Plan(plan) if matches!(**plan, PlanError::Sizes { .. })),
            "{error:?}"
        );
        let error = both.queue(&both.unchecked::<f32>(64)?).unwrap_err();
        assert!(
            matches!(error, ExecutorError::Unprepared { dtype: DType::F32, bytes: 256, .. }),
            "{error:?}"
        );

        let device = Device::Cuda(rank.context.device().ordinal());
        let input = |at: usize, dtype, device| {
            // SAFETY: nothing reads it.
            unsafe { TensorView::from_raw_parts(at as *const u8, dtype, &[64], None, device) }.unwrap()
        };
        let output = || {
            // SAFETY: nothing writes it.
            unsafe { TensorViewMut::from_raw_parts(0x2000 as *mut u8, DType::F32, &[64], None, device) }
                .unwrap()
        };
        let refused = |input: TensorView<'_>| {
            // SAFETY: it is refused, so that nothing is queued.
            unsafe { both.gpu.execute(input, output(), &rank.stream) }.unwrap_err()
        };
        let error = refused(input(0x1000, DType::F32, Device::Host));
        assert!(
            matches!(error, ExecutorError::Device { which: "input", device: Device::Host, .. }),
            "{error:?}"
        );
        let error = refused(input(0x1000, DType::I32, device));
        assert!(
            matches!(error, ExecutorError::DTypes { input: DType::I32, output: DType::F32 }),
            "{error:?}"
        );
        let error = refused(input(0x2010, DType::F32, device));
        assert!(matches!(error, ExecutorError::Overlap), "{error:?}");
        let error = refused(input(0x1002, DType::F32, device));
        assert!(matches!(error, ExecutorError::Tensor { which: "input", .. }), "{error:?}");
        both.compare::<f32>(64, 0, 0)
    });
}
