//! A graph run by the book, for all ranks of a world at once.

mod memory;
mod norm;

use antiphon_operation::ReduceOp;
use antiphon_tensor::{DType, E4M3};

use crate::{
    analysis::Analysis,
    graph::{Graph, Op},
    ids::ValueId,
    op::{Binary, Coll, Fused, FusedArg, FusedOutput, Kind, Prim, Reduction, Unary},
    terms::rounded,
    types::{Element, Type},
    verify::verify,
};
use memory::{Memory, Shapes};

/// The most elements that all storages of one rank may have together.
const MAX_ELEMENTS: usize = 1 << 26;

/// A tensor of one rank: row-major.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensor {
    /// Of what.
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
    /// Floating-point numbers not at all, beyond f64. What [`Numerics::Close`](crate::Numerics::Close) leaves equal, is.
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
        self.write(rank, value, &tensor.data);
        Ok(())
    }

    /// A number as a result of this type.
    fn round(&self, to: Element, value: f64) -> f64 {
        let exact = self.arithmetic == Arithmetic::Exact;
        match to {
            Element::Number(dtype) if !(exact && dtype.is_float()) => rounded(dtype, value),
            Element::E4m3 if !exact => E4M3::from_f32(value as f32).to_f32().into(),
            Element::Bool => f64::from(value != 0.0),
            _ => value,
        }
    }

    /// A number as a step of arithmetic on such elements leaves it.
    fn step(&self, of: Element, value: f64) -> f64 {
        match of {
            Element::Number(DType::F32 | DType::F16 | DType::BF16) => self.round(DType::F32.into(), value),
            _ => self.round(of, value),
        }
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
        let (ty, shape) = (self.graph.ty(out), self.shapes.shape(out));
        let count = shape.iter().product();
        let source = |arg: usize| (&args[arg], self.shapes.shape(op.args[arg]));
        let element = |arg: usize| self.graph.ty(op.args[arg]).dtype;
        let rounded = |data: Vec<f64>| data.into_iter().map(|value| self.round(ty.dtype, value)).collect();
        Ok(match &op.kind {
            Kind::Full { value } => vec![self.round(ty.dtype, *value); count],
            Kind::Unary { op } => {
                rounded(args[0].iter().map(|x| self.step(element(0), unary(*op, *x))).collect())
            }
            Kind::Binary { op, scalar, swapped } => {
                let x = memory::spread(source(0), shape);
                let y = match scalar {
                    Some(number) => vec![self.step(element(0), *number); count],
                    None => memory::spread(source(1), shape),
                };
                let (x, y) = if *swapped { (y, x) } else { (x, y) };
                let wide = if element(0).is_float() || scalar.is_some() { element(0) } else { ty.dtype };
                rounded(x.iter().zip(&y).map(|(x, y)| self.step(wide, binary(*op, *x, *y))).collect())
            }
            Kind::Cast | Kind::Copy => rounded(args[0].clone()),
            Kind::Assign => rounded(memory::spread(source(1), shape)),
            Kind::Reduce { op, dims, .. } => rounded(reduce(*op, source(0), dims, count)),
            Kind::MatMul => {
                let (k, n) = (self.shapes.shape(op.args[0])[1], shape[1]);
                let dot = |at: usize| {
                    let (row, column) = (at / n, at % n);
                    (0..k).fold(0.0, |sum, i| {
                        self.step(ty.dtype, sum + args[0][row * k + i] * args[1][i * n + column])
                    })
                };
                rounded((0..count).map(dot).collect())
            }
            Kind::Opaque { target, attributes, effect, communicates, .. } => {
                let turn = if *effect || *communicates { self.effects } else { 0 };
                rounded(opaque(&format!("{target} {attributes} {index} {turn}"), args, count))
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
        let step = |value: f64| match dtype.is_float() {
            true => self.step(dtype, value),
            false => value,
        };
        let values = given.iter().map(|data| data[at]);
        let total = match red {
            ReduceOp::Sum | ReduceOp::Avg => values.reduce(|sum, x| step(sum + x)),
            ReduceOp::Prod => values.reduce(|product, x| step(product * x)),
            ReduceOp::Min => values.reduce(|a, b| if a.is_nan() || a < b { a } else { b }),
            ReduceOp::Max => values.reduce(|a, b| if a.is_nan() || a > b { a } else { b }),
            ReduceOp::Band => values.reduce(|a, b| (a as i64 & b as i64) as f64),
            ReduceOp::Bor => values.reduce(|a, b| (a as i64 | b as i64) as f64),
            ReduceOp::Bxor => values.reduce(|a, b| (a as i64 ^ b as i64) as f64),
        };
        let total = total.unwrap_or(0.0);
        let total = if red == ReduceOp::Avg { step(total / given.len() as f64) } else { total };
        match dtype {
            Element::Number(dtype) if !dtype.is_float() => wrapped(dtype, total.trunc()),
            dtype => self.round(dtype, total),
        }
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
                let start = sends[..rank].iter().sum::<usize>() * width;
                let end = start + sends[rank] * width;
                let blocks = given.iter().map(|data| data.get(start..end).ok_or("rows beyond the last"));
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

/// An integer in as many bits as its type has.
fn wrapped(dtype: DType, value: f64) -> f64 {
    let value = value as i64;
    match dtype {
        DType::I32 => f64::from(value as i32),
        DType::I8 => f64::from(value as i8),
        DType::U8 => f64::from(value as u8),
        _ => value as f64,
    }
}

fn unary(op: Unary, x: f64) -> f64 {
    match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Exp => x.exp(),
        Unary::Exp2 => x.exp2(),
        Unary::Log2 => x.log2(),
        Unary::Ceil => x.ceil(),
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::Relu => x.max(0.0),
        Unary::Tanh => x.tanh(),
    }
}

fn binary(op: Binary, x: f64, y: f64) -> f64 {
    match op {
        Binary::Add => x + y,
        Binary::Sub => x - y,
        Binary::Mul => x * y,
        Binary::Div => x / y,
        Binary::Pow => x.powf(y),
        Binary::Maximum => {
            if x.is_nan() || x > y {
                x
            } else {
                y
            }
        }
        Binary::Minimum => {
            if x.is_nan() || x < y {
                x
            } else {
                y
            }
        }
    }
}

fn reduce(op: Reduction, (data, shape): (&Vec<f64>, &[usize]), dims: &[usize], count: usize) -> Vec<f64> {
    let start = if op == Reduction::Amax { f64::NEG_INFINITY } else { 0.0 };
    let mut results = vec![start; count];
    let mut at = 0;
    memory::each_index(shape, |index| {
        let kept = index.iter().enumerate().filter(|(dim, _)| !dims.contains(dim));
        let place = kept.fold(0, |place, (dim, i)| place * shape[dim] + i);
        let (result, value) = (&mut results[place], data[at]);
        *result = if op == Reduction::Amax { result.max(value) } else { *result + value };
        at += 1;
    });
    let extent: usize = dims.iter().map(|dim| shape[*dim]).product();
    if op == Reduction::Mean {
        results.iter_mut().for_each(|result| *result /= extent as f64);
    }
    results
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
