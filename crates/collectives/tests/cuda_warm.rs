//! What warm calls on GPUs take of the host: how often they allocate memory and lock a mutex.

mod calls;

use antiphon_collectives::{ReduceOp, StreamCollectives, cuda::CudaCollectives};
use antiphon_device::cuda::{Context, DeviceMemory};
use antiphon_fabric::LocalWorld;
use antiphon_operation::Operation;
use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};
use antiphon_testing::{CountingAllocator, Taken, device_of, gpus_for, sized};
use calls::call_of;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const WORLD: usize = 2;
const COUNT: usize = 96;
const ROOM: usize = 1 << 12;

#[test]
fn every_operation_takes_nothing() {
    let Some(driver) = gpus_for(WORLD) else { return };
    let calls = sized(1000, 100);
    LocalWorld::run(WORLD, |comm| {
        let me = comm.rank();
        let context = Context::primary(device_of(driver, me).unwrap()).unwrap();
        let collectives = CudaCollectives::new(&comm, &context).unwrap();
        collectives.prepare(DType::F32, ReduceOp::Sum).unwrap();
        let stream = context.stream().unwrap();
        let device = Device::Cuda(context.device().ordinal());
        let [from, to] = [(); 2].map(|()| DeviceMemory::allocate(&context, ROOM).unwrap());
        for operation in Operation::ALL.iter().copied().filter(|operation| operation.is_call()) {
            let call = call_of(operation, COUNT, me, WORLD);
            let shapes = [call.input_layout(COUNT, me, WORLD), call.output_layout(COUNT, me, WORLD)]
                .map(|layout| [layout.elements()]);
            let at = |memory: &DeviceMemory| memory.pointer().0 as usize as *mut u8;
            let taken = Taken::by_each_of(calls, || {
                // SAFETY: the memory has room for all shapes and lives until the stream has been waited for.
                unsafe {
                    let input =
                        TensorView::from_raw_parts(at(&from), DType::F32, &shapes[0], None, device).unwrap();
                    let mut output =
                        TensorViewMut::from_raw_parts(at(&to), DType::F32, &shapes[1], None, device).unwrap();
                    collectives.call(&call, Some(&input), Some(&mut output), stream.borrow()).unwrap();
                }
            });
            stream.borrow().synchronize().unwrap();
            collectives.check().unwrap();
            comm.barrier().unwrap();
            assert_eq!(taken, Taken::new(0, 0), "{operation:?}");
        }
    });
}
