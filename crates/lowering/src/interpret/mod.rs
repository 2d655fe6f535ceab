//! A graph run by the book, for all ranks of a world at once.

mod compare;
mod memory;
mod norm;
mod numbers;

use antiphon_operation::ReduceOp;
use antiphon_tensor::DType;

use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    ids::ValueId,
    numerics::rounded,
    op::{Coll, Fused, FusedArg, FusedOutput, Kind, Prim},
    types::{Element, Type},
    verify::{arithmetic::computed, verify},
};
pub use compare::{Difference, Opinion, compare, second_opinion};
use memory::{Memory, Shapes};
use numbers::{Numbers, full};

/// The most elements that all storages of one rank may have together.
const MAX_ELEMENTS: usize = 1 << 26;

/// A tensor of one rank: row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// The type of its elements.
    pub dtype: Element,
    /// The extents.
    pub shape: Vec<usize>,
    /// The elements, each of which the type has exactly. (Of i64, those up to 2⁵³.)
    pub data: Vec<f64>,
}

/// How results are rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arithmetic {
    /// As kernels do: halves widened to f32, each step rounded to f32, results to their type; sums over ranks accumulated in
    /// ascending order and rounded once; sums over rows in f64, as their order is free; the fused all-reduce to the bit.
    Kernels,
    /// Floating-point numbers are not rounded beyond f64. What [`Numerics::Close`](crate::Numerics::Close) leaves equal, is.
    Exact,
}

/// What a graph returns on every rank, for inputs of every rank: `inputs[rank][i]` is for the `i`-th
/// [`Kind::Input`] or [`Kind::Constant`]. A group of `n` ranks is `n` neighbours among the `inputs.len()` ranks.
///
/// An operation that the crate does not know is some linear function of all its operands, which its name and attributes
/// determine: equal graphs give equal results, whatever it really does. Symbols have their hints.
///
/// # Errors
/// What is wrong with the graph or the inputs, or what the interpreter does not do, in words.
pub fn interpret(
    graph: &Graph,
    inputs: &[Vec<Tensor>],
    arithmetic: Arithmetic,
) -> Result<Vec<Vec<Tensor>>, String> {
    if let Some(finding) = verify(graph).first() {
        return Err(finding.to_string());
    }
    let world = inputs.len();
    if let Some(group) =
        graph.groups.iter().find(|group| world == 0 || !world.is_multiple_of(group.size as usize))
    {
        return Err(format!("group {} has {} ranks, of a world of {world}", group.name, group.size));
    }
    let analysis = graph.analyse();
    let shapes = Shapes::of(graph)?;
    let ranks = inputs
        .iter()
        .map(|_| Memory::new(graph, &analysis, &shapes, MAX_ELEMENTS))
        .collect::<Result<_, _>>()?;
    let mut machine = Machine { graph, analysis: &analysis, shapes: &shapes, arithmetic, ranks, effects: 0 };
    let mut next_input = 0;
    for op in &graph.ops {
        if matches!(op.kind, Kind::Input | Kind::Constant) {
            for (rank, given) in inputs.iter().enumerate() {
                let tensor =
                    given.get(next_input).ok_or_else(|| format!("rank {rank} has {} inputs", given.len()))?;
                machine.input(rank, op.outs[0], tensor)?;
            }
            next_input += 1;
        } else {
            machine.run(op).map_err(|what| format!("{}: {what}", op.name))?;
        }
    }
    let tensor = |rank: usize, output: ValueId| Tensor {
        dtype: graph.ty(output).dtype,
        shape: shapes.shape(output).to_vec(),
        data: machine.read(rank, output),
    };
    Ok((0..world).map(|rank| graph.outputs.iter().map(|output| tensor(rank, *output)).collect()).collect())
}

struct Machine<'g> {
    graph: &'g Graph,
    analysis: &'g Analysis,
    shapes: &'g Shapes,
    arithmetic: Arithmetic,
    ranks: Vec<Memory>,
    effects: u64,
}

