//! In which elements an operation computes: the table of `docs/design/lowering.md` in code.

use antiphon_tensor::DType;

use super::F32;
use crate::{
    numerics::rounded,
    op::{Binary, Kind, Reduction, Unary},
    types::{Element, Type},
};

/// The elements in which an operation computes on operands of these types; what it has no meaning for is the error.
///
/// Each operand is converted to these elements, exactly, and the result from them.
pub(crate) fn computed(kind: &Kind, args: &[&Type]) -> Result<Element, String> {
    let elements = || args.iter().map(|ty| ty.dtype.to_string()).collect::<Vec<_>>().join(" and ");
    let none = |what: &str| Err(format!("{what} of {}", elements()));
    match kind {
        Kind::Unary { op } => {
            let element = wide(args[0].dtype);
            match element {
                Some(element) if element.is_float() => Ok(element),
                Some(element) if matches!(op, Unary::Neg | Unary::Abs | Unary::Relu) => Ok(element),
                _ => none(&format!("{op:?}")),
            }
        }
        Kind::Binary { op, scalar, swapped: _ } => {
            let Some(element) = common(args) else { return none(&format!("{op:?}")) };
            if element.is_float() {
                return Ok(element);
            }
            let divides = matches!(op, Binary::Div | Binary::Pow);
            let dtype = element.number().filter(|_| !divides);
            match (dtype, scalar) {
                (Some(dtype), Some(number)) if !has(dtype, *number) => {
                    Err(format!("the number {number} is none of {dtype}"))
                }
                (Some(_), _) => Ok(element),
                (None, _) => none(&format!("{op:?}")),
            }
        }
        Kind::Reduce { op, dims: _, keepdim: _ } => match wide(args[0].dtype) {
            Some(element) if element.is_float() || *op != Reduction::Mean => Ok(element),
            _ => none(&format!("{op:?}")),
        },
        Kind::MatMul => match common(args) {
            Some(element) if element.is_float() && args[0].dtype == args[1].dtype => Ok(element),
            _ => none("a product"),
        },
        _ => Err("it does not compute".into()),
    }
}

/// Whether an operation that computes gives results of this type.
pub(super) fn check(kind: &Kind, args: &[&Type], out: &Type) -> Result<(), String> {
    match kind {
        Kind::Cast => return converts(args[0].dtype, out.dtype),
        Kind::Full { .. } => {
            let is_known = !matches!(out.dtype, Element::Opaque(_));
            return if is_known { Ok(()) } else { Err(format!("a number as {}", out.dtype)) };
        }
        _ => {}
    }
    let element = computed(kind, args)?;
    let fits = match kind {
        // Sums of integers wrap in the result's elements, which have those of the operand.
        Kind::Reduce { op: Reduction::Sum, dims: _, keepdim: _ } if !element.is_float() => {
            !out.dtype.is_float() && has_all(out.dtype, element)
        }
        _ if element.is_float() => out.dtype.is_float(),
        _ => out.dtype == element,
    };
    if fits { Ok(()) } else { Err(format!("it computes in {element}, and its result is of {}", out.dtype)) }
}

/// Whether elements can be converted: what has no numbers only to itself.
pub(super) fn converts(from: Element, to: Element) -> Result<(), String> {
    let is_number = |element| !matches!(element, Element::Opaque(_));
    match from == to || (is_number(from) && is_number(to)) {
        true => Ok(()),
        false => Err(format!("{from} is not converted to {to}")),
    }
}

/// Whether a type of integers has a number. The least f64 above all i64 would be rounded to itself.
fn has(dtype: DType, number: f64) -> bool {
    rounded(dtype, number) == number && (dtype != DType::I64 || number < 2f64.powi(63))
}

/// Whether `wide` has every value of `narrow`.
pub(crate) fn has_all(wide: Element, narrow: Element) -> bool {
    use DType::{BF16, F16, F32, F64, I8, I32, I64, U8};
    let (Element::Number(wide), narrow) = (wide, narrow) else { return wide == narrow };
    match narrow {
        Element::E4m3 => wide.is_float(),
        Element::Number(narrow) => match (wide, narrow) {
            _ if wide == narrow => true,
            (F64, F32 | F16 | BF16 | I32 | I8 | U8) | (F32, F16 | BF16 | I8 | U8) => true,
            (F16 | BF16, I8 | U8) | (I64, I32 | I8 | U8) | (I32, I8 | U8) => true,
            _ => false,
        },
        _ => false,
    }
}

/// The elements that arithmetic on one operand is done in: halves are widened to f32.
fn wide(element: Element) -> Option<Element> {
    match element {
        Element::Number(DType::F16 | DType::BF16) => Some(F32),
        Element::Number(_) => Some(element),
        _ => None,
    }
}

/// The elements that two operands are converted to: those of the wider one. f64 goes with f64 alone, and floats with floats.
fn common(args: &[&Type]) -> Option<Element> {
    let [first, rest @ ..] = args else { return None };
    rest.iter().try_fold(wide(first.dtype)?, |element, ty| {
        let other = wide(ty.dtype)?;
        match (element.is_float(), other.is_float()) {
            (true, true) => (element == other).then_some(element),
            (false, false) if has_all(element, other) => Some(element),
            (false, false) if has_all(other, element) => Some(other),
            _ => None,
        }
    })
}
