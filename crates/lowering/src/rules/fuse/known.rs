//! What is known of the whole graph before any sum is looked at.

use std::rc::Rc;

use super::{
    super::context::Context,
    matcher::{Node, Term, Terms},
};
use crate::{
    analysis::Analysis,
    graph::Graph,
    hash::HashMap,
    ids::ValueId,
    lists::Lists,
    numerics::Numerics,
    op::{Kind, Unary},
    types::Element,
    verify::is_fusible,
};

/// `1/√(mean(x²) + eps)`.
pub(super) struct InverseRms {
    pub(super) x: Term,
    pub(super) eps: f64,
}

/// What is known of the whole graph.
pub(super) struct Known {
    pub(super) analysis: Rc<Analysis>,
    pub(super) close: Terms,
    pub(super) of: Vec<Option<Term>>,
    pub(super) same: Terms,
    pub(super) same_of: Vec<Option<Term>>,
    /// The values of each term that has any.
    by_term: Lists<ValueId>,
    /// Values of E4M3.
    pub(super) codes: Vec<ValueId>,
    pub(super) inverses: HashMap<Term, InverseRms>,
    /// For each `x`, the values that have a factor of it and of its inverse RMS, which is the second.
    pub(super) norms: HashMap<Term, Vec<(ValueId, Term)>>,
}

impl Known {
    pub(super) fn of(cx: &mut Context<'_>) -> Self {
        let analysis = cx.analysis();
        let graph = &cx.graph;
        let mut same = Terms::new(Numerics::Same);
        let same_of = same.of(graph, &analysis);
        let mut close = Terms::new(Numerics::Close);
        let of = close.of(graph, &analysis);
        let values = of.iter().enumerate().filter_map(|(index, term)| Some(((*term)?, ValueId::from(index))));
        let by_term = Lists::of(close.count(), &values.collect::<Vec<_>>());
        let is_code = |value: &ValueId| graph.ty(*value).dtype == Element::E4m3;
        let codes = (0..graph.values.len()).map(ValueId::from).filter(is_code).collect();
        let (mut inverses, mut norms) = (HashMap::default(), HashMap::<Term, Vec<_>>::default());
        for (index, value) in graph.values.iter().enumerate() {
            let Some(term) = of[index] else { continue };
            let factors = close.factors(term);
            for factor in &factors {
                if !inverses.contains_key(factor)
                    && let Some(inverse) = inverse_rms(&close, *factor)
                {
                    inverses.insert(*factor, inverse);
                }
                if let Some(inverse) = inverses.get(factor)
                    && factors.contains(&inverse.x)
                    && value.ty.dtype.number().is_some_and(is_fusible)
                {
                    norms.entry(inverse.x).or_default().push((ValueId::from(index), *factor));
                }
            }
        }
        Self { analysis, close, of, same, same_of, by_term, codes, inverses, norms }
    }

    pub(super) fn term(&self, value: ValueId) -> Option<Term> {
        self.of[value.index()]
    }

    /// All values of a term, of any elements.
    pub(super) fn all_values(&self, term: Term) -> &[ValueId] {
        self.by_term.get(term as usize)
    }

    /// Values of a term that have these elements, but for views and copies of others.
    pub(super) fn values<'k>(
        &'k self,
        graph: &'k Graph,
        term: Term,
        dtype: Element,
    ) -> impl Iterator<Item = ValueId> + 'k {
        self.all_values(term)
            .iter()
            .copied()
            .filter(move |value| graph.ty(*value).dtype == dtype && !self.follows(graph, *value))
    }

    /// Whether a value only shows, or copies, another of its term and elements, or is in flight.
    pub(super) fn follows(&self, graph: &Graph, value: ValueId) -> bool {
        let Some(op) = self.analysis.op_of(graph, value) else { return true };
        if matches!(op.kind, Kind::Start { .. }) {
            return true;
        }
        let moves = matches!(op.kind, Kind::View { .. } | Kind::Copy);
        moves
            && self.term(op.args[0]) == self.term(value)
            && graph.ty(op.args[0]).dtype == graph.ty(value).dtype
    }
}

/// Reads `1/√(mean(x²) + eps)`.
pub(super) fn inverse_rms(terms: &Terms, term: Term) -> Option<InverseRms> {
    let Node::Unary(Unary::Rsqrt, inner) = terms.node(term) else { return None };
    let summands = terms.summands(inner);
    let (numbers, others): (Vec<Term>, Vec<Term>) =
        summands.into_iter().partition(|term| terms.as_number(*term).is_some());
    let ([mean], true) = (&others[..], numbers.len() <= 1) else { return None };
    let eps = numbers.first().and_then(|eps| terms.as_number(*eps)).unwrap_or(0.0);
    let factors = terms.factors(*mean);
    let rows = |term: &Term| match terms.node(*term) {
        Node::Rows(crate::Reduction::Sum, extent, squares) => {
            Some((terms.size(extent).as_constant()? as f64, squares))
        }
        _ => None,
    };
    let (extent, squares) = factors.iter().find_map(rows)?;
    let inverse = factors.iter().find_map(|term| terms.as_number(*term));
    // A row of one element has no factor.
    if factors.len() != if extent == 1.0 { 1 } else { 2 }
        || inverse.unwrap_or(1.0) as f32 != (1.0 / extent) as f32
    {
        return None;
    }
    match terms.factors(squares)[..] {
        [x, other] if x == other => Some(InverseRms { x, eps }),
        _ => None,
    }
}
