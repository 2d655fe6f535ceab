//! Memory of tensors on a rank's GPU.

use std::{ops::Range, rc::Rc};

use antiphon::{
    collectives::Communicator,
    device::cuda::{Context, DeviceMemory, DevicePointer, Stream, StreamRef, memory},
    fabric::RegisteredMemory,
    operation::Operation,
    tensor::{DType, Device, Element, TensorView, TensorViewMut},
};

use super::{OnStream, Rank};
use crate::{
    Contender, Result, Wrong,
    case::{Case, Collective},
    pattern,
};

/// Memory with a shape.
pub(super) struct Tensor {
    memory: DeviceMemory,
    dtype: DType,
    shape: Vec<usize>,
    device: Device,
}

impl Tensor {
    /// One of zeros.
    pub(super) fn zeros(context: &Context, stream: &Stream, dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        let memory = DeviceMemory::allocate(context, bytes.max(16))?;
        // SAFETY: the memory was allocated with as many bytes, and the stream is waited for.
        unsafe { memory::fill(stream.borrow(), memory.pointer(), 0, memory.len()) }?;
        stream.borrow().synchronize()?;
        Ok(Self { memory, dtype, shape: shape.to_vec(), device: Device::Cuda(context.device().ordinal()) })
    }

    /// One of elements of the host.
    pub(super) fn holding<T: Element>(
        context: &Context,
        stream: &Stream,
        shape: &[usize],
        content: &[T],
    ) -> Result<Self> {
        let tensor = Self::zeros(context, stream, T::DTYPE, shape)?;
        tensor.memory.write(stream, 0, TensorView::from(content).as_bytes()?)?;
        Ok(tensor)
    }

    pub(super) fn pointer(&self) -> DevicePointer {
        self.memory.pointer()
    }

    /// All of its memory, which peers reach. The ranks do it together.
    pub(super) fn registered(&self, comm: &Communicator, context: &Context) -> Result<RegisteredMemory> {
        Ok(RegisteredMemory::new(comm, context, self.pointer(), self.memory.len() as u64)?)
    }

    pub(super) fn view(&self) -> TensorView<'_> {
        self.view_mut().into_view()
    }

    /// The tensor, to write into: calls in one stream come one behind the other.
    pub(super) fn view_mut(&self) -> TensorViewMut<'_> {
        self.begin(&self.shape)
    }

    /// Its first elements, in a shape of their own.
    pub(super) fn begin(&self, shape: &[usize]) -> TensorViewMut<'_> {
        self.at(0, shape)
    }

    /// Some of its elements, as one row.
    pub(super) fn part(&self, part: Range<usize>) -> TensorViewMut<'_> {
        self.at(part.start, &[part.len()])
    }

    fn at(&self, start: usize, shape: &[usize]) -> TensorViewMut<'_> {
        let elements = start + shape.iter().product::<usize>();
        assert!(elements <= self.shape.iter().product(), "a view of {elements} elements of {:?}", self.shape);
        let at = self.pointer().offset((start * self.dtype.size()) as u64).0 as usize as *mut u8;
        // SAFETY: the memory has these elements, of any bits, and lives as long as the view; the stream keeps calls apart.
        unsafe { TensorViewMut::from_raw_parts(at, self.dtype, shape, None, self.device) }.expect("plain")
    }

    /// The elements, on the host.
    fn read<T: Element>(&self, stream: StreamRef<'_>) -> Result<Vec<T>> {
        let mut content = vec![T::default(); self.shape.iter().product()];
        self.memory.read(stream, 0, TensorViewMut::from(&mut content[..]).as_mut_bytes()?)?;
        Ok(content)
    }
}

/// Compares an output with what it must be.
type Check<'a> = Box<dyn Fn(&Tensor, StreamRef<'_>) -> Result<Wrong> + 'a>;

/// A rank's tensors of a case, which its contenders share.
pub(super) struct Tensors<'a> {
    pub(super) input: Tensor,
    pub(super) output: Tensor,
    /// Whether calls take place in the output, where each rank then has its input before.
    in_place: bool,
    check: Check<'a>,
    /// The collectives that have registered the memory.
    registered: Option<&'a Rank<'a>>,
}

impl<'a> Tensors<'a> {
    /// The pattern as input, and an output that is compared by `check`.
    pub(super) fn new<T: Element>(
        rank: &'a Rank<'a>,
        case: &Case,
        check: impl Fn(&[T]) -> Result<Wrong> + 'a,
    ) -> Result<Self> {
        let (input, output) = case.counts(rank.comm.rank(), rank.comm.world_size());
        let values = pattern::input::<T>(case.op, rank.comm.rank(), input);
        let input = Tensor::holding(rank.context, rank.stream, &[input], &values)?;
        let output = Tensor::zeros(rank.context, rank.stream, T::DTYPE, &[output])?;
        Ok(Self::of::<T>(input, output, case, check))
    }

