//! Validating tensors once, at the door: what comes after works on bytes.

use antiphon_tensor::{DType, Device, TensorView, TensorViewMut};

use crate::error::{MoeError, Result, refused};

/// The bytes of a vector. A row is a whole number of vectors.
pub(crate) const VECTOR: usize = 16;

/// Which tensor of which call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Name {
    pub(crate) call: &'static str,
    pub(crate) which: &'static str,
}

impl Name {
    fn check(self, view: &TensorView<'_>, serves: Device) -> Result<()> {
        let Self { call, which } = self;
        if view.device() != serves {
            return Err(MoeError::Device { call, which, device: view.device(), serves });
        }
        view.contiguous().map_err(|source| MoeError::Tensor { call, which, source })
    }

    /// Refuses a tensor of other sizes. `rule` says which they are, in letters.
    pub(crate) fn has_shape(self, view: &TensorView<'_>, sizes: &[usize], rule: &str) -> Result<()> {
        if view.shape() == sizes {
            return Ok(());
        }
        let Self { call, which } = self;
        let expected = format!("{rule} = {sizes:?}");
        Err(MoeError::Shape { call, which, actual: view.shape().to_vec(), expected })
    }

    /// Refuses a tensor that is no matrix; its rows and columns.
    pub(crate) fn matrix(self, view: &TensorView<'_>, rule: &str) -> Result<(usize, usize)> {
        let Self { call, which } = self;
        match *view.shape() {
            [rows, columns] => Ok((rows, columns)),
            ref shape => {
                Err(MoeError::Shape { call, which, actual: shape.to_vec(), expected: rule.to_owned() })
            }
        }
    }

    /// Refuses elements of other types.
    pub(crate) fn has_dtype(self, actual: DType, allowed: &[DType]) -> Result<()> {
        if allowed.contains(&actual) {
            return Ok(());
        }
        let Self { call, which } = self;
        let expected = allowed.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(" or ");
        Err(MoeError::DType { call, which, actual, expected })
    }

    /// What a tensor in host memory holds.
    pub(crate) fn bytes<'a>(self, view: &TensorView<'a>) -> Result<&'a [u8]> {
        self.check(view, Device::Host)?;
        let Self { call, which } = self;
        view.as_bytes().map_err(|source| MoeError::Tensor { call, which, source })
    }

    /// The address of a tensor on a GPU.
    pub(crate) fn address(self, view: &TensorView<'_>, serves: Device) -> Result<u64> {
        self.check(view, serves)?;
        Ok(view.as_ptr().addr() as u64)
    }

    /// The address of a tensor on a GPU whose rows are moved in whole vectors.
    pub(crate) fn vectors(self, view: &TensorView<'_>, serves: Device) -> Result<u64> {
        let address = self.address(view, serves)?;
        if view.numel() == 0 || address.is_multiple_of(VECTOR as u64) {
            return Ok(address);
        }
        Err(refused(
            self.call,
            format!("the {} is at {address:#x}, which is no multiple of {VECTOR}", self.which),
        ))
    }

    /// The place of a tensor in host memory.
    pub(crate) fn bytes_mut<'a>(self, view: &'a mut TensorViewMut<'_>) -> Result<&'a mut [u8]> {
        self.check(&view.as_view(), Device::Host)?;
        let Self { call, which } = self;
        view.as_mut_bytes().map_err(|source| MoeError::Tensor { call, which, source })
    }
}

/// The numbers of experts, 32 or 64 bits wide.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ids<'a> {
    bytes: &'a [u8],
    size: usize,
    num_experts: usize,
}

/// What experts' numbers may be.
pub(crate) const ID_TYPES: [DType; 2] = [DType::I64, DType::I32];

impl<'a> Ids<'a> {
    pub(crate) fn new(name: Name, view: &TensorView<'a>, num_experts: usize) -> Result<Self> {
        name.has_dtype(view.dtype(), &ID_TYPES)?;
        Ok(Self { bytes: name.bytes(view)?, size: view.dtype().size(), num_experts })
    }

    /// The expert at a place, if it names one.
    #[inline]
    pub(crate) fn get(&self, index: usize) -> Option<usize> {
        let id = read_id(&self.bytes[index * self.size..][..self.size]);
        usize::try_from(id).ok().filter(|&id| id < self.num_experts)
    }
}

fn read_id(bytes: &[u8]) -> i64 {
    match *bytes {
        [a, b, c, d] => i64::from(i32::from_ne_bytes([a, b, c, d])),
        _ => i64::from_ne_bytes(bytes.try_into().expect("ids have 4 or 8 bytes")),
    }
}

/// Writes an expert's number in as many bytes as its place has.
pub(crate) fn write_id(place: &mut [u8], id: i32) {
    match place.len() {
        4 => place.copy_from_slice(&id.to_ne_bytes()),
        _ => place.copy_from_slice(&i64::from(id).to_ne_bytes()),
    }
}