impl Machine<'_> {
    fn read(&self, rank: usize, value: ValueId) -> Vec<f64> {
        self.ranks[rank].read(self.analysis, self.shapes, value)
    }

    fn write(&mut self, rank: usize, value: ValueId, data: &[f64]) {
        self.ranks[rank].write(self.analysis, self.shapes, value, data);
    }

    fn input(&mut self, rank: usize, value: ValueId, tensor: &Tensor) -> Result<(), String> {
        let (ty, shape) = (self.graph.ty(value), self.shapes.shape(value));
        if tensor.dtype != ty.dtype
            || tensor.shape != shape
            || tensor.data.len() != shape.iter().product::<usize>()
        {
            let name = self.graph.name(value);
            return Err(format!("{name} is {} {:?}, not {} {shape:?}", tensor.dtype, tensor.shape, ty.dtype));
        }
        let is_one = |value: &f64| value.is_nan() || full(ty.dtype, *value) == *value;
        if let Some(at) = tensor.data.iter().position(|value| !is_one(value)) {
            let (name, value) = (self.graph.name(value), tensor.data[at]);
            return Err(format!("element {at} of {name} is {value}, which {} has not", ty.dtype));
        }
        self.write(rank, value, &tensor.data);
        Ok(())
    }

    fn arithmetic(&self) -> Numbers {
        Numbers { exact: self.arithmetic == Arithmetic::Exact }
    }

    fn run(&mut self, op: &Op) -> Result<(), String> {
        match &op.kind {
            Kind::View { .. } => return Ok(()), // the memory is there already
            Kind::Wait { .. } => return Ok(()),
            Kind::Start { coll, .. } | Kind::Sync { coll } => return self.collective(op, coll),
            Kind::Fused { fused } => return self.fused(op, fused),
            kind @ Kind::Opaque { .. } if kind.has_effect() => self.effects += 1,
            _ => {}
        }
        for rank in 0..self.ranks.len() {
            let args: Vec<Vec<f64>> = op.args.iter().map(|arg| self.read(rank, *arg)).collect();
            for (index, out) in op.outs.iter().enumerate() {
                if matches!(op.kind.result_memory(index), crate::op::ResultMemory::Alias(_)) {
                    continue;
                }
                let data = self.local(op, &args, index, *out)?;
                self.write(rank, *out, &data);
            }
        }
        Ok(())
    }

    /// What an operation without communication gives.
    fn local(&self, op: &Op, args: &[Vec<f64>], index: usize, out: ValueId) -> Result<Vec<f64>, String> {
        let (to, shape) = (self.graph.ty(out).dtype, self.shapes.shape(out));
        let count = shape.iter().product();
        let source = |arg: usize| (&args[arg], self.shapes.shape(op.args[arg]));
        let types: Vec<&Type> = op.args.iter().map(|arg| self.graph.ty(*arg)).collect();
        let numbers = self.arithmetic();
        let element = || computed(&op.kind, &types);
        let all = |from: Element, data: Vec<f64>| -> Vec<f64> {
            data.into_iter().map(|value| numbers.convert(from, to, value)).collect()
        };
        Ok(match &op.kind {
            Kind::Full { value } => vec![full(to, *value); count],
            Kind::Unary { op } => {
                let element = element()?;
                all(element, args[0].iter().map(|x| numbers.unary(*op, element, *x)).collect())
            }
            Kind::Binary { op, scalar, swapped } => {
                let element = element()?;
                let x = memory::spread(source(0), shape);
                let y = match scalar {
                    Some(number) => {
                        vec![element.number().map_or(*number, |dtype| rounded(dtype, *number)); count]
                    }
                    None => memory::spread(source(1), shape),
                };
                let (x, y) = if *swapped { (y, x) } else { (x, y) };
                all(element, x.iter().zip(&y).map(|(x, y)| numbers.binary(*op, element, *x, *y)).collect())
            }
            Kind::Cast => all(types[0].dtype, args[0].clone()),
            Kind::Copy => args[0].clone(),
            Kind::Assign => all(types[1].dtype, memory::spread(source(1), shape)),
            Kind::Reduce { op, dims, keepdim: _ } => {
                let element = if to.is_float() { element()? } else { to };
                all(element, numbers.reduce(*op, element, source(0), dims, count))
            }
            Kind::MatMul => {
                let element = element()?;
                let (k, n) = (self.shapes.shape(op.args[0])[1], shape[1]);
                let dot = |at: usize| {
                    let (row, column) = (at / n, at % n);
                    (0..k).fold(0.0, |sum, i| {
                        numbers.step(element, sum + args[0][row * k + i] * args[1][i * n + column])
                    })
                };
                all(element, (0..count).map(dot).collect())
            }
            Kind::Opaque { target, attributes, aliases: _, effect, communicates } => {
                let turn = if *effect || *communicates { self.effects } else { 0 };
                let data = opaque(&format!("{target} {attributes} {index} {turn}"), args, count);
                all(Element::Number(DType::F64), data)
            }
            _ => return Err("it is not computed here".into()),
        })
    }

    fn collective(&mut self, op: &Op, coll: &Coll) -> Result<(), String> {
        let size = self.graph.group(&coll.group).map_or(1, |group| group.size as usize);
        for (arg, out) in op.args.iter().zip(&op.outs) {
            let (ty, from, to) = (self.graph.ty(*arg), self.shapes.shape(*arg), self.shapes.shape(*out));
            for first in (0..self.ranks.len()).step_by(size) {
                let given: Vec<Vec<f64>> = (0..size).map(|rank| self.read(first + rank, *arg)).collect();
                for rank in 0..size {
                    let result = self.segment(coll, &given, rank, ty, (from, to))?;
                    self.write(first + rank, *out, &result);
                }
            }
        }
        Ok(())
    }

    fn reduced(&self, red: ReduceOp, dtype: Element, given: &[Vec<f64>], at: usize) -> f64 {
        self.arithmetic().reduced(red, dtype, given.iter().map(|data| data[at]))
    }

    fn segment(
        &self,
        coll: &Coll,
        given: &[Vec<f64>],
        rank: usize,
        ty: &Type,
        (from, to): (&[usize], &[usize]),
    ) -> Result<Vec<f64>, String> {
        let (size, count) = (given.len(), to.iter().product::<usize>());
        let red = coll.red.unwrap_or(ReduceOp::Sum);
        let row = |shape: &[usize]| shape.iter().skip(1).product::<usize>();
        Ok(match coll.prim {
            Prim::AllReduce => (0..count).map(|at| self.reduced(red, ty.dtype, given, at)).collect(),
            Prim::ReduceScatter => {
                (0..count).map(|at| self.reduced(red, ty.dtype, given, rank * count + at)).collect()
            }
            Prim::AllGather => given.concat(),
            Prim::Broadcast => given[coll.root.unwrap_or(0) as usize].clone(),
            Prim::AllToAll => {
                let rows = |list: &Option<Vec<crate::SymExpr>>| -> Result<Vec<usize>, String> {
                    match list {
                        None => Ok(vec![from[0] / size; size]),
                        Some(list) => list.iter().map(|rows| self.shapes.size(rows)).collect(),
                    }
                };
                let (sends, width) = (rows(&coll.sends)?, row(from));
                let elements = |rows: &[usize]| {
                    let sum = rows.iter().try_fold(0usize, |sum, rows| sum.checked_add(*rows));
                    sum?.checked_mul(width)
                };
                let ends = elements(&sends[..rank]).zip(elements(&sends[..=rank]));
                let block = |data| ends.and_then(|(start, end)| <[f64]>::get(data, start..end));
                let blocks = given.iter().map(|data| block(data).ok_or("rows beyond the last"));
                let data = blocks.collect::<Result<Vec<_>, _>>()?.concat();
                if data.len() != count {
                    return Err(format!("{} elements come, for {count}", data.len()));
                }
                data
            }
            Prim::ShardDimAllToAll => {
                let [gather, shard] = coll.dims.ok_or("no dimensions")?;
                let whole: Vec<usize> = from
                    .iter()
                    .enumerate()
                    .map(|(dim, n)| if dim == gather { n * size } else { *n })
                    .collect();
                let mut data = Vec::with_capacity(count);
                memory::each_index(to, |index| {
                    let mut index = index.to_vec();
                    index[shard] += rank * to[shard];
                    let owner = index[gather] / from[gather];
                    index[gather] %= from[gather];
                    let at = index.iter().zip(from).fold(0, |at, (i, n)| at * n + i);
                    data.push(given[owner].get(at).copied().unwrap_or(f64::NAN));
                });
                if whole[shard] != to[shard] * size {
                    return Err(format!("{whole:?} cannot be sharded along {shard} among {size} ranks"));
                }
                data
            }
        })
    }

    fn fused(&mut self, op: &Op, fused: &Fused) -> Result<(), String> {
        let input = self.graph.ty(op.args[0]);
        let dtype = input.dtype.number().ok_or("no dtype")?;
        let hidden = self.shapes.shape(op.args[0]).last().copied().unwrap_or(1);
        let size = self.graph.group(&fused.group).map_or(1, |group| group.size as usize);
        let operand =
            |role: FusedArg| fused.args.iter().position(|arg| *arg == role).map(|at| op.args[at + 1]);
        for first in (0..self.ranks.len()).step_by(size) {
            let given: Vec<Vec<f64>> = (0..size).map(|rank| self.read(first + rank, op.args[0])).collect();
            let sum: Vec<f64> =
                (0..given[0].len()).map(|at| self.reduced(ReduceOp::Sum, input.dtype, &given, at)).collect();
            for rank in first..first + size {
                let read = |role: FusedArg| operand(role).map(|value| self.read(rank, value));
                let scale = read(FusedArg::Scale).map(|scale| scale[0]).or(fused.scale);
                let call = norm::Call {
                    dtype,
                    hidden,
                    residual: read(FusedArg::Residual),
                    weight: read(FusedArg::Weight),
                    fused,
                    scale: scale.unwrap_or(1.0),
                    exact: self.arithmetic == Arithmetic::Exact,
                };
                let results = call.run(&sum);
                for (role, out) in fused.outputs.iter().zip(&op.outs) {
                    let data = match role {
                        FusedOutput::Sum => &sum,
                        FusedOutput::Residual => &results.residual,
                        FusedOutput::Norm => &results.norm,
                        FusedOutput::InverseRms => &results.inverse_rms,
                        FusedOutput::Codes => &results.codes,
                        FusedOutput::Scales => &results.scales,
                    };
                    self.write(rank, *out, data);
                }
            }
        }
        Ok(())
    }
}

/// A linear function of all elements, whose weights follow from the text.
fn opaque(text: &str, args: &[Vec<f64>], count: usize) -> Vec<f64> {
    let seed = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let weight = |arg: usize, at: usize| {
        let mixed = (seed ^ ((arg as u64) << 32) ^ (at as u64 % 1021)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (mixed >> 40) as f64 / f64::from(1 << 24) - 0.5
    };
    let total: usize = args.iter().map(Vec::len).sum::<usize>().max(1);
    let own = weight(usize::MAX >> 33, 0);
    let mixed: f64 = args
        .iter()
        .enumerate()
        .map(|(arg, data)| data.iter().enumerate().map(|(at, x)| weight(arg, at) * x).sum::<f64>())
        .sum::<f64>()
        / total as f64;
    let neighbour = |at: usize| {
        let data = args.iter().enumerate().filter(|(_, data)| !data.is_empty());
        data.map(|(arg, data)| weight(arg, at + 7) * data[at % data.len()]).sum::<f64>()
    };
    (0..count).map(|at| own + mixed + neighbour(at)).collect()
}