    /// These two.
    pub(super) fn of<T: Element>(
        input: Tensor,
        output: Tensor,
        case: &Case,
        check: impl Fn(&[T]) -> Result<Wrong> + 'a,
    ) -> Self {
        let in_place = case.collective == Collective::Of(Operation::Broadcast);
        Self { in_place, ..Self::apart(input, output, check) }
    }

    /// These two, for calls that read one and write the other.
    pub(super) fn apart<T: Element>(
        input: Tensor,
        output: Tensor,
        check: impl Fn(&[T]) -> Result<Wrong> + 'a,
    ) -> Self {
        let check: Check<'a> = Box::new(move |output, stream| check(&output.read::<T>(stream)?));
        Self { input, output, in_place: false, check, registered: None }
    }

    /// These two, for calls in place: in the second, which has what the first has before.
    pub(super) fn together<T: Element>(
        before: Tensor,
        buffer: Tensor,
        check: impl Fn(&[T]) -> Result<Wrong> + 'a,
    ) -> Self {
        Self { in_place: true, ..Self::apart(before, buffer, check) }
    }

    /// Lets registered all-reduces use them.
    pub(super) fn register(&mut self, rank: &'a Rank<'a>) -> Result<()> {
        for tensor in [&self.input, &self.output] {
            rank.ours.register(tensor.registered(rank.comm, rank.context)?)?;
        }
        self.registered = Some(rank);
        Ok(())
    }

    /// The tensors of a list, which lie one behind the other.
    pub(super) fn lists(&self, case: &Case) -> (Vec<TensorView<'_>>, Vec<TensorViewMut<'_>>) {
        let parts = |tensor: &Tensor| case.cut(tensor.shape[0]);
        let inputs = parts(&self.input).map(|part| self.input.part(part).into_view());
        (inputs.collect(), parts(&self.output).map(|part| self.output.part(part)).collect())
    }
}

/// A call that a closure puts into a stream.
pub(super) struct Plain<'a> {
    name: String,
    /// What is compared, if it is.
    tensors: Option<Rc<Tensors<'a>>>,
    put: Box<dyn Fn(StreamRef<'_>) -> Result<()> + 'a>,
}

impl<'a> Plain<'a> {
    /// A call whose results are not compared.
    pub(super) fn unchecked(
        name: impl Into<String>,
        put: impl Fn(StreamRef<'_>) -> Result<()> + 'a,
    ) -> OnStream<'a> {
        Box::new(Self { name: name.into(), tensors: None, put: Box::new(put) })
    }

    /// A call on tensors that contenders share.
    pub(super) fn on(
        tensors: &Rc<Tensors<'a>>,
        name: impl Into<String>,
        put: impl Fn(&Tensors<'a>, StreamRef<'_>) -> Result<()> + 'a,
    ) -> OnStream<'a> {
        let shared = tensors.clone();
        let put = Box::new(move |stream: StreamRef<'_>| put(&shared, stream));
        Box::new(Self { name: name.into(), tensors: Some(tensors.clone()), put })
    }
}

impl Contender<StreamRef<'_>> for Plain<'_> {
    fn name(&self) -> Result<String> {
        Ok(self.name.clone())
    }

    fn prepare(&mut self, stream: StreamRef<'_>) -> Result<()> {
        let Some(tensors) = &self.tensors else { return Ok(()) };
        let Tensors { input, output, in_place, .. } = &**tensors;
        let (to, len) = (output.pointer(), output.memory.len());
        // SAFETY: two memories of that size, and the stream is waited for before any other code uses them.
        unsafe {
            match in_place {
                true => memory::copy(stream, to, input.pointer(), len)?,
                false => memory::fill(stream, to, 0xFF, len)?,
            }
        }
        Ok(stream.synchronize()?)
    }

    fn call(&mut self, stream: StreamRef<'_>) -> Result<()> {
        (self.put)(stream)
    }

    fn check(&mut self, stream: StreamRef<'_>) -> Result<Wrong> {
        self.tensors.as_ref().map_or(Ok(Wrong::default()), |of| (of.check)(&of.output, stream))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        drop(self.put);
        // The last contender takes the memory back.
        let Some(Tensors { input, output, registered, .. }) = self.tensors.and_then(Rc::into_inner) else {
            return Ok(());
        };
        registered.map_or(Ok(()), |rank| {
            [input, output].iter().try_for_each(|of| Ok(rank.ours.unregister(rank.comm, of.pointer())?))
        })
    }
}
