//! Storages of one rank, and values as views of them.

use crate::{
    analysis::Analysis,
    graph::Graph,
    ids::{StoreId, ValueId},
    sym::SymExpr,
};

/// The extents, strides and offset of each value, with the symbols at their hints.
pub(super) struct Shapes {
    of: Vec<(Vec<usize>, Vec<usize>, usize)>,
    hints: Vec<(String, i64)>,
}

impl Shapes {
    pub(super) fn of(graph: &Graph) -> Result<Self, String> {
        let hints = graph.syms.iter().filter_map(|sym| Some((sym.name.clone(), sym.hint?))).collect();
        let mut shapes = Self { of: Vec::with_capacity(graph.values.len()), hints };
        for value in &graph.values {
            let shape = shapes.sizes(&value.ty.shape)?;
            let strides = match &value.ty.strides {
                Some(strides) => shapes.sizes(strides)?,
                None => row_major(&shape).ok_or_else(|| format!("{} is too large", value.name))?,
            };
            let offset = shapes.size(&value.ty.offset)?;
            shapes.of.push((shape, strides, offset));
        }
        Ok(shapes)
    }

    /// The value of a size.
    pub(super) fn size(&self, size: &SymExpr) -> Result<usize, String> {
        let hint = |name: &str| Some(self.hints.iter().find(|(other, _)| other == name)?.1);
        let value = size.value(&hint).and_then(|value| usize::try_from(value).ok());
        value.ok_or_else(|| format!("the size {size} is not known to be one"))
    }

    fn sizes(&self, sizes: &[SymExpr]) -> Result<Vec<usize>, String> {
        sizes.iter().map(|size| self.size(size)).collect()
    }

    pub(super) fn shape(&self, value: ValueId) -> &[usize] {
        &self.of[value.index()].0
    }

    /// How many elements of its storage a value reaches over; `None` if that overflows.
    fn extent(&self, value: ValueId) -> Option<usize> {
        let (shape, strides, offset) = &self.of[value.index()];
        if shape.contains(&0) {
            return Some(0);
        }
        let reach = shape
            .iter()
            .zip(strides)
            .try_fold(*offset, |end, (size, stride)| end.checked_add((size - 1).checked_mul(*stride)?))?;
        reach.checked_add(1)
    }

    /// Where in its storage each element of a value is, in row-major order.
    fn places(&self, value: ValueId) -> Vec<usize> {
        let (shape, strides, offset) = &self.of[value.index()];
        let mut places = Vec::new();
        each_index(shape, |index| {
            places.push(offset + index.iter().zip(strides).map(|(i, stride)| i * stride).sum::<usize>());
        });
        places
    }
}

fn row_major(shape: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![1usize; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim].checked_mul(shape[dim])?;
    }
    Some(strides)
}

/// All indices of a shape, in row-major order.
pub(super) fn each_index(shape: &[usize], mut body: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut index = vec![0; shape.len()];
    loop {
        body(&index);
        let Some(dim) = (0..shape.len()).rev().find(|dim| index[*dim] + 1 < shape[*dim]) else { return };
        index[dim] += 1;
        index[dim + 1..].fill(0);
    }
}

/// A tensor broadcast to a shape.
pub(super) fn spread((data, from): (&Vec<f64>, &[usize]), to: &[usize]) -> Vec<f64> {
    if from == to {
        return data.clone();
    }
    let lead = to.len() - from.len();
    let mut spread = Vec::new();
    each_index(to, |index| {
        let own = index[lead..].iter().zip(from);
        spread.push(data[own.fold(0, |at, (i, size)| at * size + if *size == 1 { 0 } else { *i })]);
    });
    spread
}

/// The storages of one rank.
pub(super) struct Memory {
    stores: Vec<Vec<f64>>,
}

impl Memory {
    pub(super) fn new(
        graph: &Graph,
        analysis: &Analysis,
        shapes: &Shapes,
        limit: usize,
    ) -> Result<Self, String> {
        let mut total = 0usize;
        let mut stores = Vec::with_capacity(analysis.stores.len());
        for (index, storage) in analysis.stores.iter().enumerate() {
            let extents = analysis.values(StoreId::from(index)).iter().map(|value| shapes.extent(*value));
            let own = shapes
                .shape(storage.root)
                .iter()
                .try_fold(1usize, |product, size| product.checked_mul(*size));
            let extent = extents.chain([own]).try_fold(0, |most, extent| Some(most.max(extent?)));
            total = extent.and_then(|extent| total.checked_add(extent)).unwrap_or(usize::MAX);
            if total > limit {
                let name = graph.name(storage.root);
                return Err(format!(
                    "with {name} there are more than {limit} elements, the most that are interpreted"
                ));
            }
            stores.push(vec![0.0; extent.unwrap_or(0)]);
        }
        Ok(Self { stores })
    }

    pub(super) fn read(&self, analysis: &Analysis, shapes: &Shapes, value: ValueId) -> Vec<f64> {
        let store = &self.stores[analysis.store[value.index()].expect("of a verified graph").index()];
        shapes.places(value).into_iter().map(|place| store[place]).collect()
    }

    pub(super) fn write(&mut self, analysis: &Analysis, shapes: &Shapes, value: ValueId, data: &[f64]) {
        let store = &mut self.stores[analysis.store[value.index()].expect("of a verified graph").index()];
        for (place, element) in shapes.places(value).into_iter().zip(data) {
            store[place] = *element;
        }
    }
}
