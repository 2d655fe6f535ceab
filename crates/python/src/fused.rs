//! A fused all-reduce as a value, over the arrays of a caller.

use antiphon::collectives::fusion::{FusedAllReduce, Operand, Role, Source, TensorHandle};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{arguments::overlap, operand::Tensor};

/// A fused all-reduce with its memory, as plain values that can go to another thread.
pub(crate) type Fused = FusedAllReduce<Tensor>;

impl TensorHandle for Tensor {
    unsafe fn operand<'a>(&self) -> Operand<'a> {
        // SAFETY: passed on; the array holds `count` elements, one behind the other.
        unsafe { Operand::from_raw_parts(self.data, self.count, self.dtype, self.device) }
    }
}

/// The GPU that a call is on.
pub(crate) fn cuda_device(call: &Fused) -> Option<u32> {
    let tensor = match call.source() {
        Source::Tensor { input: tensor }
        | Source::MoeReduction { shared: tensor, .. }
        | Source::MoeFinalize { rows: tensor, .. } => tensor,
    };
    tensor.device.cuda_ordinal()
}

/// The keyword of a role.
fn keyword(role: Role) -> &'static str {
    match role {
        Role::Input => "x",
        Role::Experts => "experts",
        Role::ExpertScales => "expert_scales",
        Role::Shared => "shared",
        Role::PreNormWeight => "pre_weight",
        _ => role.name(),
    }
}

/// Refuses outputs of the method `call` that share memory with something else, but for those that [`FusedAllReduce`] does in place:
/// one in the place of `x`, and `residual_out` in that of the residual.
pub(crate) fn check_overlap(call: &str, fused: &Fused) -> PyResult<()> {
    let mut tensors = Vec::with_capacity(16);
    fused.for_each(|role, tensor| tensors.push((role, *tensor)));
    let of = |role| tensors.iter().find_map(|&(known, tensor)| (known == role).then_some(tensor));
    let residual_takes_x = matches!(
        (of(Role::Input), of(Role::ResidualOut)),
        (Some(x), Some(residual_out)) if same_place(&x, &residual_out)
    );
    for (index, output) in Role::OUTPUTS.iter().enumerate() {
        let Some(tensor) = of(*output) else { continue };
        let earlier = &Role::OUTPUTS[..=index];
        for (other, in_the_way) in tensors.iter().filter(|(role, _)| !earlier.contains(role)) {
            let may_be_same = match (other, output) {
                (Role::Input, Role::SumOut | Role::ResidualOut | Role::NormOut) => true,
                (Role::Residual, Role::ResidualOut) => !residual_takes_x,
                _ => false,
            };
            if overlap(&tensor, in_the_way) && !(may_be_same && same_place(&tensor, in_the_way)) {
                let (output, other) = ((keyword(*output), &tensor), (keyword(*other), in_the_way));
                return Err(too_close(call, output, other, may_be_same));
            }
        }
    }
    Ok(())
}

/// Whether these are the same bytes, at least one.
fn same_place(a: &Tensor, b: &Tensor) -> bool {
    a.data == b.data && a.bytes() == b.bytes() && a.bytes() > 0
}

#[cold]
fn too_close(
    call: &str,
    (name, output): (&str, &Tensor),
    (other, tensor): (&str, &Tensor),
    may_be_same: bool,
) -> PyErr {
    let place = |tensor: &Tensor| format!("{} bytes at {:p}", tensor.bytes(), tensor.data);
    let rule = if may_be_same { "apart, or the same" } else { "apart" };
    let places = format!("{} and {}", place(output), place(tensor));
    PyValueError::new_err(format!("{call}: {name} and {other} overlap: they must be {rule}, not {places}"))
}
