//! Numbers for the inputs of every rank.

use antiphon_tensor::DType;

use super::{
    super::{Tensor, numbers::full},
    sizes,
};
use crate::{graph::Graph, op::Kind, types::Element};

/// Which numbers inputs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Draw {
    /// Small integers.
    Integers,
    /// Fractions of a few bits, between -2 and 2.
    Fractions,
    /// Numbers between -2 and 2 with all bits that their type has, so that what is computed of them is rounded.
    AllBits,
}

/// Random numbers between 0 and 1.
struct Chance(u64);

impl Chance {
    fn of(seed: u64) -> Self {
        Self(seed ^ 0x9E37_79B9_7F4A_7C15)
    }

    fn number(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as f64 / f64::from(1u32 << 31)
    }
}

/// Numbers for the inputs of every rank.
pub(super) fn inputs(graph: &Graph, world: usize, seed: u64, draw: Draw) -> Result<Vec<Vec<Tensor>>, String> {
    let mut chance = Chance::of(seed);
    let mut rank = || {
        let given = graph.ops.iter().filter(|op| matches!(op.kind, Kind::Input | Kind::Constant));
        let tensors = given.map(|op| {
            let dtype = graph.ty(op.outs[0]).dtype;
            let shapes = sizes(graph, op).ok_or_else(|| format!("{}: a size without a hint", op.name))?;
            let shape = shapes.into_iter().next().unwrap_or_default();
            let element = |number: f64| match (dtype, draw) {
                // Integers have their own bounds at times.
                (Element::Number(dtype), _) if !dtype.is_float() && number > 0.9 => {
                    100.0 * (number - 0.95) * 25.0
                }
                (Element::Number(DType::F64 | DType::F32 | DType::F16 | DType::BF16), Draw::AllBits) => {
                    number * 4.0 - 2.0
                }
                (_, Draw::Integers) => (number * 9.0).floor() - 4.0,
                (_, Draw::Fractions | Draw::AllBits) => (number * 64.0).round() / 16.0 - 2.0,
            };
            let data = (0..shape.iter().product()).map(|_| full(dtype, element(chance.number()))).collect();
            Ok(Tensor { dtype, shape, data })
        });
        tensors.collect::<Result<Vec<_>, String>>()
    };
    (0..world).map(|_| rank()).collect()
}

/// How far [`moved`] moves a number, relative to it: as far as the widest rounding goes, so that elements of every type have
/// another number there.
pub(super) const STEP: f64 = 1.0 / 128.0;

/// The same inputs, each floating-point number of which is moved up or down.
pub(super) fn moved(inputs: &[Vec<Tensor>], seed: u64) -> Vec<Vec<Tensor>> {
    let (mut chance, mut moved) = (Chance::of(seed), inputs.to_vec());
    for tensor in moved.iter_mut().flatten().filter(|tensor| tensor.dtype.is_float()) {
        for x in &mut tensor.data {
            let step = if chance.number() < 0.5 { -STEP } else { STEP };
            *x = full(tensor.dtype, *x * (1.0 + step));
        }
    }
    moved
}
