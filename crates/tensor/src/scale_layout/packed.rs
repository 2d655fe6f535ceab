//! The order of FP8 group scales that four to a word travel in.

use crate::{TensorError, shape::too_large};

/// The addresses of [`UE8M0`](crate::UE8M0) group scales, packed by fours into 32-bit words.
///
/// A word holds four neighbouring groups of one token, the first in its lowest byte. The words form a matrix of
/// tokens by ⌈groups / 4⌉ that is stored column by column, each column padded to a multiple of 4 words so that it
/// starts at 16 bytes, as the tensor memory accelerator of Hopper wants; only the last column is not padded. This is
/// the `scale_out` of FlashInfer's per-token-group FP8 patterns, an int32 tensor of [`shape`](PackedScales::shape)
/// and [`strides`](PackedScales::strides), and of DeepEP's low-latency dispatch with `use_ue8m0`.
///
/// Padding bytes are written as 0: the words of tokens that do not exist, and the groups that the last word of a
/// token does not have.
///
/// ```
/// use antiphon_tensor::PackedScales;
///
/// // 5 tokens of 6 groups: columns of 8 and 5 words.
/// let scales = PackedScales::new(5, 6)?;
/// assert_eq!((scales.shape(), scales.strides()), ([5, 2], [1, 8]));
/// assert_eq!(scales.size(), 4 * (8 + 5));
/// assert_eq!(scales.offset(3, 5)?, 4 * (8 + 3) + 1);
/// assert_eq!(scales.position(45), Some((3, 5)));
/// assert_eq!(scales.position(46), None);
/// # Ok::<(), antiphon_tensor::TensorError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PackedScales {
    tokens: usize,
    groups: usize,
}

impl PackedScales {
    /// The addresses for `tokens` with `groups` scales each.
    ///
    /// # Errors
    ///
    /// [`TensorError::ShapeOverflow`] if the padded size cannot be addressed.
    pub fn new(tokens: usize, groups: usize) -> Result<Self, TensorError> {
        let words =
            tokens.checked_next_multiple_of(4).and_then(|tokens| tokens.checked_mul(groups.div_ceil(4)));
        match words {
            Some(words) if words <= isize::MAX as usize / 4 => Ok(Self { tokens, groups }),
            _ => Err(too_large(&[tokens, groups], 1)),
        }
    }

    /// The number of tokens, without padding.
    #[inline]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// The number of groups of a token, without padding.
    #[inline]
    pub const fn groups(&self) -> usize {
        self.groups
    }

    /// Tokens and words of a token: the shape of the tensor of 32-bit words.
    #[inline]
    pub const fn shape(&self) -> [usize; 2] {
        [self.tokens, self.groups.div_ceil(4)]
    }

    /// The steps from a token and from a word of a token to the next, in 32-bit words.
    #[inline]
    pub const fn strides(&self) -> [usize; 2] {
        [1, self.tokens.next_multiple_of(4)]
    }

    /// The number of bytes, padding included.
    #[inline]
    pub const fn size(&self) -> usize {
        let [tokens, words] = self.shape();
        if tokens == 0 || words == 0 { 0 } else { 4 * ((words - 1) * self.strides()[1] + tokens) }
    }

    /// The byte that holds the scale of a token's group.
    ///
    /// # Errors
    ///
    /// [`TensorError::IndexOutOfBounds`] outside the tokens and groups.
    pub fn offset(&self, token: usize, group: usize) -> Result<usize, TensorError> {
        if token >= self.tokens || group >= self.groups {
            let (index, shape) = (vec![token, group], vec![self.tokens, self.groups]);
            return Err(TensorError::IndexOutOfBounds { index, shape });
        }
        Ok(self.at(token, group))
    }

    /// [`offset`](PackedScales::offset) of what is known to be inside.
    #[inline]
    pub(crate) const fn at(&self, token: usize, group: usize) -> usize {
        (group / 4 * self.strides()[1] + token) * 4 + group % 4
    }

    /// The token and group whose scale a byte holds, or `None` for padding and beyond the end.
    pub fn position(&self, offset: usize) -> Option<(usize, usize)> {
        if offset >= self.size() {
            return None;
        }
        let (word, byte) = (offset / 4, offset % 4);
        let [_, column] = self.strides();
        let (token, group) = (word % column, word / column * 4 + byte);
        (token < self.tokens && group < self.groups).then_some((token, group))
    }

    /// Every scale's token, group and byte, token by token.
    pub fn iter(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let packed = *self;
        let token = move |token| (0..packed.groups).map(move |group| (token, group, packed.at(token, group)));
        (0..self.tokens).flat_map(token)
    }
}
